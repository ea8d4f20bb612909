"""Gradients that a chunk's code writes directly into the flat tensor of their bucket equal, bit for bit,
those that are copied there. So do terms that the code adds directly to their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.ir.regions import Code
from lightning_piper.runtime import Executor, LocalTransport, chunks, inplace_grads, run_local, shards_of
from tests.runtime.steps import CPU

PROGRAM = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])]
PRODUCTS = {"first.weight", "second.weight", "turned"}
ROUNDING = 1e-15  # of gradients below 1 in float64; 6e-17 measured


def split(microbatches: int) -> piper.Split:
    return piper.Split(filter={}, dim_name="MB", num_microbatches=microbatches)


class Several(L.LightningModule):
    """Matrices whose gradient is a single product; one that is used twice, one whose gradient is a product
    plus another term, and a convolution, whose gradient is no product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.twice, self.shifted = nn.Linear(8, 8), nn.Linear(8, 8)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.second(self.first(batch).tanh()) @ self.turned
        x = self.twice(self.twice(x).tanh())
        x = self.convolution(x[:, None])[:, 0]
        x = self.shifted(x) + x @ self.shifted.weight.square()
        return x.square().mean()


Found = tuple[list[Any], list[Executor]]


def run(
    compiled: Any, leaves: list[Tensor], found: Callable[..., Any] | None = None, compiler: Any = None
) -> Found:
    with mock.patch.object(chunks, "inplace_code", found or inplace_grads.inplace_code):
        transport = LocalTransport(compiled.plans)
        tensors = {name: x.detach() for name, x in compiled.module.named_parameters()}
        executors = [
            Executor(
                plan,
                compiled.step,
                tensors,
                {},
                transport,
                CPU,
                shards_of(plan, tensors, CPU),
                compiler=compiler,
            )
            for plan in compiled.plans.values()
        ]
    return run_local(executors, leaves, 0), executors


def made(program: list[Any], module: L.LightningModule | None = None) -> Any:
    torch.manual_seed(0)
    module = (module or Several()).double()
    compiled = piper.compile(module, torch.randn(8, 8, dtype=torch.float64), program)
    return mock.Mock(module=module, step=compiled.step, plans=compiled.plans)


@pytest.fixture(scope="module")
def compiled() -> Any:
    return made(PROGRAM)


@pytest.fixture
def leaves() -> list[Tensor]:
    return [torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]


def as_it_is(code: Code) -> Any:
    """Stands for a compiler: returns the code as it is."""
    return code.run


def written(executor: Executor) -> set[str]:
    """The parameters whose gradients are written in place."""
    destinations = {destination.node: destination for destination in executor._chunks._destinations.values()}
    names = {
        node: destination.bucket.names if destination.bucket else names_of(executor, destination)
        for node, destination in destinations.items()
    }
    return {names[node][i] for node, places in executor._chunks.inplace.items() for i in places}


def names_of(executor: Executor, destination: inplace_grads.GradDestination) -> tuple[str, ...]:
    (deliver,) = (
        each
        for each in executor.plan.instructions
        if each.op == "deliver" and each.reads[0].slot == destination.into
    )
    return deliver.names  # type: ignore[attr-defined,no-any-return]


def farthest(results: list[Any], others: list[Any]) -> float:
    found = []
    for result, other in zip(results, others, strict=True):
        assert result.grads.keys() == other.grads.keys()
        found += [float((result.grads[name] - x).abs().max()) for name, x in other.grads.items()]
    return max(found)


def test_products_are_written_where_they_are_packed(compiled: Any, leaves: list[Tensor]) -> None:
    results, executors = run(compiled, leaves)
    copied, plain = run(compiled, leaves, lambda *_: None)
    assert written(executors[0]) == PRODUCTS
    assert not written(plain[0])
    assert farthest(results, copied) == 0
    assert farthest(run_local(executors, leaves, 0), copied) == 0  # nothing of a step is left in the next one


def moved(*args: Any) -> Any:
    found = inplace_grads.inplace_code(*args)
    if found is None:
        return None
    (shape, stride, start), *others = found.layouts
    return replace(found, layouts=((shape, stride, start + 64), *others))


@pytest.mark.parametrize("compiler", [None, as_it_is])
def test_one_that_is_written_elsewhere_shows(compiled: Any, leaves: list[Tensor], compiler: Any) -> None:
    others = [3 * leaves[0]]  # memory that is used again has none of their gradients
    (wrong, _), (right, _) = (run(compiled, others, found, compiler) for found in (moved, None))
    assert any(not torch.allclose(wrong[0].grads[name], x) for name, x in right[0].grads.items())


ZERO_2 = {"shard_grads": True}
SUMS: dict[str, tuple[list[Any], set[str]]] = {
    "one device": ([split(4)], PRODUCTS),
    "replicas": ([*PROGRAM, split(2)], PRODUCTS),
    "replicas, then microbatches of each": ([PROGRAM[0], split(4), PROGRAM[1]], PRODUCTS),
    "sharded gradients": (
        [*PROGRAM[:1], piper.Replicate(filter={}, devices=[0, 1], **ZERO_2), split(2)],
        PRODUCTS,
    ),
    "one microbatch": (PROGRAM, PRODUCTS),
    "unequal microbatches": ([split(3)], set()),  # its microbatches run different code
    "summed in another dtype": (
        [PROGRAM[0], piper.Replicate(filter={}, devices=[0, 1], reduce_dtype="float32"), split(2)],
        set(),
    ),
}


@pytest.mark.parametrize("program, names", SUMS.values(), ids=list(SUMS))
def test_where_code_is_compiled_products_are_added_to_sums(
    program: list[Any], names: set[str], leaves: list[Tensor]
) -> None:
    compiled = made(program)
    results, executors = run(compiled, leaves, compiler=as_it_is)
    added, plain = run(compiled, leaves)
    assert written(executors[0]) == names
    assert written(plain[0]) <= PRODUCTS
    assert farthest(results, added) <= ROUNDING
    assert farthest(run_local(executors, leaves, 0), results) == 0
    other = run_local(executors, [leaves[0] * 2], 0)
    assert farthest(other, results) > 1e-3
