"""Trainings in which the devices along an axis hold parts of tensors, in one process and over processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper import Place, Replicate, Split
from tests.axes import EXPERTS, HEADS, columns, everywhere, sequences, sparse
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET
from tests.tensors import DIM, Decoder, decoder, divided, far, fit, grid, replicas, stages

ROUNDING = 1e-12
TWO = Place(filter={}, devices=[0, 1])
PROGRAMS: dict[str, list[Any]] = {
    "two": [TWO, divided([0, 1])],
    "sequence": [TWO, divided([0, 1], sequence=True)],
    "stages": [*stages([[0, 1], [2, 3]]), divided([[0, 1], [2, 3]], sequence=True)],
    "all": [
        *stages([[0, 1, 2, 3], [4, 5, 6, 7]]), divided([[0, 2], [1, 3], [4, 6], [5, 7]]),
        Replicate(filter={}, devices=[[0, 1, 2, 3], [4, 5, 6, 7]], shard_params=True),
    ],
    "axes": [grid(cp=2, tp=2), columns(), sequences()],
    "axes of stages": [
        *(grid({"LAYER": [2 * i, 2 * i + 1]}, start=4 * i, cp=2, tp=2) for i in range(2)),
        Split(filter={}, dim_name="MB", num_microbatches=2), columns(), sequences("heads"),
    ],
}  # fmt: skip


def local(program: Any, **options: Any) -> piper.PiperStrategy:
    return piper.PiperStrategy(program, transport="local", **options)


@pytest.fixture(scope="module")
def alone():
    module = decoder()
    trainer = fit(module, "auto", max_epochs=6)
    assert trainer.global_step == 30
    return module


@pytest.mark.parametrize("name", PROGRAMS)
def test_thirty_steps_are_those_of_one_device(name, alone):
    module = decoder()
    trainer = fit(module, local(PROGRAMS[name]), max_epochs=6)
    assert trainer.global_step == 30 and far(module, alone) < ROUNDING
    assert all(x.is_contiguous() for x in module.parameters())


def test_clipping_and_accumulation_count_each_element_once():
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    module, other, loose = decoder(), decoder(), decoder()
    fit(module, local(PROGRAMS["sequence"]), **options)
    fit(other, "auto", **options)
    fit(loose, "auto", **(options | {"gradient_clip_val": None}))
    assert far(module, other) < ROUNDING < far(loose, other)


def test_evaluation_and_checkpoints_are_those_of_one_device(tmp_path):
    """Saved by one program, a training goes on under another one, and alone."""
    first = decoder()
    trainer = fit(first, local(PROGRAMS["sequence"]), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    whole = decoder()
    fit(whole, "auto", max_epochs=4)
    for program in ("auto", local(PROGRAMS["stages"]), local(replicas({"shard_grads": True}))):
        module = decoder()
        again = torch.load(tmp_path / "first.ckpt", weights_only=False)
        assert all(x.is_contiguous() for x in again["state_dict"].values())
        fit(module, program, max_epochs=4, ckpt_path=str(tmp_path / "first.ckpt"))
        assert far(module, whole) < ROUNDING


@pytest.mark.parametrize("levels", [{}, {"shard_params": True}], ids=str)
def test_thirty_steps_with_experts_are_those_of_one_device(levels):
    program = [grid(ep=2, tp=2), columns(params=HEADS), EXPERTS, everywhere(4, **levels)]
    module, other, less = sparse(), sparse(), sparse()
    assert (
        fit(module, local(program), max_epochs=6).global_step
        == fit(other, "auto", max_epochs=6).global_step
        == 30
    )
    fit(less, "auto", max_epochs=5)
    assert far(module, other) < ROUNDING < 1e-6 < far(less, other)


class Gated(L.LightningModule):
    """Batch: [n, length, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.down(self.up(batch).relu()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("values", [None, {"*": 1}], ids=str)
def test_batches_may_have_other_lengths(values):
    """Of each shape, members have code of their own."""
    found = {}
    for name, lengths in (("alone", [6, 4, 2, 6]), ("divided", [6, 4, 2, 6]), ("another", [6, 4, 4, 6])):
        torch.manual_seed(0)
        found[name] = module = Gated().double()
        batches = [torch.randn(4, length, 8, dtype=torch.float64) for length in lengths]
        program = [TWO, divided([0, 1], params={"up.weight": 0, "down.weight": 1}, values=values)]
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            strategy=local(program) if name != "alone" else "auto",
            **QUIET,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert far(found["divided"], found["alone"]) < ROUNDING < 1e-6 < far(found["another"], found["alone"])


class Quotient(Decoder):
    """Divides the sum of the losses by the number of tokens, and logs the quotient."""

    counted = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(DIM, DIM), torch.nn.Tanh()) for _ in range(2)
        )

    def loss_of(self, batch: Any) -> Any:
        tokens, target = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(scores, target.flatten(), reduction="sum")
        return total / ((target != -100).sum() if self.counted else target.numel())


class QuotientOfAll(Quotient):
    counted = False


@pytest.mark.parametrize("degrees", [{"cp": 2, "dp": 2}, {"cp": 2, "microbatches": 2}], ids=str)
def test_a_logged_quotient_of_sums_is_that_of_one_device(degrees):
    """Its numerator, a sum over the sequences, is a result of the step."""
    found = {}
    for name, kind in (("alone", Quotient), ("divided", Quotient), ("another", QuotientOfAll)):
        torch.manual_seed(0)
        strategy = local(None, capture="always", **degrees) if name == "divided" else "auto"
        trainer = fit(module := kind().double(), strategy, max_epochs=1)
        found[name] = module, float(trainer.callback_metrics["loss"])
    (divided, loss), (alone, expected), (another, other) = (found[x] for x in ("divided", "alone", "another"))
    assert far(divided, alone) < ROUNDING < 1e-6 < far(another, alone)
    assert abs(loss - expected) < ROUNDING < 1e-6 < abs(other - expected)


