"""Models that are a chain of blocks and a loss, in which each block maps one value to the next.

This package's search and torch's own schedules, replicas and shards get the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from _gpt import Block, Config, Embed
from torch import Tensor, nn

import lightning_piper as piper

SAMPLES = 8
Loss = Callable[[Any, Tensor], Tensor]


class Chain(L.LightningModule):
    """A chain of blocks with a loss of the last block's output and the targets. A batch is (inputs,
    targets).
    """

    def __init__(self, blocks: list[nn.Module], loss: Loss) -> None:
        super().__init__()
        self.blocks, self.loss = nn.ModuleList(blocks), loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x: Any = batch[0]
        for block in self.blocks:
            x = block(x)
        return self.loss(x, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


Made = tuple[Chain, tuple[Tensor, Tensor]]


def of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_classes(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def of_pairs(scores: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, targets)


def words(vocab: int, seq: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocab, (samples, seq + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt() -> Made:
    c = Config()
    blocks: list[nn.Module] = [
        Embed(c),
        *(Block(c) for _ in range(6)),
        nn.LayerNorm(c.d),
        nn.Linear(c.d, c.vocab, bias=False),
    ]
    return Chain(blocks, of_words), words(c.vocab, c.seq)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self, dim: int, heads: int, kv_heads: int, seq: int) -> None:
        super().__init__()
        self.size = dim // heads
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * self.size, bias=False) for _ in range(2))
        angles = torch.arange(seq).unsqueeze(1) * 10_000.0 ** (
            -torch.arange(0, self.size, 2) / self.size
        ).repeat(2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], dim=-1) * self.sin


class Gated(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of each token's two experts of eight, weighted by the router's scores, without a balancing
    loss.
    """

    def __init__(self, dim: int, hidden: int, experts: int = 8, top: int = 2) -> None:
        super().__init__()
        self.count, self.top = experts, top
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate_up = nn.Parameter(0.02 * torch.randn(experts, 2 * hidden, dim))
        self.down = nn.Parameter(0.02 * torch.randn(experts, dim, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        rows, sizes = tokens[order // self.top], F.one_hot(chosen, self.count).sum(1).sum(0)
        gate, up = piper.grouped_linear(rows, self.gate_up, sizes).chunk(2, dim=-1)
        rows = piper.grouped_linear(F.silu(gate) * up, self.down, sizes)
        return (
            torch.zeros_like(tokens)
            .index_add(0, order // self.top, rows * weights.flatten()[order].unsqueeze(1))
            .view_as(x)
        )


class Layer(nn.Module):
    """A layer with a norm before the attention and before the MLP."""

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = nn.RMSNorm(dim), nn.RMSNorm(dim), attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def decoder(
    mlp: Callable[[int], nn.Module], dim: int, layers: int, vocab: int = 4096, seq: int = 128
) -> Made:
    blocks: list[nn.Module] = [nn.Embedding(vocab, dim)]
    blocks += [Layer(dim, Attention(dim, 8, 2, seq), mlp(dim)) for _ in range(layers)]
    blocks += [nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)]
    return Chain(blocks, of_words), words(vocab, seq)


def llama() -> Made:
    return decoder(lambda dim: Gated(dim, 704), 256, 6)


def moe() -> Made:
    return decoder(lambda dim: Experts(dim, 256), 192, 4)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


def resnet() -> Made:
    blocks: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(4))]
    blocks += [nn.Conv2d(32, 64, 3, stride=2, padding=1), *(Residual(64) for _ in range(4))]
    blocks += [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))]
    return Chain(blocks, of_classes), (torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 100, (SAMPLES,)))


class Towers(nn.Module):
    """The embeddings of a user's and of an item's words."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.user, self.thing = nn.EmbeddingBag(vocab, dim), nn.EmbeddingBag(vocab // 2, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.user(x[:, 0]), self.thing(x[:, 1])], 1)


class Pair(nn.Module):
    """A layer of both towers: (samples, 2, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.user, self.thing = (
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([self.user(x[:, 0]), self.thing(x[:, 1])], 1)


class Score(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] * x[:, 1]).sum(-1)


def two_tower() -> Made:
    blocks: list[nn.Module] = [Towers(8000, 256), *(Pair(256) for _ in range(6)), Score()]
    return Chain(blocks, of_pairs), (
        torch.randint(0, 4000, (1024, 2, 16)),
        torch.randint(0, 2, (1024,)).float(),
    )


def uneven() -> Made:
    """Return a model whose embedding table is larger than all other parameters together."""
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
    ]
    blocks = [nn.EmbeddingBag(60000, 256), *layers, nn.Linear(256, 100)]
    return Chain(blocks, of_classes), (torch.randint(0, 60000, (512, 32)), torch.randint(0, 100, (512,)))


MODELS: dict[str, Callable[[], Made]] = {
    "gpt": gpt, "llama": llama, "moe": moe, "resnet": resnet, "two_tower": two_tower, "uneven": uneven
}  # fmt: skip
