"""A chain of tiny layers, one for each stage, with so little work that overhead dominates."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn

import lightning_piper as piper


class Chain(L.LightningModule):
    def __init__(self, stages: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(stages)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for i, layer in enumerate(self.layers):
            with piper.annotate("PP", i):
                x = torch.tanh(layer(x))
        return x.square().mean()
