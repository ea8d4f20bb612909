"""Piper copies a module to find its stages. The copies must not run `__del__` of the user's objects."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture.proxies.batch import flatten
from lightning_piper.common import module_copies
from lightning_piper.common.module_copies import FinalizedModule, copy_module, finalized
from lightning_piper.errors import CaptureError
from tests.strategy.fitting import Batches, trainer


class Counted:
    """An object that counts the objects of its class that exist."""

    alive = 0

    def __init__(self) -> None:
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


class Counting(L.LightningModule):
    """A module whose loss depends on how many of its objects exist. A hook removes one after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        Counted.alive = 0
        self.held = {"some": [Counted() for _ in range(3)]}
        self.net = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean() * (1.0 + Counted.alive)

    def on_train_batch_end(self, *_: Any) -> None:
        self.held["some"].pop()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any) -> Tensor:
    module = Counting()
    fit, _ = trainer(strategy, max_steps=3)
    fit.fit(
        module,
        Batches(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)),
    )
    return torch.cat([x.flatten() for x in module.state_dict().values()])


def stages() -> piper.PiperStrategy:
    return piper.PiperStrategy(pp=2, microbatches=2, transport="local")


def test_a_search_for_stages_does_not_end_the_users_objects() -> None:
    assert float((trained("auto") - trained(stages())).abs().max()) < 1e-12


def test_copies_of_the_objects_would_change_the_training() -> None:
    def copied(value: Any, known: Any = ()) -> Any:
        return iter(())

    with mock.patch.object(module_copies, "finalized", copied):
        try:
            found = trained(stages())
        except CaptureError:  # the count changes while the step is captured
            return
    assert float((trained("auto") - found).abs().max()) > 1e-3


def test_a_copy_shares_these_objects_and_no_others() -> None:
    module = Counting()
    made = copy_module(module)
    assert made.held["some"] is not module.held["some"]
    assert [x is y for x, y in zip(made.held["some"], module.held["some"], strict=True)] == [True] * 3  # type: ignore[index, arg-type]
    assert copy.deepcopy(module).held["some"][0] is not module.held["some"][0]
    assert len(list(finalized(module))) == 3


def test_a_module_with_a_finalizer_is_not_copied() -> None:
    class Ending(Counting):
        def __del__(self) -> None:
            pass

    with pytest.raises(FinalizedModule, match="Ending defines __del__"):
        copy_module(Ending())


def test_a_batch_of_such_objects_is_an_error() -> None:
    class Graph(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.ones(4, 2)

    graph = Graph()
    before = Counted.alive
    with pytest.raises(
        CaptureError, match="holds a Graph, whose __del__ would also run for copies, at batch"
    ):
        flatten(graph)
    assert Counted.alive == before
