"""Losses that compare all samples of a batch train as on one device under every program, in float64."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import schedules
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import Batches, local, trainer

SAMPLES, WIDTH = 8, 6


class Compared(L.LightningModule):
    """Two towers in two stages, and a loss of all samples. A batch is `(one, other, [n])`.

    Args:
        gathers: the loss is that of the whole batch.
    """

    def __init__(self, gathers: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.gather = piper.gather_samples if gathers else lambda x: x
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other, y = batch
        with piper.annotate("PP", 0):
            one, other = torch.tanh(self.body(one)), torch.tanh(self.body(other))
        with piper.annotate("PP", 1):
            loss = self.loss(self.head(one), self.other(other), y)
        self.log("train_loss", loss)
        return loss

    def loss(self, one: Tensor, other: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class SimCLR(Compared):
    def loss(self, one: Tensor, other: Tensor, y: Tensor) -> Tensor:
        rows = F.normalize(torch.cat([self.gather(one), self.gather(other)]), dim=-1)
        n = len(rows) // 2
        near = (rows @ rows.T / 0.5).fill_diagonal_(float("-inf"))
        return F.cross_entropy(near, torch.arange(2 * n).roll(n))


class CLIP(Compared):
    def loss(self, one: Tensor, other: Tensor, y: Tensor) -> Tensor:
        near = (
            self.scale.exp()
            * F.normalize(self.gather(one), dim=-1)
            @ F.normalize(self.gather(other), dim=-1).T
        )
        self.log("scale", self.scale.exp())
        self.log("hits", (near.argmax(1) == torch.arange(len(near))).double().mean())
        own = torch.arange(len(near))
        return (F.cross_entropy(near, own) + F.cross_entropy(near.T, own)) / 2


class VICReg(Compared):
    """A loss with an additional term for each sample."""

    def loss(self, one: Tensor, other: Tensor, y: Tensor) -> Tensor:
        loss = 2.0 * F.mse_loss(one, other)
        for rows in (self.gather(one), self.gather(other)):
            rows = rows - rows.mean(0)
            spread = (rows.var(0) + 1e-4).sqrt()
            both = rows.T @ rows / (len(rows) - 1)
            loss = loss + F.relu(1 - spread).mean() + (both - both.diagonal().diag()).square().sum() / 4
        return loss


class DRO(Compared):
    """A loss of the worst group of samples, whose labels the user does not gather, and of samples that are
    weighted by their losses.
    """

    def loss(self, one: Tensor, other: Tensor, y: Tensor) -> Tensor:
        each = self.gather((one - other).square().sum(1))
        groups = torch.stack([(each * (y == k)).sum() / (y == k).sum().clamp(min=1) for k in range(2)])
        weights = torch.softmax(each.detach(), 0)
        return groups.max() + (weights * each).sum() + each.topk(2).values.mean()


class Uncaptured(CLIP):
    """A step that branches on a value, so that it cannot be captured."""

    def loss(self, one: Tensor, other: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(one, other, y)
        return loss if loss.item() < 1e9 else 2 * loss


LOSSES = [SimCLR, CLIP, VICReg, DRO]
PROGRAMS: dict[str, list[Any]] = {
    "GPipe": schedules.gpipe(2, 4),
    "1F1B": schedules.one_f_one_b(2, 4),
    "zero bubble": schedules.zero_bubble(2, 4),
    "replicas": [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])],
    "ZeRO-3": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
    ],
    "PP2 x DP2": [
        *schedules.one_f_one_b(2, 2, devices=[[0, 2], [1, 3]]),
        piper.Replicate(filter={}, devices=[[0, 2], [1, 3]]),
    ],
    "zero bubble x ZeRO-3": [
        *schedules.zero_bubble(2, 2, devices=[[0, 2], [1, 3]]),
        piper.Replicate(filter={}, devices=[[0, 2], [1, 3]], shard_params=True),
    ],
}


def batches(count: int) -> list[Any]:
    torch.manual_seed(1)
    drawn = torch.randn(count, 2, SAMPLES, 5, dtype=torch.float64)
    return [(x[0], x[0] + 0.3 * x[1], torch.arange(SAMPLES) % 3) for x in drawn]


def fit(module: L.LightningModule, strategy: Any = "auto", **options: Any) -> dict[str, Tensor]:
    """The losses, the last logged values and the parameters of a training."""
    run, record = trainer(strategy, max_steps=3, **options)
    run.fit(module, Batches(batches(6)))
    weights = {name: x.detach().clone() for name, x in module.state_dict().items()}
    return {"losses": torch.stack(record.losses), **record.logged[-1], **weights}


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@functools.cache
def plain(module: type[Compared]) -> dict[str, Tensor]:
    return fit(module())


SHORT = {(SimCLR, "1F1B"), (CLIP, "PP2 x DP2"), (VICReg, "zero bubble x ZeRO-3"), (DRO, "replicas")}
ALL = [(module, program) for module in LOSSES for program in PROGRAMS]


@pytest.mark.parametrize(
    "module, program", [pytest.param(*x, marks=() if x in SHORT else pytest.mark.long) for x in ALL]
)
def test_as_on_one_device(module: type[Compared], program: str) -> None:
    assert distance(plain(module), fit(module(), local(PROGRAMS[program]))) < 1e-12


@pytest.mark.parametrize(
    "module", [CLIP, *(pytest.param(m, marks=pytest.mark.long) for m in (SimCLR, VICReg, DRO))]
)
def test_batches_accumulate_each_by_itself(module: type[Compared]) -> None:
    summed = fit(module(), accumulate_grad_batches=2)
    assert distance(summed, fit(module(), local(PROGRAMS["PP2 x DP2"]), accumulate_grad_batches=2)) < 1e-12
    assert float((summed["body.weight"] - plain(module)["body.weight"]).abs().max()) > 1e-3  # a control


@pytest.mark.parametrize("module", LOSSES)
@pytest.mark.filterwarnings("ignore:.*samples")
def test_without_it_another_model_is_trained(module: type[Compared]) -> None:
    found = fit(module(gathers=False), local(PROGRAMS["replicas"]))
    assert distance(fit(module(gathers=False)), found) > 1e-4


def in_processes(rank: int) -> dict[str, dict[str, Tensor]]:
    """Train two replicas, each of which loads its half of each batch, captured and uncaptured; then train two
    stages.
    """
    own = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)
    found = {}
    for name, module, program in (
        ("graph", CLIP, "replicas"),
        ("none", Uncaptured, "replicas"),
        ("stages", SimCLR, "1F1B"),
    ):
        data = [tuple(x[own] for x in batch) for batch in batches(6)] if program == "replicas" else batches(6)
        run, _ = trainer(piper.PiperStrategy(PROGRAMS[program]), max_steps=3, devices=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.fit(model := module(), Batches(data))
        found[name] = {n: x.detach().clone() for n, x in model.state_dict().items()}
    return found


@pytest.mark.long
def test_in_processes(tmp_path: Path) -> None:
    for found in launch_trainings(2, in_processes, tmp_path):
        for name, module in (("graph", CLIP), ("none", CLIP), ("stages", SimCLR)):
            weights = {n: plain(module)[n] for n in found[name]}
            assert distance(weights, found[name]) < 1e-12, name
