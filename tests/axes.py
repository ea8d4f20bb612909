"""Programs whose tensors are divided along several axes, and a decoder with experts."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Replicate, ShardExperts, ShardSequences, ShardWeights
from tests.tensors import DIM, PARAMS, VOCABULARY, WORDS, Attention


def columns(axis: str = "tp", **fields: Any) -> ShardWeights:
    return ShardWeights(
        **({"filter": {}, "axis": axis, "params": PARAMS | VOCABULARY, "stream": axis} | fields)
    )


def sequences(attention: str | None = "keys", axis: str = "cp", **fields: Any) -> ShardSequences:
    return ShardSequences(
        **({"filter": {}, "axis": axis, "values": {"*": 1}, "attention": attention, "stream": axis} | fields)
    )


def everywhere(count: int, **levels: Any) -> Replicate:
    return Replicate(filter={}, devices=list(range(count)), bucket_size=1e-4, **levels)


class Sparse(nn.Module):
    """A mixture of experts that sends each token to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((2 * DIM, DIM), (DIM, 2 * DIM))
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        with piper.annotate("EP"):
            rows, sizes = piper.dispatch(tokens[order // 2], F.one_hot(chosen, 4).sum((0, 1)))
            rows = piper.combine(
                piper.grouped_linear(piper.grouped_linear(rows, self.up, sizes).relu(), self.down, sizes)
            )
        return (
            torch.zeros_like(tokens)
            .index_add(0, order // 2, rows * weights.flatten()[order].unsqueeze(1))
            .view_as(x)
        )


class SparseDecoder(L.LightningModule):
    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.embed, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.attentions, self.mixed = (
            nn.ModuleList(Attention(4) for _ in range(2)),
            nn.ModuleList(Sparse() for _ in range(2)),
        )
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, target = batch
        for layer in range(2):
            with piper.annotate("LAYER", layer):
                x = self.embed(tokens) if layer == 0 else x  # noqa: F821
                x = x + self.attentions[layer](self.norms[2 * layer](x))
                x = x + self.mixed[layer](self.norms[2 * layer + 1](x))
                if layer:
                    return F.cross_entropy(
                        self.head(x).flatten(0, 1), target.flatten(), label_smoothing=self.label_smoothing
                    )
        raise AssertionError

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def sparse(**options: Any) -> SparseDecoder:
    torch.manual_seed(0)
    return SparseDecoder(**options).double()


HEADS = {"*.q.weight": 0, "*.k.weight": 0, "*.v.weight": 0, "*.out.weight": 1}
EXPERTS = ShardExperts(filter={"EP": "*"}, axis="ep")
