"""Repeated blocks become regions in a step without annotations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import lightning_piper as piper
from lightning_piper.annotate import annotate, repeated_blocks
from lightning_piper.capture import capture
from lightning_piper.directives import Directive
from lightning_piper.ops.communication.gather import AllGather
from lightning_piper.ops.communication.reduce import AllReduce
from tests.plan.test_gathers import held

WIDTH, LAYERS = 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(L.LightningModule):
    """Blocks between a first layer and a head. The module calls `around(i, block, x)`."""

    def __init__(self, make: Callable[[], nn.Module] = Block, around: Any = None) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([make() for _ in range(LAYERS)])
        self.around = around or (lambda i, block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = self.around(i, block, x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))


def made(*args: Any, **options: Any) -> tuple[Tower, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Tower(*args, **options).double(), (torch.randn(8, 4).double(), torch.randint(3, (8,)))


def tags(model: nn.Module, batch: Any, name: str = "training_step") -> list[dict[str, int]]:
    return [dict(region.tags) for region in capture(model, batch, name=name).at(8).regions]


LAYERED = [{}, *({"LAYER": i} for i in range(LAYERS)), {}]


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_each_block_is_a_region(name: str) -> None:
    model, batch = made()
    assert tags(model, batch, name) == LAYERED
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def in_place() -> nn.Module:
    block = Block()
    block.compile(backend="eager", fullgraph=True)
    return block


@pytest.mark.parametrize("make", [lambda: torch.compile(Block(), backend="eager", fullgraph=True), in_place])
def test_so_is_a_block_that_the_user_has_compiled(make: Callable[[], nn.Module]) -> None:
    model, batch = made(make=make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of hooks on all modules
        assert tags(model, batch) == LAYERED


def test_a_block_that_runs_twice_is_two_regions() -> None:
    model, batch = made(around=lambda i, block, x: block(block(x)) if i == 1 else block(x))
    assert tags(model, batch) == LAYERED, "one run with one tag"
    shared = Block()
    model, batch = made(make=lambda: shared)
    assert tags(model, batch) == [{}], "the same block, again and again, is one"


def test_what_says_something_itself_is_left_alone() -> None:
    def around(i: int, block: nn.Module, x: Tensor) -> Tensor:
        with annotate("PP", i // 3):
            return block(x)

    model, batch = made(around=around)
    assert tags(model, batch) == [{}, {"PP": 0}, {"PP": 1}, {}]
    model, batch = made()
    piper.annotate_modules(model, "PP", [["first", "blocks.[0-2]"], ["blocks.[3-4]", "head"]])
    assert tags(model, batch) == [{"PP": 0}, {"PP": 1}]


def test_which_modules_are_blocks() -> None:
    assert list(repeated_blocks(made()[0])) == [f"blocks.{i}" for i in range(LAYERS)]
    assert not repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), "leaves"
    assert not repeated_blocks(nn.ModuleList([Block(), nn.Sequential(Block())])), "of two kinds"
    assert not repeated_blocks(nn.ModuleList([Block()])), "one"
    assert not repeated_blocks(nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())])), (
        "without parameters"
    )
    nested = nn.ModuleDict(
        {
            "a": nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)]),
            "b": nn.Sequential(Block(), Block()),
        }
    )
    assert list(repeated_blocks(nested)) == ["a.0", "a.1", "b.0", "b.1"], "the outer list counts"


REPLICATED: list[Directive] = [piper.Place(filter={}, devices=[0, 1])]


def test_replicas_sum_the_gradients_of_each_block_by_itself() -> None:
    model, batch = made()
    program = [*REPLICATED, piper.Replicate(filter={}, devices=[0, 1])]
    dag = piper.compile(model, batch, program).dag
    sums = [
        set(node.outputs[0].names) for node in dag.of_type(AllReduce) if node.outputs[0].bucket is not None
    ]
    for i in range(LAYERS):
        assert {name for name, _ in model.named_parameters() if name.startswith(f"blocks.{i}.")} in sums
    report = piper.verify(model, batch, program)
    assert report.verdict == "verified" and max(row.before.distance for row in report.rows) < 1e-14


def test_sharded_parameters_are_gathered_block_by_block() -> None:
    """Those of the block that runs and of the next one are there, never more; of the same model as one
    region, all at once.
    """
    model, batch = made()
    program = [*REPLICATED, piper.Replicate(filter={}, devices=[0, 1], shard_params=True)]
    compiled = piper.compile(model, batch, program)
    assert max(held(compiled.plans[0])) == 2
    gathers = [node.outputs[0].names for node in compiled.dag.of_type(AllGather)]
    assert all(
        len({name.split(".")[1] for name in names if name.startswith("blocks.")}) <= 1 for names in gathers
    )
    piper.annotate_modules(model, "PP", [["first", "blocks.*", "head"]])
    together = [node.outputs[0].names for node in piper.compile(model, batch, program).dag.of_type(AllGather)]
    assert {len(names) for names in together} == {len(list(model.parameters()))}
    assert piper.verify(made()[0], batch, program).verdict == "verified"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_blocks_can_be_stages(microbatches: int) -> None:
    """The tag is there for filters."""
    model, batch = made()
    program: list[Directive] = [
        piper.Place(filter={"LAYER": [0, 1]}, devices=[0]),
        piper.Place(filter={"LAYER": [2, 3, 4]}, devices=[1]),
        piper.Place(filter={"LAYER": "-"}, devices=[0]),
    ]
    if microbatches > 1:
        program.append(piper.Split(filter={}, dim_name="MB", num_microbatches=microbatches))
    assert piper.verify(model, batch, program).verdict == "verified"
