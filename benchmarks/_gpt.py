"""The model of the benchmarks: a GPT as a list of stages. This package and its peers all train it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `cut` lists the layers of each stage. The embedding joins the first stage, the head
    the last.
    """

    cut: tuple[int, ...] = (4, 4)
    d: int = 256
    heads: int = 4
    seq: int = 128
    vocab: int = 4096


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d), nn.LayerNorm(c.d)
        self.qkv, self.proj = nn.Linear(c.d, 3 * c.d), nn.Linear(c.d, c.d)
        self.up, self.down = nn.Linear(c.d, 4 * c.d), nn.Linear(4 * c.d, c.d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embed(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(c.vocab, c.d), nn.Embedding(c.seq, c.d)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


def stages(c: Config) -> nn.ModuleList:
    """Return the stages of the model, with equal weights in every process."""
    torch.manual_seed(0)
    built = []
    for i, layers in enumerate(c.cut):
        parts: list[nn.Module] = [Embed(c)] if i == 0 else []
        parts += [Block(c) for _ in range(layers)]
        if i == len(c.cut) - 1:
            parts += [nn.LayerNorm(c.d), nn.Linear(c.d, c.vocab, bias=False)]
        built.append(nn.Sequential(*parts))
    return nn.ModuleList(built)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(c: Config, step: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets `[sequences, seq]` of a step, the same in every process."""
    tokens = torch.randint(0, c.vocab, (sequences, c.seq + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Module(L.LightningModule):
    """A LightningModule whose stages are annotated with `PP`. With `layers`, each layer is also a region of
    its own (tag `L`).
    """

    def __init__(self, c: Config, layers: bool = False) -> None:
        super().__init__()
        self.stages, self.layers = stages(c), layers

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, targets = batch
        for i, stage in enumerate(self.stages):
            with piper.annotate("PP", i):
                for part in stage:  # type: ignore[attr-defined]
                    with piper.annotate("L") if self.layers else contextlib.nullcontext():
                        x = part(x)
                        if part is self.stages[-1][-1]:  # type: ignore[index]
                            return loss_of(x, targets)
        raise ValueError("a model has at least one stage")


class Plain(L.LightningModule):
    """The same model without annotations. Its blocks are in one list."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        parts = [part for stage in stages(c) for part in stage]  # type: ignore[attr-defined]
        self.embed, self.blocks, self.norm, self.head = (
            parts[0],
            nn.ModuleList(parts[1:-2]),
            parts[-2],
            parts[-1],
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), batch[1])
