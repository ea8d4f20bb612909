"""A small mixture-of-experts language model for tests: two blocks, each a pipeline stage, with experts of either form."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn

import lightning_piper as piper


class Experts(nn.Module):
    """One hidden layer for each expert, linear or with a nonlinearity, and a scale that all experts share."""

    def __init__(self, width: int, experts: int, even: bool, exact: bool, shared: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / (2 * width) ** 0.5)
        self.scale = nn.Parameter(torch.ones(2, 2 * width)) if shared else None
        self.even, self.exact = even, exact

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
        hidden = torch.bmm(rows, self.up.transpose(1, 2)) if sizes is None else piper.grouped_linear(rows, self.up, sizes)
        hidden = torch.relu(hidden) if self.exact else torch.nn.functional.gelu(hidden)
        if self.scale is not None:
            hidden = (hidden.view(-1, 2, hidden.shape[-1] // 2) * self.scale[:, : hidden.shape[-1] // 2]).view(hidden.shape)
        return torch.bmm(hidden, self.down.transpose(1, 2)) if sizes is None else piper.grouped_linear(hidden, self.down, sizes)


class Layer(nn.Module):
    """Router, experts, and the weighted sum of each token's k experts.

    With `even`, each sample has `capacity` places for each expert, and tokens beyond them go without it.
    """

    def __init__(self, width: int, experts: int, top: int, even: bool, exact: bool, shared: bool, capacity: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, experts, even, exact, shared)
        self.count, self.top, self.even, self.exact, self.capacity = experts, top, even, exact, capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        flat = x.reshape(-1, width)
        scores = self.router(flat)
        weights, chosen = (scores if self.exact else scores.softmax(-1)).topk(self.top)
        if self.even:
            mixed = self._with_capacity(flat, weights, chosen, samples, length)
        else:
            order = chosen.reshape(-1).argsort(stable=True)
            counts = torch.zeros(self.count, dtype=torch.int64, device=x.device).scatter_add(
                0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1))
            )
            token = order // self.top
            with piper.annotate("EP"):
                rows, sizes = piper.dispatch(flat[token], counts)
                rows = piper.combine(self.experts(rows, sizes))
            mixed = torch.zeros_like(flat).index_add(0, token, rows * weights.reshape(-1)[order].unsqueeze(1))
        return x + mixed.view_as(x)

    def _with_capacity(
        self, flat: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, samples: int, length: int
    ) -> torch.Tensor:
        slots = nn.functional.one_hot(chosen.view(samples, length * self.top), self.count)
        place = (slots.cumsum(1) - 1) * slots
        kept = slots * (place < self.capacity)
        seats = nn.functional.one_hot(place.clamp(max=self.capacity - 1), self.capacity) * kept.unsqueeze(-1)
        seats = seats.to(flat.dtype)  # [samples, tokens x top, experts, places]
        tokens = flat.view(samples, length, -1).repeat_interleave(self.top, 1)
        boxes = torch.einsum("sted,stw->edsw", seats, tokens)
        boxes = boxes.transpose(1, 2).reshape(self.count, samples * self.capacity, -1)
        with piper.annotate("EP"):
            boxes = piper.dispatch(boxes)
            boxes = piper.combine(self.experts(boxes, None))
        boxes = boxes.view(self.count, samples, self.capacity, -1)
        seats = seats * weights.view(samples, -1, 1, 1)
        mixed = torch.einsum("sted,esdw->stw", seats, boxes)
        return mixed.view(samples, length, self.top, -1).sum(2).reshape(samples * length, -1)


class Model(L.LightningModule):
    """Attributes:
    exact: no operation rounds where parameters and batch are small integers.
    """

    def __init__(self, experts: int = 4, top: int = 2, even: bool = False, exact: bool = False, shared: bool = False,
                 width: int = 8, blocks: int = 2) -> None:  # fmt: skip
        super().__init__()
        self.exact = exact
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Layer(width, experts, top, even, exact, shared) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        for i, block in enumerate(self.blocks):
            with piper.annotate("PP", i):
                x = block(self.embed(x) if i == 0 else x)
                if i == len(self.blocks) - 1:
                    error = self.head(x).squeeze(-1) - y
                    loss = error.sum() / y.numel() if self.exact else (error**2).mean()
                    self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batch(samples: int, length: int = 5, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, length, width), torch.randn(samples, length)
