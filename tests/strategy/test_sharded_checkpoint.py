"""Sharded checkpoints of fits: trainings under any directives can resume from checkpoints of any others."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.metadata import MetadataIndex

import lightning_piper as piper
from lightning_piper.checkpoint.files import earlier_of, read_manifest, temporary_of
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.checkpoint.state import key_of
from lightning_piper.checkpoint.tensor_ranges import Reader
from lightning_piper.ir.values import TensorSpec, view_as
from lightning_piper.strategy import consolidate
from tests.distributed.processes import launch
from tests.strategy.fitting import Batches, distance, local, same, trainer, values
from tests.strategy.models import MLP, make
from tests.strategy.resumed import BATCHES, HOW, train
from tests.strategy.scenarios import equal

CHAIN = [
    "PP2 x DP2 ZeRO-3",
    "one device",
    "DP2 x 2 ZeRO-3",
    "DP2 ZeRO-2",
    "PP2 x DP2 ZeRO-1 and 3",
    "DP2 ZeRO-3, one process",
    "PP2",
    "DP2",
    "DP2 x 2 ZeRO-3",
    "PP2 x DP2 ZeRO-3",
]


def run(how, model, path, steps, resume=None, **options):
    """Train on as many processes as the directives need. Returns what the first process has seen, which is
    what all have seen.
    """
    if not HOW[how].processes:
        with torch.random.fork_rng():
            found = [train(0, how, model, path, steps, resume, **options)]
    else:
        work = path.with_suffix(".run")
        found = launch(HOW[how].processes, work_of, work, how, model, path, steps, resume, options)
    for other in found:
        assert isinstance(other, dict) and "error" not in other, other
        assert equal(other, found[0])
    return found[0]


def work_of(rank, how, model, path, steps, resume, options):
    return train(rank, how, model, path, steps, resume, **options)


def plain(model, steps, path=None):
    """The same training without directives on one device."""
    module, loader = make(model, samples=8 * BATCHES)
    callbacks = [] if path is None else [ModelCheckpoint(path.parent, filename=path.stem, save_top_k=-1)]
    fit, record = trainer(
        "auto", callbacks, max_steps=steps, max_epochs=-1, enable_checkpointing=path is not None
    )
    fit.fit(module, Batches(loader))
    return {"values": values(module), "losses": record.losses}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Trainings that each resume from the one before: (directives, outcome, checkpoint)."""
    folder = tmp_path_factory.mktemp("chain")
    found, before = [], None
    for i, how in enumerate(CHAIN):
        path = folder / f"{i}.ckpt"
        found.append((how, run(how, "varied", path, BATCHES * (i + 1), before), path))
        before = path
    return found


def test_training_goes_on_under_other_directives(chain):
    expected = plain("varied", BATCHES * len(CHAIN))
    losses = torch.stack([loss for _, outcome, _ in chain for loss in outcome["losses"]])
    assert len(losses) == BATCHES * len(CHAIN)
    assert torch.allclose(losses, torch.stack(expected["losses"]), rtol=1e-5), losses - torch.stack(
        expected["losses"]
    )
    assert distance(chain[-1][1]["values"], expected["values"]) < 1e-4
    assert len({outcome["seed"] for _, outcome, _ in chain}) == 1


def test_every_process_writes_its_share(chain):
    for how, _, path in chain:
        metadata = Reader(LocalFolder(path)).read_metadata()
        written = [0] * max(1, HOW[how].processes)
        for key, stored in metadata.state_dict_metadata.items():
            for chunk in stored.chunks:
                file = metadata.storage_data[MetadataIndex(key, chunk.offsets)].relative_path
                written[int(file.split("_")[2])] += chunk.sizes[0]
        if how in ("DP2", "DP2 ZeRO-2"):
            assert min(written) > 0.8 * max(written), (how, written)
        assert min(written) > 0, (how, written)
        assert sum(written) == sum(
            math.prod(x["shape"]) for x in read_manifest(LocalFolder(path))["tensors"].values()
        )


def test_a_save_after_fit_has_the_same_tensors(chain, tmp_path):
    for how, _, path in chain:
        consolidate(path, tmp_path / "during")
        consolidate(path.with_name(f"after {path.name}"), tmp_path / "after")
        during, after = (torch.load(tmp_path / name, weights_only=True) for name in ("during", "after"))
        assert equal(dict(during["state_dict"]), dict(after["state_dict"])), how
        assert equal(during["optimizer_states"], after["optimizer_states"]), how
        assert during["optimizer_states"][0]["state"]


