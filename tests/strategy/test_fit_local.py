"""Fits with all logical devices in this process, compared with the interpreter and with one device."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import warnings

import lightning as L
import pytest
import torch

import lightning_piper as piper
from lightning_piper.strategy import fit as strategy_fit
from tests.strategy.fitting import (
    PROGRAM,
    Batches,
    by_hand,
    distance,
    local,
    same,
    sharing_captures,
    trainer,
    values,
)
from tests.strategy.models import MLP, ZOO, make, texts, vectors


@pytest.mark.parametrize("name", ZOO)
@sharing_captures
def test_five_steps_are_bitwise_those_of_the_interpreter(name):
    module, loader = make(name)
    fit, record = trainer(local())
    fit.fit(module, loader)
    other, _ = make(name)
    losses = by_hand(other, list(loader), fit.strategy.phase.fit.seed)
    assert torch.equal(torch.stack(record.losses), torch.stack(losses))
    assert same(values(module), values(other))

    wrong, _ = make(name)
    by_hand(wrong, list(loader), fit.strategy.phase.fit.seed, drop=True)
    assert not same(values(module), values(wrong))


class Unfreeze(L.Callback):
    """Gives the optimizer a parameter that `configure_optimizers` has not given it, as callbacks for
    fine-tuning do.
    """

    def on_train_start(self, trainer, module):
        module.offset.requires_grad_(True)
        trainer.optimizers[0].add_param_group({"params": [module.offset], "lr": 0.05})


@sharing_captures
def test_a_hook_may_add_a_group_before_the_first_batch(tmp_path):
    found = []
    for strategy, hook in (("auto", [Unfreeze()]), (local(), [Unfreeze()]), (local(), [])):
        module, loader = make("varied")
        fit, _ = trainer(strategy, hook)
        fit.fit(module, loader)
        fit.save_checkpoint(tmp_path / "last.ckpt")
        groups = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
        found.append((values(module), groups))
    (plain, groups), (ours, ours_groups), (without, _) = found
    assert distance(plain, ours) < 1e-5 and groups == ours_groups and len(groups) == 3
    assert not same(ours, without)


class Late(Unfreeze):
    def on_train_start(self, trainer, module):
        pass

    def on_train_batch_end(self, trainer, module, *args):
        super().on_train_start(trainer, module)


@pytest.mark.parametrize("steps", [1, 2])
@sharing_captures
def test_a_group_that_is_added_later_is_refused(steps, tmp_path):
    module, loader = make("varied")
    fit, record = trainer(local(), [Late()], max_steps=steps)
    with pytest.raises(piper.PiperError, match="parameter groups have changed since the first batch"):
        fit.fit(module, loader)
        fit.save_checkpoint(tmp_path / "last.ckpt")
    assert len(record.losses) == 1


@sharing_captures
def test_another_seed_gives_other_dropout_masks():
    module, loader = make("dropout")
    fit, _ = trainer(local())
    fit.fit(module, loader)
    other, _ = make("dropout")
    by_hand(other, list(loader), fit.strategy.phase.fit.seed + 1000)
    assert not same(values(module), values(other))


@pytest.mark.parametrize("name", ["mlp", "tied"])
@sharing_captures
def test_agrees_with_plain_lightning(name):
    results = []
    for strategy in (
        "auto",
        local(),
        local(piper.schedules.gpipe(2, 2)),
        local(piper.schedules.dualpipe(2, 4)),
    ):
        L.seed_everything(3, verbose=False)
        module, loader = make(name, samples=44)
        fit, record = trainer(strategy, max_steps=-1, max_epochs=2)
        fit.fit(module, loader)
        results.append((values(module), record))
    (plain, expected), *others = results
    for found, record in others:
        assert distance(plain, found) < 1e-5
        assert [d.keys() for d in record.logged] == [d.keys() for d in expected.logged]
        for a, b in zip([*expected.logged, *expected.epochs], [*record.logged, *record.epochs], strict=True):
            assert distance(a, b) < 1e-5
    other, loader = make(name, samples=44, seed=1)
    fit, _ = trainer(local(), max_steps=-1, max_epochs=2)
    fit.fit(other, loader)
    assert distance(plain, values(other)) > 1e-3


@sharing_captures
def test_shuffles_as_plain_lightning_does():
    losses = []
    for strategy in ("auto", local()):
        L.seed_everything(3, verbose=False)
        module, _ = make("mlp")
        fit, record = trainer(strategy, max_steps=-1, max_epochs=2)
        fit.fit(module, vectors(shuffle=True))
        losses.append(torch.stack(record.losses))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    ordered, loader = make("mlp")
    fit, record = trainer(local(), max_steps=-1, max_epochs=2)
    fit.fit(ordered, loader)
    assert not torch.allclose(losses[0], torch.stack(record.losses), rtol=1e-3)


@pytest.mark.parametrize("sizes", [[8, 5], [8, 2], [8, 12], [4, 8, 3, 8]])
@sharing_captures
def test_batches_of_other_sizes(sizes):
    """Smaller ones, also than there are microbatches, and larger ones than the step was captured with."""
    g = torch.Generator().manual_seed(5)
    batches = [(torch.randn(n, 8, generator=g), torch.randn(n, 4, generator=g)) for n in sizes]
    results = []
    for strategy in ("auto", local()):
        module, _ = make("mlp")
        fit, record = trainer(strategy, max_steps=-1, max_epochs=1)
        fit.fit(module, Batches(batches))
        results.append((values(module), record))
    (plain, expected), (found, record) = results
    assert len(record.losses) == len(sizes)
    assert distance(plain, found) < 1e-5
    assert distance(expected.epochs[0], record.epochs[0]) < 1e-5


def test_batches_of_other_shapes_are_captured_anew():
    batches = Batches(next(iter(texts(length=n))) for n in (6, 4, 6, 9))
    results = []
    for strategy in ("auto", local()):
        module, _ = make("tied")
        fit, _ = trainer(strategy, max_steps=-1, max_epochs=1)
        fit.fit(module, batches)
        results.append(values(module))
    assert distance(*results) < 1e-5
    module, _ = make("tied")
    fit, _ = trainer(local(), max_steps=-1, max_epochs=1)
    fit.fit(module, Batches(batches.items[:3]))
    assert distance(results[0], values(module)) > 1e-3


@pytest.mark.parametrize("options", [
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": 0.05},
])  # fmt: skip
@sharing_captures
def test_options_of_the_optimization(options):
    results = []
    for strategy, more in (("auto", options), (local(), options), (local(), {})):
        module, loader = make("tied")
        module.lr = 0.1
        module.configure_optimizers = lambda m=module: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        fit, _ = trainer(strategy, max_steps=-1, max_epochs=2, **more)
        fit.fit(module, loader)
        results.append(values(module))
    assert distance(results[0], results[1]) < 1e-5
    assert distance(results[0], results[2]) > 1e-3


@sharing_captures
def test_fits_of_one_module_continue_each_other():
    module, loader = make("mlp")
    for _ in range(2):
        fit, _ = trainer(local(), max_steps=-1, max_epochs=1)
        fit.fit(module, loader)
    plain, _ = make("mlp")
    for _ in range(2):
        fit, _ = trainer(max_steps=-1, max_epochs=1)
        fit.fit(plain, loader)
    assert distance(values(plain), values(module)) < 1e-5


@sharing_captures
def test_one_trainer_fits_twice():
    strategy = local()
    fit, record = trainer(strategy, max_steps=-1, max_epochs=1)
    for seed in (0, 1):
        module, loader = make("mlp", seed=seed)
        fit.fit_loop.epoch_progress.reset()
        fit.fit(module, loader)
    assert len(record.losses) == 10


@pytest.mark.parametrize("precision, bound", [("64-true", 1e-12), ("bf16-true", 0.05), ("bf16-mixed", 0.02)])
@sharing_captures
def test_precisions(precision, bound):
    results = []
    for strategy in ("auto", local(verify="first_batch")):
        module, loader = make("tied")
        fit, record = trainer(strategy, precision=precision)
        fit.fit(module, loader)
        results.append((values(module), torch.stack(record.losses)))
    (plain, expected), (found, losses) = results
    assert {x.dtype for x in plain.values()} == {x.dtype for x in found.values()}
    assert losses.dtype == expected.dtype
    assert distance(plain, found) < bound
    if precision == "bf16-mixed":
        module, loader = make("tied")
        fit, record = trainer(local())
        fit.fit(module, loader)
        assert not torch.equal(torch.stack(record.losses), losses)  # autocast was really on


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@sharing_captures
def test_whole_numbers_are_logged_in_the_dtype_of_lightning(precision):
    class Counts(MLP):
        def training_step(self, batch, batch_idx):
            seen = torch.full((len(batch[0]),), 2**24 + 1).max()  # float32 has no such number
            self.log("seen", seen, on_step=True, on_epoch=True, reduce_fx="max")
            return super().training_step(batch, batch_idx)

    found = []
    for strategy in ("auto", local()):
        fit, _ = trainer(strategy, precision=precision)
        fit.fit(Counts(), vectors())
        found.append(
            {name: (float(x), x.dtype) for name, x in fit.logged_metrics.items() if name.startswith("seen")}
        )
    assert found[0] == found[1] and len(found[0]) == 2
    assert found[0]["seen_step"][0] == 2**24 + (precision == "64-true")


@sharing_captures
def test_early_stopping_and_plateau_see_the_logged_values():
    class Plateau(MLP):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}

    stop = L.pytorch.callbacks.EarlyStopping("train_loss_epoch", patience=1, min_delta=1e9)
    fit, record = trainer(local(), [stop], max_steps=-1, max_epochs=10)
    module = Plateau()
    fit.fit(module, vectors())
    assert len(record.epochs) == 2
    assert fit.optimizers[0].param_groups[0]["lr"] < 1.0


@sharing_captures
def test_the_batch_size_finder_tries_sizes_in_one_process(tmp_path):
    class Sized(MLP):
        batch_size = 4

        def train_dataloader(self):
            return vectors(batch_size=self.batch_size)

    results = []
    for strategy in ("auto", local()):
        torch.manual_seed(0)
        module = Sized()
        finder = L.pytorch.callbacks.BatchSizeFinder(init_val=4, steps_per_trial=2, max_trials=2)
        fit, record = trainer(strategy, [finder], max_steps=-1, max_epochs=1, default_root_dir=tmp_path)
        fit.fit(module)
        assert (module.batch_size, finder.optimal_batch_size, len(record.losses)) == (8, 8, 5)
        results.append(values(module))
    assert distance(*results) < 1e-5


@sharing_captures
def test_evaluation_in_one_process_is_lightnings_own():
    class Validated(MLP):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", torch.nn.functional.mse_loss(self.second(self.first(x)), y))

    module = Validated()
    fit, _ = trainer(local(), max_steps=-1, max_epochs=1)
    fit.fit(module, vectors(), vectors())
    (found,) = fit.validate(module, vectors(), verbose=False)
    plain, _ = trainer()
    (expected,) = plain.validate(module, vectors(), verbose=False)
    assert found == pytest.approx(expected)


@sharing_captures
def test_hooks_around_backward_run_in_lightnings_order():
    seen = []

    class Hooked(MLP):
        def on_before_zero_grad(self, optimizer):
            seen.append("zero_grad")

        def backward(self, loss):
            seen.append("backward")
            loss.backward()

        def on_after_backward(self):
            seen.append(("gradient", self.first[0].weight.grad is not None, self.unused.weight.grad is None))

        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            seen.append("clipping")

    fit, _ = trainer(local(), max_steps=1)
    fit.fit(Hooked(), vectors())
    assert seen == ["zero_grad", "backward", ("gradient", True, True), "clipping"]


@sharing_captures
def test_program_from_json_file_and_registry(tmp_path, monkeypatch):
    import json

    path = tmp_path / "program.json"
    path.write_text(json.dumps([d.to_json() for d in PROGRAM]))
    results = []
    for program in (str(path), path, list(PROGRAM), [d.to_json() for d in PROGRAM]):
        module, loader = make("mlp")
        fit, _ = trainer(piper.PiperStrategy(program, transport="local"))
        fit.fit(module, loader)
        results.append(values(module))
    assert all(same(results[0], other) for other in results[1:])

    single = [piper.Place(filter={}, devices=[0])]
    for how in ("environment", "attribute", "method"):
        module, loader = make("mlp")
        if how == "environment":
            path.write_text(json.dumps([d.to_json() for d in single]))
            monkeypatch.setenv("PIPER_DIRECTIVES", str(path))
        else:
            monkeypatch.delenv("PIPER_DIRECTIVES", raising=False)
            module.piper_directives = single if how == "attribute" else lambda: single
        fit, _ = trainer("piper")
        assert isinstance(fit.strategy, piper.PiperStrategy)


def test_a_wrong_program_is_found_by_running_it():
    """A directive that the static check believes, since it changes the code of a chunk and not the graph."""

    class Halved(piper.Directive):
        op = "halved"
        contract = "bitwise"

        def apply(self, dag):
            code = dag.step.at(2).code
            key = (1, "B")
            run, graph = code[key].made()
            wrong = lambda args: tuple(x / 2 for x in run(args))  # noqa: E731
            code[key] = dataclasses.replace(code[key], made=lambda: (wrong, graph))

    for verify, fails in (("static", False), ("first_batch", True), ("each", True)):
        module, loader = make("mlp")
        fit, record = trainer(local([*PROGRAM, Halved()], verify=verify), max_steps=1)
        with pytest.raises(piper.VerificationError, match="differs") if fails else contextlib.nullcontext():
            fit.fit(module, loader)
        assert len(record.losses) == (not fails)


EXCEPT = (
    r"the program is verified except aten\._native_batch_norm_legit_functional in region PP=0: differs by "
    r"\d\.\de-0\d \("
)


@pytest.mark.parametrize(
    "verify, said",
    [("off", None), ("static", r"the batch norm of region PP=0 \(.*models\.py:\d+\) \(and 1 more\) computes "
                               r"its statistics"),
     ("first_batch", EXCEPT), ("each", EXCEPT)],
)  # fmt: skip
def test_verify(verify, said, caplog):
    """A batch norm makes the result of microbatches another one than that of the whole batch: that is said
    once.
    """
    module, loader = make("conv")
    before = values(module)
    found = _warned(local(verify=verify), module, loader)
    assert not same(before, values(module))
    assert ("vs one device" in caplog.text) == (verify == "each")
    assert len(found) == (said is not None) and all(re.match(said, text) for text in found)


def _told(caplog, strategy, module, loader):
    """The messages of a fit that begin with the strategy's name, with T in place of times."""
    with caplog.at_level(logging.INFO):
        trainer(strategy, max_steps=2)[0].fit(module, loader)
    texts = [text for text in caplog.messages if text.startswith("PiperStrategy")]
    return [re.sub(r" in [\d.]+ (ms|s|min):", " in T:", text).splitlines() for text in texts]


