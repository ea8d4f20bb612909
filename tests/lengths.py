"""Models for batches of any length, and such batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper.annotate import annotate

VOCABULARY, DIM, LONGEST = 11, 8, 40


class Causal(L.LightningModule):
    """A causal language model of one layer in two stages; positions are made from the length. Batch: [n, t]
    tokens and targets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LONGEST, DIM)
        self.qkv, self.norm, self.head = (
            nn.Linear(DIM, 3 * DIM),
            nn.LayerNorm(DIM),
            nn.Linear(DIM, VOCABULARY),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        with annotate("PP", 0):
            x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        with annotate("PP", 1):
            n, t, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, DIM)
            x = x + F.pad(x[:, :-1], (0, 0, 1, 0))
            loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        self.log("loss", loss, batch_size=n)
        return loss


class Sound(L.LightningModule):
    """Convolutions over [n, 2, t], with a mask for each sample. Python numbers that depend on the length
    scale the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 3, 3, stride=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths = batch["x"], batch["lengths"]
        with annotate("PP", 0):
            h = F.gelu(self.first(x)) * (1 / x.shape[2] ** 0.5)
        with annotate("PP", 1):
            h = self.second(F.pad(h, (1, 0)))
            mask = torch.arange(h.shape[2], device=h.device)[None] * 2 < lengths[:, None]
            return (h.square().sum(1) * mask).sum() / h.shape[2]


class Branching(Causal):
    """A model that has a different loss for long batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 3 if batch[0].shape[1] > 20 else loss


class Counting(Causal):
    """A model whose Python code counts to the length."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * sum(1 / (i + 1) for i in range(batch[0].shape[1]))


class Ignoring(Causal):
    """A model that ignores some targets, so a microbatch has a weight for each target that counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return super().training_step((tokens, torch.where(targets < 4, -100, targets)), batch_idx)


class Paced(Causal):
    """A model that computes with a number that differs from step to step and depends on the length."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + batch_idx / batch[0].shape[1])


class Deeper(Causal):
    """A model that has one more region for long batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch[0].shape[1] > 20:
            with annotate("PP", 2):
                loss = loss + self.norm.weight.square().mean()
        return loss


def tokens(size: int, length: int) -> Any:
    generator = torch.Generator().manual_seed(100 * size + length)
    found = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def sound(size: int, length: int) -> Any:
    generator = torch.Generator().manual_seed(100 * size + length)
    return {
        "x": torch.randn(size, 2, length, generator=generator),
        "lengths": torch.randint(1, length, (size,), generator=generator),
    }
