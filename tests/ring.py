"""A decoder with few heads of keys and rotary positions, whose sequences are sharded over members of an axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper import Place, ShardSequences
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import Compiled
from lightning_piper.verify import Report
from tests import programs
from tests.strategy.fitting import QUIET, traced_once

WORDS, DIM, LENGTH = 12, 8, 16


class Block(nn.Module):
    def __init__(self, keys: int, causal: bool, dropout: float, mask: bool) -> None:
        super().__init__()
        self.norm, self.dropout, self.causal, self.mask = nn.LayerNorm(DIM), nn.Dropout(dropout), causal, mask
        self.q, self.k, self.v = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * keys, bias=False),
            nn.Linear(DIM, 2 * keys),
        )
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        inner = self.norm(x)
        q, k, v = (part(inner).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (self._turned(part, angles) for part in (q, k))
        mask = None
        if self.mask:  # the distance of a key lowers its score
            at = torch.arange(x.shape[1], dtype=x.dtype)
            mask = -(at[:, None] - at[None, :]).abs() / 4
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=True)
        return x + self.dropout(self.out(found.transpose(1, 2).flatten(2)).tanh())

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        one, other = x.unbind(-1)
        return torch.stack(
            (one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1
        )


class Long(L.LightningModule):
    """Batch: tokens [n, length] and the next tokens, some of which are padding (-100)."""

    def __init__(self, keys: int = 2, causal: bool = True, dropout: float = 0.0, mask: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(keys, causal, dropout, mask) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, target = batch
        angles = torch.arange(tokens.shape[1], dtype=self.embed.weight.dtype) / 3
        with piper.annotate("PP", 0), piper.annotate("LAYER", 0):
            x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            with piper.annotate("PP", i), piper.annotate("LAYER", i + 1):
                x = block(x, angles)
        with piper.annotate("PP", 1), piper.annotate("LAYER", 3):
            loss = F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def long(**options: Any) -> Long:
    torch.manual_seed(0)
    return Long(**options).double()


def words(count: int = 8, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    found = torch.randint(0, WORDS, (count, length + 1), generator=draw)
    target = found[:, 1:].clone()
    target[torch.rand(target.shape, generator=draw) < 0.2] = -100
    return found[:, :-1].contiguous(), target


@functools.cache
def captured(**options: Any) -> CapturedStep:
    return capture(long(**options), words())


def compiled_for(program: Any, **options: Any) -> Compiled:
    return programs.compiled(captured(**options), program)


def report_of(program: Any, **options: Any) -> Report:
    return programs.report(captured(**options), words(), program)


def sequences(devices: Any, attention: str | None = "ring", runs: int = 1) -> ShardSequences:
    values: Any = {"*": 1 if runs == 1 else (1, runs)}
    return ShardSequences(
        filter={}, devices=devices, axis="cp", stream="cp", values=values, attention=attention
    )


def around(degree: int = 2, **about: Any) -> list[Any]:
    """Return a program with all chunks on `degree` devices, which divide the sequences."""
    devices = list(range(degree))
    return [Place(filter={}, devices=devices), sequences(devices, **about)]


def stages(groups: Sequence[Sequence[int]]) -> list[Any]:
    return [Place(filter={"PP": stage}, devices=list(group)) for stage, group in enumerate(groups)]


@traced_once
def fit(
    module: L.LightningModule, strategy: Any, devices: int = 1, replica: int | None = None, **options: Any
) -> L.Trainer:
    """Fit the module, and return the Trainer. `replica` is 0 or 1: the number of a replica, which draws every
    other sample. None: the module gets all samples."""
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, precision="64-true", **(QUIET | options)
    )
    data = TensorDataset(*(x if replica is None else x[replica::2] for x in words(24)))
    trainer.fit(module, DataLoader(data, batch_size=8 if replica is None else 4))
    return trainer