@pytest.mark.parametrize(
    "verify, checks",
    [
        ("off", ["  not checked (verification is off)"]),
        ("static", ["  checked in T: the graph after each directive, and all plans, without running them"]),
        (
            "first_batch",
            [
                "  checked in T: the graph after each directive, and all plans, without running them",
                "  on the first batch: verified",
            ],
        ),
    ],
)
def test_a_fit_logs_a_summary(verify, checks, caplog, monkeypatch):
    monkeypatch.setattr(strategy_fit, "told_of_capture", lambda step, seconds: f"PiperStrategy: {step} slow")
    assert _told(caplog, local(verify=verify), *make("mlp")) == [
        ["PiperStrategy captures training_step with the first batch"],
        ["PiperStrategy: training_step slow"],
        [
            "PiperStrategy: training_step on 2 devices: 2 stages, 4 microbatches",
            "  parameters: 496 (by stage: 144 / 340)",
            *checks,
        ],
    ]


def test_a_fit_says_why_it_runs_uncaptured(caplog):
    strategy = piper.PiperStrategy(capture="never")
    assert _told(caplog, strategy, *make("mlp"))[-1] == [
        "PiperStrategy: training_step runs uncaptured on 1 device, so Piper checks no graph and no plan. "
        "Reason: capture='never'"
    ]


