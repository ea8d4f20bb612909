"""DeepSeek-V3 in stages, to capture without data."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from _stages import loss_in_stages
from torch import Tensor, nn

import lightning_piper as piper

WIDTH, HEADS, VOCABULARY = 7168, 128, 129280
QUERY, LATENT, PLAIN, ROTATED = (
    1536,
    512,
    128,
    64,
)  # ranks of the projections, and sizes of the parts of a head
EXPERTS, TOP, HIDDEN, DENSE = 256, 8, 2048, 18432
DENSE_LAYERS = 3  # layers without experts, which come first


class Attention(nn.Module):
    """Multi-head latent attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm = nn.Linear(WIDTH, QUERY, bias=False), nn.RMSNorm(QUERY)
        self.q_b = nn.Linear(QUERY, HEADS * (PLAIN + ROTATED), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, LATENT + ROTATED, bias=False), nn.RMSNorm(LATENT)
        self.kv_b = nn.Linear(LATENT, HEADS * 2 * PLAIN, bias=False)
        self.out = nn.Linear(HEADS * PLAIN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, k_rotated = self.kv_a(x).split((LATENT, ROTATED), dim=-1)
        k, v = self.kv_b(self.kv_norm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, dim=-1)
        q, q_rotated = q.split((PLAIN, ROTATED), dim=-1)
        k_rotated = rotated(k_rotated.unsqueeze(1), cos, sin).expand(-1, HEADS, -1, -1)
        q, k = torch.cat([q, rotated(q_rotated, cos, sin)], -1), torch.cat([k, k_rotated], -1)
        mixed = F.scaled_dot_product_attention(q, k, F.pad(v, (0, ROTATED)), is_causal=True)
        return self.out(mixed[..., :PLAIN].transpose(1, 2).flatten(-2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Gated(nn.Module):
    """A SwiGLU network."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """A network for all tokens, and experts of which each token uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS, bias=False), Gated(HIDDEN)
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).sigmoid().topk(TOP)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        with piper.annotate("EP"):
            rows, sizes = piper.dispatch(tokens[order // TOP], F.one_hot(chosen, EXPERTS).sum((0, 1)))
            gate, up = piper.grouped_linear(rows, self.up, sizes).chunk(2, dim=-1)
            rows = piper.combine(piper.grouped_linear(F.silu(gate) * up, self.down, sizes))
        weighted = rows * weights.flatten()[order].unsqueeze(1)
        mixed = torch.zeros_like(tokens).index_add(0, order // TOP, weighted)
        return mixed.view_as(x) + self.shared(x)


class Layer(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.mixture = Attention(), Gated(DENSE) if dense else Mixture()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        return x + self.mixture(self.norms[1](x))


class DeepSeek(L.LightningModule):
    """DeepSeek-V3 in stages, without the prediction of further tokens."""

    def __init__(self, stages: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.stages = nn.Embedding(VOCABULARY, WIDTH), stages
        self.layers = nn.ModuleList(Layer(i < DENSE_LAYERS) for i in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, ROTATED))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_in_stages(self, batch, self.cos, self.sin)
