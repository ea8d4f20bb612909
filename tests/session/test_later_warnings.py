"""When the program for a later batch is compared on the whole module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.processes.world import World
from lightning_piper.session.verification import LaterWarnings

ALONE = World(0, 1, torch.device("cpu"))


class Pair(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = self.first(batch)
        with piper.annotate("PP", 1):
            return self.last(h).square().mean()


class Owner:
    """Counts how often the whole module is put together in one process."""

    def __init__(self) -> None:
        self.times = 0

    @contextlib.contextmanager
    def whole_on_rank_zero(self) -> Iterator[None]:
        self.times += 1
        yield


@pytest.mark.parametrize("device, times", [("cpu", 1), ("meta", 0)])
def test_a_module_from_the_meta_device_is_not_put_together(device: str, times: int) -> None:
    """It may be too large for one process."""
    module, batch, own = Pair(), torch.rand(4, 4), Owner()
    compiled = piper.compile(module, batch, piper.schedules.one_f_one_b(stages=2, microbatches=2))
    later = LaterWarnings(compiled, module.to(device), ALONE, None)
    later.warn(compiled, [batch], captured=True, traced=True, own=own)  # type: ignore[arg-type]
    assert own.times == times
