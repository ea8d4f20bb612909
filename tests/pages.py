"""Names that the blocks of the pages use without definition: modules, a batch, and a Trainer for dry runs.
test_pages.py runs the blocks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


class Pair(L.LightningModule):
    """The module of most blocks: two linear layers in two stages. Batch: `samples`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            h = F.relu(self.first(x))
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(1, (1, 4, 4))
        x = x + F.scaled_dot_product_attention(heads, heads, heads).flatten(1)
        return x + self.down(F.gelu(self.up(x)))


class Layers(L.LightningModule):
    """A module with any number of layers, whose submodules have the names of common models (`embed`,
    `layers`, `norm`, `head`). With `tag`, each layer is annotated with this tag and its index.
    """

    def __init__(self, layers: int, tag: str | None = None) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        self.layers, self.tag = nn.ModuleList(Layer() for _ in range(layers)), tag

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with self.part(0):
            x = self.embed(x)
        for i, layer in enumerate(self.layers):
            with self.part(i):
                x = layer(x)
        with self.part(len(self.layers) - 1):
            return F.mse_loss(self.head(self.norm(x)), y)

    def part(self, index: int) -> Any:
        return piper.annotate(self.tag, index) if self.tag else contextlib.nullcontext()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(count: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))
    return x, x.sum(dim=1, keepdim=True)


class LocalStrategy(piper.PiperStrategy):
    """A strategy that runs all devices of the program in this process."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{"transport": "local", **options})


def local_trainer(trainer: type[L.Trainer]) -> Any:
    """Return a replacement of `L.Trainer` for the blocks of pages. It makes a Trainer of class `trainer` with
    one process on a CPU, whatever devices a block names, and with one epoch if the block does not say how
    many.
    """

    def make(*, devices: int = 1, num_nodes: int = 1, strategy: Any = "auto", **options: Any) -> L.Trainer:
        options = {**QUIET, "max_epochs": 1, **options, "accelerator": "cpu"}
        return trainer(devices=1, strategy=strategy, **options)

    return make