@pytest.mark.parametrize(
    "how, model", [("PP2 x DP2 ZeRO-3", "dropout"), ("DP2 ZeRO-3, one process", "dropout"), ("PP2", "conv")]
)
def test_the_same_directives_give_the_same_bits(how, model, tmp_path):
    """As an uninterrupted training, and as one that saves a plain checkpoint."""
    whole = run(how, model, tmp_path / "whole.ckpt", 2 * BATCHES, kind="consolidated")
    first = run(how, model, tmp_path / "first.ckpt", BATCHES)
    rest = run(how, model, tmp_path / "rest.ckpt", 2 * BATCHES, tmp_path / "first.ckpt")
    assert equal(first["losses"] + rest["losses"], whole["losses"])
    assert same(rest["values"], whole["values"])
    consolidate(tmp_path / "rest.ckpt", tmp_path / "plain.ckpt")
    found, expected = (
        torch.load(tmp_path / name, weights_only=True) for name in ("plain.ckpt", "whole.ckpt")
    )
    assert found.keys() == expected.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "lightning_piper", "global_step"):
        assert equal(found[part], expected[part]), part


@pytest.mark.parametrize("model", ["varied", "mlp", "tied", "conv"])
def test_consolidated_is_what_a_plain_trainer_writes(model, tmp_path):
    run("one device", model, tmp_path / "a.ckpt", BATCHES)
    consolidate(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    run("one device", model, tmp_path / "same.ckpt", BATCHES, kind="consolidated")
    plain(model, BATCHES, tmp_path / "plain.ckpt")
    content, same_, expected = (
        torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("b", "same", "plain")
    )
    assert equal(dict(content["state_dict"]), dict(same_["state_dict"]))
    assert equal(content["optimizer_states"], same_["optimizer_states"])
    assert content.keys() - expected.keys() == {"lightning_piper"}
    assert list(content["state_dict"]) == list(expected["state_dict"])
    states = [c["optimizer_states"][0] for c in (content, expected)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, state in states[1]["state"].items():
        assert states[0]["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert states[0]["state"][number][key].shape == value.shape
            assert states[0]["state"][number][key].stride() == value.stride()
    module, loader = make(model, seed=1, samples=8 * BATCHES)
    fit, record = trainer("auto", max_steps=2 * BATCHES, max_epochs=-1)
    fit.fit(module, Batches(loader), ckpt_path=str(tmp_path / "b.ckpt"))
    if model != "conv":  # a batch norm sees microbatches
        assert torch.allclose(
            torch.stack(record.losses), torch.stack(plain(model, 2 * BATCHES)["losses"][BATCHES:]), rtol=1e-5
        )


def test_of_several_processes_too(chain, tmp_path):
    _, outcome, path = chain[0]
    consolidate(path, tmp_path / "plain.ckpt")
    module, loader = make("varied", seed=1, samples=8 * BATCHES)
    fit, record = trainer("auto", max_steps=2 * BATCHES, max_epochs=-1)
    fit.fit(module, Batches(loader), ckpt_path=str(tmp_path / "plain.ckpt"))
    assert torch.allclose(torch.stack(record.losses), torch.stack(chain[1][1]["losses"]), rtol=1e-5)
    content = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert same(dict(content["state_dict"]), outcome["values"])


def test_torch_reads_a_parameter(chain):
    """As one dimension, in the order of the parameter's memory."""
    _, outcome, path = chain[0]
    orders = set()
    references = torch.load(path / "meta.pt", weights_only=True)["state_dict"]
    assert references["head.weight"] == references["embedding.weight"]  # tied, and saved once
    for name, value in outcome["values"].items():
        key, spec = key_of(references[name]), TensorSpec.of(value)
        into = {key: torch.empty(value.numel(), dtype=value.dtype)}
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.load(into, checkpoint_id=path)
        assert torch.equal(view_as(into[key], spec), value)
        orders.add(spec.dim_order)
    assert (1, 0) in orders


def test_both_kinds_load_whatever_is_saved(tmp_path):
    run("one device", "mlp", tmp_path / "a.ckpt", BATCHES)
    second = run(
        "one device", "mlp", tmp_path / "b.ckpt", 2 * BATCHES, tmp_path / "a.ckpt", kind="consolidated"
    )
    assert (tmp_path / "b.ckpt").is_file()
    third = run("one device", "mlp", tmp_path / "c.ckpt", 3 * BATCHES, tmp_path / "b.ckpt")
    assert (tmp_path / "c.ckpt").is_dir()
    whole = run("one device", "mlp", tmp_path / "d.ckpt", 3 * BATCHES)
    assert equal(second["losses"] + third["losses"], whole["losses"][BATCHES:])
    assert same(third["values"], whole["values"])


@pytest.mark.parametrize("kind", ["sharded", "consolidated"])
def test_what_an_interrupted_save_left_is_loaded(kind, tmp_path):
    whole = run("one device", "mlp", tmp_path / "whole.ckpt", 2 * BATCHES)
    run("one device", "mlp", tmp_path / "a.ckpt", BATCHES, kind=kind)
    (tmp_path / "a.ckpt").rename(earlier_of(tmp_path / "a.ckpt"))
    (temporary_of(tmp_path / "a.ckpt")).mkdir()
    rest = run("one device", "mlp", tmp_path / "b.ckpt", 2 * BATCHES, tmp_path / "a.ckpt")
    assert same(rest["values"], whole["values"])


def test_one_kind_takes_the_place_of_the_other(tmp_path):
    path = tmp_path / "last.ckpt"
    for steps, (kind, is_kind) in enumerate(
        [("sharded", Path.is_dir), ("consolidated", Path.is_file)] * 2, 1
    ):
        module, loader = make("mlp", seed=steps)
        fit, _ = trainer(local(checkpoint=kind), max_steps=steps)
        fit.fit(module, loader)
        fit.save_checkpoint(path)
        assert is_kind(path)
        assert list(tmp_path.iterdir()) == [path]
        loaded, _ = make("mlp")
        again, _ = trainer(local(), max_steps=steps)
        again.fit(loaded, loader, ckpt_path=str(path))
        assert same(values(loaded), values(module))


def test_wrong_optimizer_state_is_seen(tmp_path):
    """The comparison above would notice moments that were not loaded."""
    run("one device", "mlp", tmp_path / "a.ckpt", BATCHES)
    whole = run("one device", "mlp", tmp_path / "whole.ckpt", 2 * BATCHES)
    consolidate(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    content = torch.load(tmp_path / "b.ckpt", weights_only=True)
    content["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
    torch.save(content, tmp_path / "b.ckpt")
    wrong = run("one device", "mlp", tmp_path / "c.ckpt", 2 * BATCHES, tmp_path / "b.ckpt")
    assert not same(wrong["values"], whole["values"])


def saving(folder, steps, **options):
    """The Trainer's callback on top of directories: the best, the last, and what becomes of those that are
    not kept.
    """
    module, loader = make("mlp")
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **options)
    fit, _ = trainer(local(checkpoint="sharded"), [save], max_steps=steps, enable_checkpointing=True)
    fit.fit(module, loader)
    return save, module


@pytest.mark.parametrize("last", [True, "link"])
def test_model_checkpoint_keeps_what_it_should(last, tmp_path):
    save, module = saving(tmp_path, 4, monitor="train_loss", save_top_k=2, save_last=last)
    assert sorted(x.name for x in tmp_path.iterdir()) == sorted(
        [*(Path(x).name for x in save.best_k_models), "last.ckpt"]
    )
    assert len(save.best_k_models) == 2
    consolidate(tmp_path / "last.ckpt", tmp_path / "plain")
    assert same(dict(torch.load(tmp_path / "plain", weights_only=True)["state_dict"]), values(module))


def test_evaluation_loads_it(tmp_path):
    class Validated(MLP):
        def validation_step(self, batch, batch_idx):
            self.log("weight", self.first[0].weight.detach().sum())

    _, module = saving(tmp_path, 2)
    other, loader = make("mlp", seed=1)
    other.__class__ = Validated
    fit, _ = trainer(local())
    (found,) = fit.validate(other, loader, ckpt_path=str(tmp_path / "step=2.ckpt"), verbose=False)
    assert found["weight"] == pytest.approx(module.first[0].weight.sum().item())
    assert same(values(other), values(module))


def refusal(path, change, **options):
    module, loader = make("mlp", seed=1)
    change(module)
    fit, _ = trainer(local(**options), max_steps=4)
    with pytest.raises(piper.PiperError) as caught:
        fit.fit(module, loader, ckpt_path=str(path))
    return str(caught.value)


def test_another_module_is_refused(tmp_path):
    _, trained = saving(tmp_path, 2)
    path = tmp_path / "step=2.ckpt"

    def more(module):
        module.more = torch.nn.Linear(2, 2)

    def wider(module):
        module.unused = torch.nn.Linear(3, 4)

    def less(module):
        del module.unused

    assert "the checkpoint does not have ['more.weight', 'more.bias']" in refusal(path, more)
    assert "the module does not have ['unused.weight', 'unused.bias']" in refusal(path, less)
    assert "state_dict.unused.weight has shape [3, 3] in the checkpoint" in refusal(path, wider)

    def other_groups(module):
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.1)

    assert "parameter groups of [4, 4] parameters, but configure_optimizers returns groups of [8]" in refusal(
        path, other_groups
    )

    module, _ = make("mlp", seed=1)
    more(module)
    module.strict_loading = False
    module.configure_optimizers = type(module).configure_optimizers.__get__(
        trained
    )  # the old parameters only
    fit, _ = trainer(local())
    fit.strategy.connect(module)
    content = fit.strategy.load_checkpoint(path)
    fit.strategy.load_model_state_dict(content, strict=False)
    assert same({n: x for n, x in values(module).items() if "more" not in n}, values(trained))


class Extra(MLP):
    def __init__(self):
        super().__init__()
        self.seen = 0
        self.told = None

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["told"] = torch.arange(3)
        del checkpoint["state_dict"]["unused.bias"]

    def on_load_checkpoint(self, checkpoint):
        self.told = checkpoint["told"]
        checkpoint["state_dict"]["unused.bias"] = torch.full((3,), 5.0)


def test_extra_state_and_hooks(tmp_path):
    _, loader = make("mlp")
    module = Extra()
    module.seen = 7
    fit, _ = trainer(local(checkpoint="sharded"), max_steps=2)
    fit.fit(module, loader)
    fit.save_checkpoint(tmp_path / "a.ckpt")
    manifest = (tmp_path / "a.ckpt" / "manifest.json").read_text()
    assert "state_dict.unused.weight" in manifest
    assert "state_dict.unused.bias" not in manifest
    other = Extra()
    fit, _ = trainer(local(), max_steps=2)
    fit.fit(other, loader, ckpt_path=str(tmp_path / "a.ckpt"))
    assert other.seen == 7
    assert torch.equal(other.told, torch.arange(3))
    assert same(values_of(other), values_of(module) | {"unused.bias": torch.full((3,), 5.0)})


def values_of(module):
    return {n: x.detach().clone() for n, x in [*module.named_parameters(), *module.named_buffers()]}


def test_weights_only(tmp_path):
    module, loader = make("mlp")
    fit, _ = trainer(local(checkpoint="sharded"), max_steps=2)
    fit.fit(module, loader)
    fit.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    consolidate(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    content = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert "optimizer_states" not in content
    assert same(dict(content["state_dict"]), values(module))
    with pytest.raises(KeyError, match="contains only the model"):
        fit.fit(module, loader, ckpt_path=str(tmp_path / "a.ckpt"))


def test_what_cannot_be(tmp_path):
    with pytest.raises(piper.PiperError, match=r"checkpoint='parted'.*'consolidated', 'sharded'"):
        piper.PiperStrategy([], checkpoint="parted")
    module, loader = make("mlp")
    fit, _ = trainer(local(checkpoint="sharded"), max_steps=1)
    fit.fit(module, loader)
    with pytest.raises(piper.PiperError, match="cannot be written to https://a"):
        fit.save_checkpoint("https://a")
    with pytest.raises(piper.PiperError, match="does not support the storage options"):
        fit.save_checkpoint(tmp_path / "a.ckpt", storage_options={})
    assert isinstance(fit, L.Trainer)
    assert not list(tmp_path.iterdir())
    for folder, other in itertools.permutations(["a.ckpt", "b.ckpt"]):
        assert refusal(tmp_path / folder, lambda module: None).startswith(
            f"there is no checkpoint {tmp_path / folder}. Give"
        ), other
