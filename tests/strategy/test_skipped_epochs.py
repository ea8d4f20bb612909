"""A hook that skips the rest of an epoch on one rank only is an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lightning_piper.strategy.loading.skipped_epochs import returns_only_none
from tests.distributed.processes import launch_trainings
from tests.strategy.skipped import STRATEGIES, WHERE, Net, fit, train


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return launch_trainings(2, train, tmp_path_factory.mktemp("skipped"))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("at", WHERE)
def test_one_rank_cannot_skip_alone(name: str, at: int, ranks: list[dict[Any, Any]]) -> None:
    steps = fit("auto", 1, Net(at, (0,), False))
    for found in ranks:
        assert found[name, at, "all"] == steps == 4 + at
        assert f"returned -1 on rank 1 at batch {at}, but not on rank 0" in found[name, at, "one"]
        assert found[name, at, "decided"] == steps  # the fix that the error names


def _nothing(self: Any) -> None:
    if self:
        return
    print(self)


def _explicit(self: Any) -> None:
    return None


def _skips(self: Any) -> int | None:
    return -1 if self else None


def _passes_on(self: Any) -> Any:
    return self()


def _yields(self: Any) -> Iterator[None]:
    yield self


def _either(self: Any) -> Any:
    return self or None


@pytest.mark.parametrize("function, expected", [
    (_nothing, True),
    (_explicit, True),
    (LightningModule().on_train_batch_start, True),
    (_skips, False),
    (_passes_on, False),
    (_yields, False),
    (_either, False),
    (partial(_nothing, 1), False),
])  # fmt: skip
def test_functions_that_return_only_none(function: Callable[..., Any], expected: bool) -> None:
    assert returns_only_none(function) is expected