@pytest.mark.parametrize("verify", ["static", "first_batch"])
def test_what_is_verified_is_not_warned_of(verify):
    assert _warned(local(verify=verify), *make("mlp")) == []


def _warned(strategy, module, loader):
    """The warnings about the whole batch in two steps."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer(strategy, max_steps=2)[0].fit(module, loader)
    return [str(w.message) for w in seen if "whole batch" in str(w.message)]


class Freezing(L.Callback):
    """Before the first batch, freezes the first half of the model and puts it into eval mode, so that it has
    no dropout.
    """

    def on_train_start(self, trainer, module):
        module.first.requires_grad_(False).eval()


@sharing_captures
def test_what_hooks_change_before_the_first_batch_counts():
    results = []
    for strategy in ("auto", local()):
        module, loader = make("dropout")
        before = values(module)
        fit, _ = trainer(strategy, [Freezing()])
        fit.fit(module, loader)
        results.append(values(module))
        assert same(
            *(
                {n: x for n, x in found.items() if n.startswith("first.")}
                for found in (before, values(module))
            )
        )
    assert distance(*results) < 1e-5
    dropping, loader = make("dropout")
    fit, _ = trainer("auto")
    fit.fit(dropping, loader)
    assert distance(results[0], values(dropping)) > 1e-3