class Stepping(Decoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("name", ["two", "sequence", "axes"])
def test_mixed_precision_rounds_as_on_one_device(name):
    """Weights and biases are cast where they are read. What is left is of the size of what the precision
    itself does (1.4 times of it at most, as seen).
    """
    found = {}
    for key, strategy, precision, epochs in (
        ("single", "auto", "32-true", 2),
        ("mixed", "auto", "bf16-mixed", 2),
        ("less", "auto", "bf16-mixed", 1),
        ("divided", local(PROGRAMS[name]), "bf16-mixed", 2),
    ):
        torch.manual_seed(0)
        found[key] = Stepping()
        fit(found[key], strategy, max_epochs=epochs, precision=precision)
    rounding = far(found["single"], found["mixed"])
    assert far(found["divided"], found["mixed"]) < 3 * rounding < far(found["less"], found["mixed"]) / 10


class Normed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm1d(DIM)

    def loss_of(self, batch: Any) -> Any:
        with piper.annotate("LAYER", 0):
            x = self.embed(batch[0])
        for i, block in enumerate(self.blocks, 1):
            with piper.annotate("LAYER", i):
                x = block(x)
        with piper.annotate("LAYER", 3):
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    "program, options",
    [(PROGRAMS["two"], {}), (PROGRAMS["sequence"], {}), (replicas({}), {"sync_batchnorm": True})],
)
def test_batch_norms_have_the_statistics_of_the_batch(program, options):
    """Which all members of a line have; with replicas, if they exchange them."""
    found = []
    for strategy in ("auto", local(program)):
        torch.manual_seed(0)
        found.append(Normed().double())
        fit(found[-1], strategy, max_epochs=2, **options)
    assert far(*found) < ROUNDING and float(found[0].batch_norm.running_mean.abs().max()) > 0.1


class Counting(Decoder):
    """Keeps a metric object of the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen((batch[1] >= 0).sum())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def counting() -> Counting:
    torch.manual_seed(0)
    return Counting().double()


def test_metric_objects_see_each_sample_once():
    found = {}
    for name, strategy in (
        ("alone", "auto"),
        ("replicas", local(replicas({}))),
        ("stages", local(PROGRAMS["stages"])),
    ):
        found[name] = fit(counting(), strategy, max_epochs=1).callback_metrics["seen"].item()
    assert found["alone"] > 100 and found == dict.fromkeys(found, found["alone"])


# Over processes

LIMIT = timedelta(seconds=800)  # one training takes 20 s if nothing else runs
JOBS: dict[
    str, tuple[Any, list[Any], int]
] = {  # the module, its program, and samples that each process draws
    "zero3": (counting, replicas({"shard_params": True}), 4),
}
LONG_JOBS: dict[str, tuple[Any, list[Any], int]] = {
    "stages": (counting, PROGRAMS["stages"], 8),
    "plain": (counting, replicas({}), 4),
    "zero1": (counting, replicas({"shard_optimizer": True}), 4),
    "axes": (counting, PROGRAMS["axes"], 8),
    "experts": (
        sparse,
        [grid(ep=2, tp=2), columns(params=HEADS), EXPERTS, everywhere(4, shard_grads=True)],
        4,
    ),
    "experts of parts of sequences": (sparse, [grid(ep=2, cp=2), sequences(), EXPERTS, everywhere(4)], 4),
}


def options_of(name: str) -> dict[str, Any]:
    return {"gradient_clip_val": 0.05} if name == "zero3" else {}


def train(rank: int, folder: Path, name: str) -> dict[str, Any]:
    make, program, batch = (JOBS | LONG_JOBS)[name]
    module = make()
    options = options_of(name) | {
        "use_distributed_sampler": False,
        "replica": rank // 2 if batch == 4 else None,
    }
    trainer = fit(module, piper.PiperStrategy(program), devices=4, batch=batch, max_epochs=2, **options)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return {
        "state": module.state_dict(),
        "values": {key: x.item() for key, x in trainer.callback_metrics.items()},
    }


@pytest.mark.parametrize("name", [*JOBS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_JOBS)])
def test_processes_train_as_one_device(name, tmp_path):
    outcomes = launch_trainings(4, train, tmp_path / "run", tmp_path, name, limit=LIMIT)
    module = (JOBS | LONG_JOBS)[name][0]()
    trainer = fit(module, "auto", max_epochs=2, **options_of(name))
    for outcome in outcomes:
        state, values = outcome["state"], outcome["values"]
        assert max(float((x - state[key]).abs().max()) for key, x in module.state_dict().items()) < ROUNDING
        assert values == pytest.approx({k: x.item() for k, x in trainer.callback_metrics.items()}, rel=1e-6)
    saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
    own = trainer.optimizers[0].state_dict()["state"]
    states = saved["optimizer_states"][0]["state"]
    assert states.keys() == own.keys()
    for number, state in own.items():
        for key, value in state.items():
            assert (
                torch.allclose(states[number][key], value, rtol=0, atol=ROUNDING)
                and states[number][key].shape == value.shape
            )
