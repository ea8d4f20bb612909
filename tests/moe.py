"""A small language-like model whose two stages each have a dropless mixture of experts, with losses per
token.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import nn

import lightning_piper as piper

WIDTH, EXPERTS, TOP, LENGTH = 8, 4, 2, 5


class Layer(nn.Module):
    """A router, experts, and the weighted sum of each token's experts plus the token itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(TOP)
        order = chosen.reshape(-1).argsort(stable=True)
        with piper.annotate("EP"):
            rows, sizes = piper.dispatch(
                flat[order // TOP], nn.functional.one_hot(chosen, EXPERTS).sum((0, 1))
            )
            hidden = nn.functional.gelu(piper.grouped_linear(rows, self.up, sizes))
            rows = piper.combine(piper.grouped_linear(hidden, self.down, sizes))
        mixed = torch.zeros_like(flat).index_add(
            0, order // TOP, rows * weights.reshape(-1)[order].unsqueeze(1)
        )
        return x + mixed.view_as(x)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            x = self.blocks[0](self.embed(x))
        with piper.annotate("PP", 1):
            return (self.head(self.blocks[1](x)).squeeze(-1) - y).square().mean()


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, LENGTH, WIDTH), torch.randn(samples, LENGTH)
