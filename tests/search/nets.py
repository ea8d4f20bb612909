"""Modules without any annotation of stages."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SEQ, VOCAB = 16, 2, 6, 20


class Module(L.LightningModule):
    """A module that trains a network with a classification loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        made = self.net(batch[0])
        return F.cross_entropy(made.flatten(0, -2), batch[1].flatten())


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, HEADS, d // HEADS).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(2, after)
        self.short = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.stage1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.stage2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(F.relu(self.stem(x)))).mean((2, 3)))


def images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 8, 8), torch.arange(samples) % 5


class Towers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = tower(), tower()  # not in the order in which they run

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.first(batch[0]) * self.second(batch[1])).sum(-1).mean()


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def pairs(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.randn(samples, 4)


class Returning(L.LightningModule):
    """A module in which one parameter belongs to no submodule that is called, and in which, if `returns`, the
    work comes back to a submodule that has run before.
    """

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.returns = returns

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.parts[1](self.parts[0](batch[0]) * self.scale)
        x = self.parts[2](x)
        if self.returns:
            x = self.parts[1](x)
        return self.parts[3](x).square().mean()
