"""Gradients that a chunk's code writes into the flat tensor of their bucket, to the bit of those that are copied there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.runtime import Executor, LocalTransport, chunks, laid, run_local
from tests.runtime.steps import CPU

PROGRAM = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])]


class Several(L.LightningModule):
    """Matrices of which each gradient is one product; one used twice, one whose gradient is a sum with another, and one that is
    logged as well; a convolution, whose gradient is no product."""

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


def run(compiled: Any, leaves: list[Tensor], found: Callable[..., Any] | None = None) -> tuple[list[Any], list[Executor]]:
    with mock.patch.object(chunks, "laid", found or laid.laid):
        transport = LocalTransport(compiled.plans)
        tensors = {name: x.detach() for name, x in compiled.module.named_parameters()}
        executors = [Executor(plan, compiled.step, tensors, {}, transport, CPU) for plan in compiled.plans.values()]
    return run_local(executors, leaves, 0), executors


@pytest.fixture(scope="module")
def compiled() -> Any:
    torch.manual_seed(0)
    module = Several()
    made = piper.compile(module, torch.randn(8, 8), PROGRAM)
    return mock.Mock(module=module, step=made.step, plans=made.plans)


def written(executor: Executor) -> set[str]:
    packs = {pack.node: pack for pack in laid.packs_of(executor.plan).values()}
    return {packs[node].bucket.names[i] for node, places in executor._chunks.laid.items() for i in places}


def test_products_are_written_where_they_are_packed(compiled: Any) -> None:
    leaves = [torch.randn(8, 8)]
    results, executors = run(compiled, leaves)
    copied, plain = run(compiled, leaves, lambda *_: None)
    assert written(executors[0]) == {"first.weight", "second.weight", "turned"}
    assert not written(plain[0])
    for result, other in zip(results, copied, strict=True):
        assert result.grads.keys() == other.grads.keys()
        assert all(torch.equal(result.grads[name], x) for name, x in other.grads.items())
    again = run_local(executors, leaves, 0)  # nothing of a step is left in the next one
    assert all(torch.equal(again[0].grads[name], x) for name, x in copied[0].grads.items())


def test_one_that_is_written_elsewhere_shows(compiled: Any) -> None:
    def moved(*args: Any) -> Any:
        found = laid.laid(*args)
        if found is None:
            return None
        (shape, stride, start), *others = found.layouts
        return laid.Laid(found.run, ((shape, stride, start + 64), *others), found.places)

    leaves = [torch.randn(8, 8)]
    (wrong, _), (right, _) = run(compiled, leaves, moved), run(compiled, leaves)
    assert any(not torch.equal(wrong[0].grads[name], x) for name, x in right[0].grads.items())
