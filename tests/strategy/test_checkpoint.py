"""Checkpoints are plain Lightning checkpoints: any Trainer can write them, and any Trainer can resume from
them.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, apart, distance, local, same, sharing_captures, trainer, values
from tests.strategy.models import MLP, make

PROGRAMS = {
    "plain": None,
    "1F1B": PROGRAM,
    "gpipe": tuple(piper.schedules.gpipe(stages=2, microbatches=4)),
    "one device": (
        piper.Place(filter={}, devices=[0]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=4),
    ),
}


@sharing_captures
def run(how, folder, steps, ckpt_path=None, name="tied"):
    """Train for `steps` steps and save the last one. Returns the module's values, the path of the checkpoint
    and the record.
    """
    module, loader = make(name)
    program = PROGRAMS[how]
    save = ModelCheckpoint(
        folder, filename=f"{how}-{{step}}", every_n_train_steps=1, save_top_k=-1, monitor=None
    )
    strategy = "auto" if program is None else local(program)
    fit, record = trainer(strategy, [save], max_steps=steps, enable_checkpointing=True)
    fit.fit(module, loader, ckpt_path=ckpt_path)
    return values(module), save.best_model_path, record


@pytest.mark.parametrize(
    "first, second", [("1F1B", "gpipe"), ("gpipe", "one device"), ("plain", "1F1B"), ("1F1B", "plain")]
)
def test_training_goes_on_under_another_program(first, second, tmp_path):
    whole, _, _ = run(second if first == "plain" else first, tmp_path / "whole", 10)
    _, path, _ = run(first, tmp_path / "half", 5)
    assert path.endswith("step=5.ckpt")
    found, _, record = run(second, tmp_path / "other", 10, path)
    assert len(record.losses) == 5
    assert distance(whole, found) < 1e-5
    if "plain" not in (first, second):  # same microbatches, same order of sums
        assert same(whole, found)
    broken = torch.load(path, weights_only=True)
    broken["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
    torch.save(broken, tmp_path / "broken.ckpt")
    found, _, _ = run(second, tmp_path / "wrong", 10, tmp_path / "broken.ckpt")
    assert distance(whole, found) > 1e-4


def test_loads_into_the_plain_module(tmp_path):
    found, path, _ = run("1F1B", tmp_path, 3)
    content = torch.load(path, weights_only=True)
    module, _ = make("tied", seed=1)
    module.load_state_dict(content["state_dict"])
    assert same(values(module), found)
    assert list(content["state_dict"]) == list(module.state_dict())

    _, plain, _ = run("plain", tmp_path, 3)
    expected = torch.load(plain, weights_only=True)
    assert content.keys() - expected.keys() == {"lightning_piper"}
    assert content["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    states = [c["optimizer_states"][0]["state"] for c in (content, expected)]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][i].keys() == states[1][i].keys() for i in states[0])


def test_hooks_are_given_the_keys_of_a_plain_trainer(tmp_path):
    """Also by a plugin that keeps what it was given, and from which the seed may not go."""
    found = []
    for how, strategy in (("plain", "auto"), ("1F1B", local())):
        _, path, _ = run(how, tmp_path, 1)
        content = torch.load(path, weights_only=True)
        saved = list(content)
        hook = LambdaCallback(on_load_checkpoint=lambda trainer, module, content: found.append(list(content)))
        module, loader = make("tied")
        fit, _ = trainer(strategy, [hook], max_steps=2)
        with mock.patch.object(TorchCheckpointIO, "load_checkpoint", return_value=content):
            fit.fit(module, loader, ckpt_path=path)
        assert list(content) == saved
    assert found[0] == found[1] and "loops" in found[0]


def test_dropout_goes_on_with_the_same_masks(tmp_path):
    torch.manual_seed(3)
    whole, _, _ = run("1F1B", tmp_path / "whole", 10, name="dropout")
    torch.manual_seed(3)
    _, path, _ = run("1F1B", tmp_path / "half", 5, name="dropout")
    torch.manual_seed(4)  # another process would be elsewhere in its random numbers
    resumed, _, _ = run("gpipe", tmp_path / "rest", 10, path, name="dropout")
    assert same(whole, resumed)
    content = torch.load(path, weights_only=True)
    content["lightning_piper"]["seed"] += 1000
    torch.save(content, tmp_path / "other.ckpt")
    other, _, _ = run("gpipe", tmp_path / "other", 10, tmp_path / "other.ckpt", name="dropout")
    assert not same(whole, other)


def test_an_interrupted_save_leaves_the_earlier_file(tmp_path, monkeypatch):
    _, path, _ = run("1F1B", tmp_path, 1)
    before = Path(path).read_bytes()

    def half(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", half)
    module, loader = make("tied")
    fit, _ = trainer(local(), max_steps=1)
    fit.fit(module, loader)
    with pytest.raises(OSError, match="disk full"):
        fit.save_checkpoint(path)
    assert Path(path).read_bytes() == before
    assert list(tmp_path.iterdir()) == [Path(path)]


def test_another_optimizer_is_refused(tmp_path):
    _, path, _ = run("1F1B", tmp_path, 1)
    module = MLP()
    content = torch.load(path, weights_only=True)
    content["state_dict"] = module.state_dict()
    torch.save(content, tmp_path / "other.ckpt")
    _, loader = make("mlp")
    fit, _ = trainer(local(), max_steps=2)
    with pytest.raises(piper.PiperError, match=r"parameter groups of .* configure_optimizers returns"):
        fit.fit(module, loader, ckpt_path=tmp_path / "other.ckpt")


class Early(L.Callback):
    """Before the first batch of a resumed training: saves, looks at the optimizer's state, changes some of
    it, and the rate.
    """

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(self.path)
        state = trainer.optimizers[0].state
        self.seen = {f"{n}.{k}": x.clone() for n, p in module.named_parameters() for k, x in state[p].items()}
        state[next(module.parameters())]["exp_avg"].zero_()
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 4


@pytest.mark.parametrize("kind", ["consolidated", "sharded"])
def test_hooks_before_the_first_batch_see_what_was_resumed(kind, tmp_path):
    # The end of an epoch: from the middle, a plain Trainer takes the samples of the epoch again.
    _, path, _ = run("1F1B", tmp_path, 5)
    found = []
    for strategy in ("auto", local(PROGRAMS["gpipe"], checkpoint=kind)):
        module, loader = make("tied", seed=1)
        early = tmp_path / f"early-{len(found)}.ckpt"
        hook = Early(early)
        fit, _ = trainer(strategy, [hook], max_steps=10)
        fit.fit(module, loader, ckpt_path=path)
        saved = torch.load(early, weights_only=True)
        moments = {
            f"{i}.{k}": x
            for i, state in saved["optimizer_states"][0]["state"].items()
            for k, x in state.items()
        }
        found.append(
            (
                values(module),
                saved["state_dict"],
                moments,
                hook.seen,
                saved["optimizer_states"][0]["param_groups"],
            )
        )
    (plain, *saved), (ours, *saved_by_us) = found
    assert distance(plain, ours) < 1e-5
    assert (
        all(same(a, b) for a, b in zip(saved[:3], saved_by_us[:3], strict=True))
        and saved[3] == saved_by_us[3]
    )
    assert len(saved[2]) > 3
    unchanged, _, _ = run("gpipe", tmp_path / "rest", 10, path)
    assert distance(unchanged, ours) > 1e-3


def test_a_training_that_had_no_step_left_saves_what_it_resumed(tmp_path):
    _, path, _ = run("1F1B", tmp_path, 3)
    module, loader = make("tied", seed=1)
    fit, record = trainer(local(), max_steps=3)
    fit.fit(module, loader, ckpt_path=path)
    assert not record.losses
    fit.save_checkpoint(tmp_path / "again.ckpt")
    before, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "again.ckpt"))
    assert same(dict(before["state_dict"]), dict(after["state_dict"]))
    assert before["optimizer_states"][0]["state"] and before["lightning_piper"] == after["lightning_piper"]
    assert set(apart(after["optimizer_states"], before["optimizer_states"]).values()) == {0.0}


def test_saves_after_fit(tmp_path):
    module, loader = make("conv")
    fit, _ = trainer(local(), max_steps=2)
    fit.fit(module, loader)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert same(dict(content["state_dict"]), values(module))
    assert len(content["optimizer_states"][0]["state"]) == len(list(module.parameters()))
    assert isinstance(fit, L.Trainer)
