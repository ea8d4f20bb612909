"""Muon divided among owners under Lightning's Trainer: each matrix is updated whole, by one process of its replicas. In
float64, the results are those of one device.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper
from lightning_piper.ir.owners import Owners
from lightning_piper.ops.communication.gather import Parameters
from tests.distributed.processes import launch
from tests.groups import marked
from tests.strategy import sharded
from tests.strategy.fitting import Batches, distance, same, trainer, values
from tests.strategy.models import Model
from tests.strategy.optimizers import MuonAndAdamW
from tests.strategy.sharded import PROCESSES, Job, fit, train

EXACT = {"precision": "64-true"}
TEN = {**EXACT, "max_steps": 10, "max_epochs": -1}
ROUNDING = 1e-12
PAIR = sharded.with_muon_and_adamw

ONE = Job("one", "dp2 zero0", options=TEN, save=True, change=PAIR)
FROM_OWNERS = "owners saved, process, step=5.ckpt"
TWO = [
    Job("replicas", "dp2 zero0", options=EXACT, change=PAIR),
    Job("owners", "dp2 zero1 by parameter", options=EXACT, change=PAIR),
    Job("owners, ZeRO-3", "dp2 zero3 by parameter", options=EXACT, change=PAIR),
    Job("owners, torch's Muon", "dp2 zero1 by parameter", options=EXACT, change=sharded.with_muon),
    Job("clipped", "dp2 zero1 by parameter", options={**EXACT, "gradient_clip_val": 0.05}, change=PAIR),
    Job("owners saved", "dp2 zero1 by parameter", options=TEN, save=True, change=PAIR),
    Job(
        "owners from one", "dp2 zero1 by parameter", options=TEN, resume="one, None, step=5.ckpt", change=PAIR
    ),
]
FOUR = [
    Job("four owners", "dp4 zero1 by parameter", options=EXACT, change=PAIR),
    Job("groups of owners", "dp2x2 zero1 by parameter", options=EXACT, change=PAIR),
    Job("stages", "pp2 dp2 zero1 by parameter", options=EXACT, change=PAIR),
    Job("stages from owners", "pp2 dp2 zero1 by parameter", options=TEN, resume=FROM_OWNERS, change=PAIR),
    Job("four owners from two", "dp4 zero1 by parameter", options=TEN, resume=FROM_OWNERS, change=PAIR),
]
WRONG = Job("owners, wrong", "dp2 zero1 by parameter", options=EXACT, change=PAIR)


def trace(jobs: Sequence[Job], folder: Path) -> None:
    """What the ranks trace, before they are forked."""
    fit(dataclasses.replace(jobs[0], resume="", save=False), folder, "local")


def train_wrong(rank: int, jobs: Sequence[Job], folder: Path) -> list[dict[str, Any]]:
    """Rank 1 believes that the matrices of rank 0 are its own, and the reverse."""

    def turned(self: Any, tensors: Any, sizes: Any) -> tuple[int, ...]:
        return tuple(1 - owner for owner in assign(self, tensors, sizes))

    assign = Owners.assign
    with mock.patch.object(Owners, "assign", turned if rank == 1 else assign):
        return train(rank, jobs, folder)


def with_stale_gradient(module: Any) -> None:
    """The owner of the inner matrix updates it with the gradient of the step before."""
    PAIR(module)
    before: list[torch.Tensor] = []

    def stale(optimizer: torch.optim.Optimizer) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.shape == module.inner.weight.shape and p.grad is not None:
                before.append(p.grad.clone())
                p.grad.copy_(before[max(len(before) - 2, 0)])
                return

    module.on_before_optimizer_step = stale


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def ten(folder: Path) -> dict[str, Any]:
    """Ten steps of one device, which saves a checkpoint after five."""
    return fit(ONE, folder, None)


@pytest.fixture(scope="module")
def resumed(folder: Path, ten: Any) -> dict[str, Any]:
    """The last five of these steps, from the checkpoint. Lightning reads it into a module in float32."""
    return fit(dataclasses.replace(ONE, save=False, resume="one, None, step=5.ckpt"), folder, None)


def launched(jobs: list[Job], folder: Path, run: Any = train) -> dict[str, list[dict[str, Any]]]:
    """What every rank has seen of a job, by the name of the job."""
    where = folder / f"ranks of {jobs[0].name}"
    found = launch(PROCESSES[jobs[0].program], run, where, jobs, folder, prepare=trace)
    for each in found:
        assert isinstance(each, list), each
    return {job.name: [each[i] for each in found] for i, job in enumerate(jobs)}


@pytest.fixture(scope="module")
def two(folder: Path, ten: Any) -> dict[str, list[dict[str, Any]]]:
    return launched(TWO, folder)


@pytest.fixture(scope="module")
def four(folder: Path, two: Any) -> dict[str, list[dict[str, Any]]]:
    return launched(FOUR, folder)


def check(job: Job, ranks: list[dict[str, Any]], folder: Path, ten: Any, resumed: Any) -> None:
    expected = resumed if job.resume else ten if job.save else fit(job, folder, None)
    for rank in ranks:
        assert "error" not in rank, rank
        assert len(rank["losses"]) == len(expected["losses"])
        assert distance(expected["values"], rank["values"]) < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("job", TWO, ids=lambda job: job.name)
def test_two_processes_train_as_one_device(job, two, folder, ten, resumed):
    check(job, two[job.name], folder, ten, resumed)


@pytest.mark.long
@pytest.mark.parametrize("job", FOUR, ids=lambda job: job.name)
def test_four_processes_train_as_one_device(job, four, folder, ten, resumed):
    check(job, four[job.name], folder, ten, resumed)


@pytest.mark.long
def test_each_matrix_has_one_owner(two):
    """The bits are those of replicas that update all matrices themselves."""
    owners, replicas = two["owners"], two["replicas"]
    for one, other in zip(owners, replicas, strict=True):
        assert same(one["values"], other["values"])
    matrices = [[shape for shape, _ in rank["groups"][0]] for rank in owners]
    assert all(len(shape) == 2 for own in matrices for shape in own)
    assert all(matrices), "a process updates nothing"
    everywhere = [shape for shape, _ in replicas[0]["groups"][0]]
    assert sorted(shape for own in matrices for shape in own) == sorted(everywhere)


@pytest.mark.long
def test_processes_that_disagree_on_owners_stop(folder, ten):
    for rank in launched([WRONG], folder, train_wrong)[WRONG.name]:
        assert "[PIPER-L006]" in rank["error"]


@pytest.mark.parametrize("change", [PAIR, with_stale_gradient])
def test_a_stale_gradient_shows(change, folder):
    job = Job("stale", "dp2 zero1 by parameter", options=EXACT, change=PAIR)
    one, found = fit(job, folder, None), fit(dataclasses.replace(job, change=change), folder, "local")
    off = distance(one["values"], found["values"])
    assert off < ROUNDING if change is PAIR else off > 1e-4


class Words(Model):
    """An embedding, blocks of matrices of any width, which Piper finds (tag `LAYER`), and a head."""

    def __init__(self, widths: Sequence[int], muon: Callable[[], bool]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8), nn.LayerNorm(8))
            for width in widths
        )
        self.head = nn.Linear(8, 11)
        self.matrices = [p for p in self.blocks.parameters() if p.ndim == 2 and muon()]

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch["tokens"])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> Any:
        own = {id(p) for p in self.matrices}
        others = [p for p in self.parameters() if id(p) not in own]
        return MuonAndAdamW([{"params": self.matrices, "matrices": True}, {"params": others}], lr=0.02)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(11, (count, 12, 6), generator=torch.Generator().manual_seed(1))
    return [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in words]


def trained(
    program: list[Any] | None, widths: Sequence[int] = (16, 16), muon: Callable[[], bool] = lambda: True
) -> dict[str, torch.Tensor]:
    """The values after three steps of 12 samples: under a program in one process, or on one device."""
    torch.manual_seed(0)
    module = Words(widths, muon)
    strategy: Any = "auto" if program is None else piper.PiperStrategy(program, transport="local")
    run, _ = trainer(strategy, max_steps=3, **EXACT)
    run.fit(module, Batches(batches(3)))
    return values(module)


@pytest.mark.parametrize("seed", marked(range(8), (0, 1)))
def test_any_shapes_and_groups_train_as_one_device(seed):
    drawn = random.Random(seed)
    widths = [drawn.randint(1, 40) for _ in range(drawn.randint(1, 3))]
    replicas = drawn.choice([2, 3, 4])
    options: dict[str, Any] = {
        "zero": drawn.choice([1, 2, 3]),
        "bucket_size": drawn.choice([0.0005, 0.003, 25]),
    }
    if replicas == 4 and drawn.random() < 0.5:
        options["shard_size"] = 2
    program = [piper.Place(list(range(replicas))), piper.Replicate(shard_by="parameter", **options)]
    flags = [drawn.random() < 0.8 for _ in range(2 * len(widths))]
    one, found = (trained(each, widths, iter(flags).__next__) for each in (None, program))
    assert distance(one, found) < ROUNDING
    other = trained(None, widths, iter([not flag for flag in flags]).__next__)
    assert distance(other, found) > 1e-4


def test_embeddings_may_be_cut_while_matrices_are_whole():
    """The program of the how-to: only the regions whose parameters Muon updates have whole parameters."""
    program = [
        piper.Place([0, 1]),
        piper.Replicate(filter={"LAYER": "*"}, zero=1, shard_by="parameter"),
        piper.Replicate(filter={"LAYER": "-"}, zero=1),
    ]
    one, found = trained(None), trained(program)
    assert distance(one, found) < ROUNDING
    (batch,) = batches(1)
    dag = piper.compile(Words((16, 16), lambda: True), batch, program).dag
    buckets = [node.outputs[0].bucket for node in dag.of_type(Parameters)]
    whole = [dict(zip(b.names, b.owners, strict=True)) for b in buckets if b.owners is not None]
    assert {name.split(".")[0] for own in whole for name in own} == {"blocks"}
    for block in (0, 1):
        assert {
            o for own in whole for name, o in own.items() if f"blocks.{block}" in name and "weight" in name
        } == {0, 1}
