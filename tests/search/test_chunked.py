"""A search for a model whose scores do not fit: it computes the loss in chunks, and only then."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.errors import SearchError

WORDS, WIDTH, ROWS = 4000, 8, 2048


class Words(L.LightningModule):
    """A model of which the scores need nearly all of the memory. With `weights`, `ChunkLoss` does not apply."""

    def __init__(self, weights: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("weight", torch.ones(WORDS) if weights else None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.head(self.embed(batch).tanh())
        return F.cross_entropy(scores.flatten(0, 1), batch.flatten(), self.weight)


def found(memory: str, weights: bool = False, progress: Any = None) -> piper.search.Proposal:
    batch = torch.arange(ROWS)[None]  # one sample, which no microbatch divides
    return piper.search(
        Words(weights), batch, 1, memory, hardware="cpu", schedules=("gpipe",), progress=progress
    )


def test_the_loss_in_chunks_if_nothing_else_fits() -> None:
    lines: dict[str, list[str]] = {"1GiB": [], "20MiB": []}
    roomy, tight = (found(memory, progress=said.append) for memory, said in lines.items())
    again = "found no program that fits; searching again with the logits of the loss in chunks (ChunkLoss)"
    assert [again in said for said in lines.values()] == [False, True]
    assert not any(isinstance(each, piper.ChunkLoss) for each in roomy.directives)
    assert isinstance(tight.directives[0], piper.ChunkLoss)
    assert tight.memory <= 20 * 2**20 < roomy.memory
    assert "ChunkLoss(" in str(tight)


def test_a_loss_that_has_no_chunks_does_not_fit() -> None:
    with pytest.raises(SearchError, match="no program fits"):
        found("20MiB", weights=True)
