"""Steps of two stages that break an assumption of a program with microbatches, each in one line, and similar
steps that do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper

CLASSES = 3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
Middle = Callable[
    ["Step", Tensor, Tensor, Tensor], Tensor
]  # hidden values, inputs and labels -> hidden values
Loss = Callable[["Step", Tensor, Tensor, Tensor], Tensor]  # hidden values, logits and labels


def _same(module: Step, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h


def _mean(module: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(p, y)


class Step(L.LightningModule):
    """Two stages; `middle` is applied in the first one, and `loss` in the last one."""

    def __init__(self, middle: Middle = _same, loss: Loss = _mean) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle, self.loss = middle, loss
        self.first, self.last = nn.Linear(6, 8, **DOUBLE), nn.Linear(8, CLASSES, **DOUBLE)
        self.table = nn.Embedding(CLASSES, 8, **DOUBLE)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8, **DOUBLE))
        self.register_buffer("count", torch.zeros((), **DOUBLE))
        self.register_buffer("average", torch.zeros(8, **DOUBLE))
        self.register_buffer("slow", torch.ones(CLASSES, 8, **DOUBLE))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            h = self.middle(self, torch.tanh(self.first(x)), x, y)
        with piper.annotate("PP", 1):
            return self.loss(self, h, self.last(h), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# State that a step changes


def _counts(s: Step, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    s.count += 1
    return h * torch.exp(-0.1 * s.count)


def _averages_weights(s: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    s.slow.mul_(0.9).add_(0.1 * s.last.weight.detach())
    return F.cross_entropy(p, y) + (F.linear(h, s.slow) - p).square().mean()


def _averages_samples(s: Step, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    s.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h


def _subtracts_average(s: Step, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return _averages_samples(s, h, x, y) - s.average


# Samples that meet


def _simclr(s: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(torch.cat([h, 1.1 * h + 0.1]), dim=-1)
    n, alike = len(h), z @ z.T / 0.1
    return F.cross_entropy(alike - 1e9 * torch.eye(2 * n), torch.arange(2 * n).roll(n)) + F.cross_entropy(
        p, y
    )


def _normalized_targets(s: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    target = y.to(p.dtype)
    return (p[:, 0] - (target - target.mean()) / (target.std() + 1e-6)).square().mean()


def _through_gradients(s: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(
        F.cross_entropy(F.linear(h, s.last.weight), y), s.last.weight, create_graph=True
    )
    return F.cross_entropy(F.linear(h, s.last.weight - 0.5 * g), y)


def _penalizes_gradients(s: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(torch.tanh(p).sum(), h, create_graph=True)
    return F.cross_entropy(p, y) + (g.norm() - 1).square()


def _quantizes(s: Step, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    scale = h.detach().abs().max() / 127
    return h + (torch.round(h / scale) * scale - h).detach()


def _worst_group(s: Step, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(p, y, reduction="none")
    return (torch.softmax(each.detach(), 0) * each).sum()


EQUAL: dict[str, Callable[[], Step]] = {
    "a mean": Step,
    "a layer norm": lambda: Step(lambda s, h, x, y: F.layer_norm(h, (8,))),
    "an embedding": lambda: Step(lambda s, h, x, y: h + s.table(y)),
    "a penalty of each sample": lambda: Step(
        loss=lambda s, h, p, y: F.cross_entropy(p, y) + h.square().mean()
    ),
    "a counter": lambda: Step(_counts),
    "an average of weights": lambda: Step(loss=_averages_weights),
    "a spectral norm": lambda: Step(lambda s, h, x, y: s.normed(h)),
    "a cosine embedding loss": lambda: Step(
        loss=lambda s, h, p, y: F.cosine_embedding_loss(h, h.detach().sin(), torch.ones_like(y))
    ),
}
NAMED: dict[str, Callable[[], Step]] = {
    "attention over the batch": lambda: Step(lambda s, h, x,
        y: F.scaled_dot_product_attention(h[None], h[None], h[None])[0]),
    "SimCLR": lambda: Step(loss=_simclr),
    "a Gram matrix": lambda: Step(loss=lambda s, h, p,
        y: torch.einsum("nd,md->nm", h, h).square().mean() + F.cross_entropy(p, y)),
    "a layer norm over the batch": lambda: Step(lambda s, h, x, y: F.layer_norm(h.T, (h.shape[0],)).T),
    "a Fourier transform": lambda: Step(lambda s, h, x, y: torch.fft.fft(h, dim=0).real),
    "a cumulative product": lambda: Step(lambda s, h, x, y: torch.cumprod(h, 0)),
    "pairwise distances": lambda: Step(loss=lambda s, h, p, y: F.cross_entropy(p, y) + F.pdist(h).mean()),
    "reversed indices": lambda: Step(lambda s, h, x, y: h + h[torch.arange(len(h) - 1, -1, -1)]),
    "shifted indices": lambda: Step(lambda s, h, x, y: h + h[(torch.arange(len(h)) + 1) % len(h)]),
    "a view of halves": lambda: Step(lambda s, h, x, y: torch.softmax(h.reshape(2, -1), 0).reshape(h.shape)),
    "the largest loss": lambda: Step(loss=lambda s, h, p, y: F.cross_entropy(p, y, reduction="none").max()),
    "a deviation": lambda: Step(loss=lambda s, h, p, y: F.cross_entropy(p, y, reduction="none").std()),
    "targets normalized": lambda: Step(loss=_normalized_targets),
    "gradients of gradients": lambda: Step(loss=_through_gradients),
    "a gradient penalty": lambda: Step(loss=_penalizes_gradients),
    "an embedding by frequency": lambda: Step(
        lambda s, h, x, y: h + F.embedding(y, s.table.weight, scale_grad_by_freq=True)
    ),
    "quantization": lambda: Step(_quantizes),
    "a norm of all": lambda: Step(lambda s, h, x, y: h / h.norm()),
    "robust weights": lambda: Step(loss=_worst_group),
    "the largest of each feature": lambda: Step(lambda s, h, x,
        y: h * (h >= h.topk(2, dim=0).values[-1:]).to(h.dtype)),
    "medians": lambda: Step(lambda s, h, x, y: h - h.median(0).values),
    "an average of samples": lambda: Step(_averages_samples),
    "an average of samples that is used": lambda: Step(_subtracts_average),
    "a condition on the size": lambda: Step(lambda s, h, x, y: h * 2 if x.size(0) > 3 else h),
    "a logarithm of the size": lambda: Step(lambda s, h, x, y: h * math.log(x.size(0))),
    "the smaller of size and five": lambda: Step(lambda s, h, x, y: h * min(len(x), 5)),
}  # fmt: skip
