"""A search at the first batch of a fit, for a loss whose scores do not fit."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.cache import CACHE
from lightning_piper.placements import chunked_scores
from lightning_piper.session import auto_search, available_memory
from lightning_piper.strategy import strategy
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET
from tests.tensors import far

ROUNDING = 1e-14
WORDS, ROWS = 2000, 256
ROOM = 3_000_000  # bytes; the scores of a sample take 4 MB, and 16 rows of them 256 kB


class Words(L.LightningModule):
    """Its scores need most of the memory. With `smoothing`, `ChunkLoss` does not apply."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head, self.smoothing = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), smoothing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.head(self.embed(batch[0]).tanh())
        target = batch[0].roll(1, 1).flatten()
        return F.cross_entropy(scores.flatten(0, 1), target, label_smoothing=self.smoothing)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=10.0)


def fit(smoothing: float, given: Any, rank: int | None, epochs: int = 1) -> tuple[Words, list[str]]:
    """Train on four samples, and return the module and the log. `rank` is one of two ranks, each of which has every
    other sample."""
    torch.manual_seed(0)
    module, told = Words(smoothing).double(), list[str]()
    samples = torch.randint(WORDS, (4, ROWS), generator=torch.Generator().manual_seed(1))
    own = TensorDataset(samples if rank is None else samples[rank::2])
    devices, about = 1 if rank is None else 2, {"use_distributed_sampler": False, **QUIET}
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=given, precision="64-true", max_epochs=epochs, **about
    )
    with mock.patch.object(strategy, "rank_zero_info", told.append):
        trainer.fit(module, DataLoader(own, batch_size=2 // devices))
    return module, told


def train(rank: int, folder: str) -> dict[str, tuple[dict[str, Tensor], str]]:
    os.environ[CACHE] = folder
    found = {}
    with (
        mock.patch.object(available_memory, "_own", return_value=ROOM / (1 - available_memory.SPARED)),
        mock.patch.multiple(chunked_scores, SCORES=1, ROWS=16),
    ):
        for name, smoothing in (("chunks", 0.0), ("again", 0.0), ("none", 0.1)):
            module, told = fit(smoothing, piper.PiperStrategy("auto"), rank)
            found[name] = module.state_dict(), "\n".join(told)
    return found


@pytest.mark.long
def test_a_loss_in_chunks_keeps_the_module_whole(tmp_path):
    """And trains like one device. And the control: a loss that has no chunks has no program that fits."""
    ranks = launch_trainings(2, train, tmp_path, str(tmp_path))
    one, more = fit(0.0, "auto", None)[0], fit(0.0, "auto", None, epochs=2)[0]
    for outcome in ranks:
        for name in ("chunks", "again"):
            trained = Words().double()
            trained.load_state_dict(outcome[name][0])
            assert far(trained, one) < ROUNDING < 1e-6 < far(trained, more)
    told = {name: said for name, (_, said) in ranks[0].items()}
    for name in ("chunks", "again"):  # the second fit takes the program from a file
        assert "PiperStrategy chose 2 replicas at ZeRO 0; the loss in chunks" in told[name]
        assert (
            "without ChunkLoss, the search found no program that fits" in told[name]
            and auto_search.LOST not in told[name]
        )
    assert "with its loss in chunks (ChunkLoss), because memory" in told["chunks"]
    assert "measures" not in told["again"]
    assert "data parallelism instead of a program from the search: search: no program fits" in told["none"]
