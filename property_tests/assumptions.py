"""Draws steps that keep or break what a program takes for granted: samples that do not meet, a backward pass
that is linear, state that moves once a step, Python that does not depend on the number of samples, and a
layout that stays.

A step is put together from a part in its first stage (`middle`), a loss in its last stage, an optimizer, and
what hooks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import lightning_piper as piper

WIDTH, CLASSES, SAMPLES = 8, 3, 8
Middle = Callable[["Net", Tensor, Tensor, Tensor], Tensor]  # hidden values, inputs, labels -> hidden values
Loss = Callable[["Net", Tensor, Tensor, Tensor], Tensor]  # hidden values, logits, labels


class Net(L.LightningModule):
    """Two stages, and buffers that steps may change."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drawn, self.gain = drawn, 1.0
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.tracked = nn.InstanceNorm1d(2, track_running_stats=True)
        self.log_variance = nn.Parameter(torch.zeros(()))
        for name, value in {
            "count": torch.zeros(()),
            "average": torch.zeros(WIDTH),
            "by_class": torch.ones(CLASSES, WIDTH),
            "bank": torch.randn(5, WIDTH),
        }.items():
            self.register_buffer(name, value)
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            h = MIDDLES[self.drawn.middle](self, torch.tanh(self.first(x)) * self.gain, x, y)
        with piper.annotate("PP", 1):
            loss = LOSSES[self.drawn.loss](self, h, self.last(h), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        HOOKS[self.drawn.hook](self, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.drawn.optimizer](self.parameters())


# Backward passes


def backward(change: Callable[[Tensor], Tensor]) -> Middle:
    """The same values, with a backward pass that changes the gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return change(grad)

    return lambda m, h, x, y: Changed.apply(h)


def hooked(change: Callable[[Tensor], Tensor]) -> Middle:
    def middle(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(change)
        return h * 1

    return middle


def normed(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-6)


# Samples that meet in the first stage


def per_class(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h - h.new_zeros(CLASSES, WIDTH).index_add(0, y, h)[y]


def quantized(h: Tensor, scale: Tensor) -> Tensor:
    return h + (torch.round(h / scale) * scale - h).detach()


def convolved(h: Tensor) -> Tensor:
    """Along the last dimension."""
    return F.conv1d(h[:, None], h.new_full((1, 1, 3), 0.3), padding=1)[:, 0]


# State


def changing(change: Callable[[Net, Tensor, Tensor], object], use: str = "") -> Middle:
    """A step that changes a buffer, and uses it."""

    def middle(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        change(m, h.detach(), y)
        return h - 0.1 * getattr(m, use) if use else h

    return middle


def counted(by: Callable[[Tensor], int]) -> Middle:
    def middle(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        m.count += by(h)
        return h * torch.exp(-0.01 * m.count)

    return middle


def warmed(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    m.count += 1
    return h * torch.clamp(m.count / 5, max=1.0)


def decaying(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    m.bank.mul_(0.9)
    return h + m.bank[0]


def nearest(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h + (m.bank[torch.cdist(h, m.bank).argmin(1)] - h).detach()


def codebook(m: Net, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    of = F.one_hot(torch.cdist(h, m.bank).argmin(1), len(m.bank)).to(h.dtype)
    found = nearest(m, h, x, y)
    count = of.sum(0)[:, None]
    means = torch.where(count > 0, (of.T @ h.detach()) / count.clamp(min=1), m.bank)
    m.bank.mul_(0.9).add_(0.1 * means)
    return found


# What keeps all that a program takes for granted: under each program, one device's result.
KEEPING: dict[str, Middle] = {
    "plain": lambda m, h, x, y: h,
    # of each sample alone
    "attention of features": lambda m, h, x, y: F.scaled_dot_product_attention(
        h[..., None], h[..., None], h[..., None]
    )[..., 0],
    "convolution of features": lambda m, h, x, y: convolved(h),
    "cumulative product of features": lambda m, h, x, y: h.cumprod(1),
    "cumulative sum of features": lambda m, h, x, y: h.cumsum(1),
    "detached": lambda m, h, x, y: h + h.detach().sin(),
    "einsum of rows": lambda m, h, x, y: torch.einsum("nd,de->ne", h, m.normed.weight),
    "embedding": lambda m, h, x, y: h + m.table(y),
    "Fourier of features": lambda m, h, x, y: torch.fft.fft(h, dim=1).real,
    "features flipped": lambda m, h, x, y: h.flip(1),
    "features rolled": lambda m, h, x, y: 0.7 * h + 0.3 * h.roll(1, 1),
    "features sorted": lambda m, h, x, y: h.sort(1).values,
    "group norm": lambda m, h, x, y: F.group_norm(h, 2),
    "inputs of rows": lambda m, h, x, y: h + x.mean(1, keepdim=True),
    "instance norm": lambda m, h, x, y: F.instance_norm(h.reshape(len(h), 2, 4)).reshape(h.shape),
    "layer norm": lambda m, h, x, y: F.layer_norm(h, (WIDTH,)),
    "largest features": lambda m, h, x, y: h * (h >= h.topk(2, dim=1).values[:, -1:]).to(h.dtype),
    "mean of features": lambda m, h, x, y: h - h.mean(1, keepdim=True),
    "nearest code": nearest,
    "own indices": lambda m, h, x, y: h[torch.arange(len(h))],
    "quantized rows": lambda m, h, x, y: quantized(h, h.detach().abs().amax(1, keepdim=True) / 127),
    "RMS norm": lambda m, h, x, y: F.rms_norm(h, (WIDTH,)),
    "rows normed": lambda m, h, x, y: normed(h),
    "size of a tensor": lambda m, h, x, y: h + torch.full((len(x), 1), 0.5, dtype=h.dtype),
    "softmax of features": lambda m, h, x, y: torch.softmax(h, 1),
    "spectral norm": lambda m, h, x, y: m.normed(h),
    "transposed twice": lambda m, h, x, y: h.T.tanh().T,
    "view of features": lambda m, h, x, y: torch.softmax(h.reshape(len(h), 2, 4), 1).reshape(h.shape),
    "weights' Gram matrix": lambda m, h, x, y: h @ (m.last.weight.T @ m.last.weight),
    # linear in the gradient
    "gradient reversed": backward(lambda grad: -0.5 * grad),
    "hook centers features": hooked(lambda grad: grad - grad.mean(1, keepdim=True)),
    "hook removes NaN": hooked(lambda grad: torch.nan_to_num(grad)),
    "hook scales": hooked(lambda grad: grad * 0.5),
    # state of the step
    "counter": counted(lambda h: 1),
    "counter that nothing reads": changing(lambda m, h, y: m.count.add_(1)),
    "decay of a buffer": decaying,
    "warm-up": warmed,
}
BREAKING: dict[str, Middle] = {
    # not linear in the gradient
    "gradient added to": backward(lambda grad: grad + 0.01),
    "gradient clamped": backward(lambda grad: grad.clamp(-0.01, 0.01)),
    "gradient normed": backward(lambda grad: grad / (grad.norm() + 1e-12)),
    "gradient of rows normed": backward(lambda grad: normed(grad)),
    "hook adds": hooked(lambda grad: grad + 0.01),
    "hook centers samples": hooked(lambda grad: grad - grad.mean(0)),
    "hook clamps": hooked(lambda grad: grad.clamp(-0.01, 0.01)),
    "hook norms": hooked(lambda grad: grad / (grad.norm() + 1e-12)),
    "hook takes signs": hooked(lambda grad: grad.sign() * 1e-3),
    # samples that meet
    "attention over samples": lambda m, h, x, y: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "average pool over samples": lambda m, h, x, y: F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
    "batch norm": lambda m, h, x, y: F.batch_norm(h, None, None, training=True),
    "centered": lambda m, h, x, y: h - h.mean(0),
    "convolution over samples": lambda m, h, x, y: convolved(h.T).T,
    "cumulative maximum": lambda m, h, x, y: h.cummax(0).values,
    "cumulative sum of samples": lambda m, h, x, y: h.cumsum(0),
    "distances": lambda m, h, x, y: h + torch.cdist(h, h).mean(1, keepdim=True),
    "einsum of pairs": lambda m, h, x, y: torch.einsum("nd,md->nd", h, h) / len(h),
    "embedding by frequency": lambda m, h, x, y: h + F.embedding(y, m.table.weight, scale_grad_by_freq=True),
    "first sample": lambda m, h, x, y: h - h[:1],
    "Fourier of samples": lambda m, h, x, y: torch.fft.fft(h, dim=0).real,
    "Gram matrix": lambda m, h, x, y: (h @ h.T) @ h / len(h),
    "halves": lambda m, h, x, y: torch.softmax(h.reshape(2, -1), 0).reshape(h.shape),
    "inputs' mean": lambda m, h, x, y: h + x.mean(),
    "instance norm over samples": lambda m, h, x, y: (
        F.instance_norm(h.T.reshape(2, 4, len(h))).reshape(WIDTH, len(h)).T
    ),
    "labels as indices": lambda m, h, x, y: h + h[y],
    "largest samples": lambda m, h, x, y: h * (h >= h.topk(2, dim=0).values[-1:]).to(h.dtype),
    "last sample": lambda m, h, x, y: h - h[-1:],
    "layer norm over samples": lambda m, h, x, y: F.layer_norm(h.T, (len(h),)).T,
    "log softmax over samples": lambda m, h, x, y: torch.log_softmax(h, 0),
    "median": lambda m, h, x, y: h - h.median(0).values,
    "means of classes": per_class,
    "norm of all": lambda m, h, x, y: h / h.norm(),
    "number of positives": lambda m, h, x, y: h * (h.detach() > 0).sum() / 10,
    "one solution": lambda m, h, x, y: torch.linalg.solve(h.T @ h + torch.eye(WIDTH, dtype=h.dtype), h.T).T,
    "quantized": lambda m, h, x, y: quantized(h, h.detach().abs().max() / 127),
    "range": lambda m, h, x, y: (h - h.min()) / (h.max() - h.min() + 1e-6),
    "samples flipped": lambda m, h, x, y: 0.7 * h + 0.3 * h.flip(0),
    "samples reversed": lambda m, h, x, y: h + h[torch.arange(len(h) - 1, -1, -1)],
    "samples rolled": lambda m, h, x, y: 0.7 * h + 0.3 * h.roll(1, 0),
    "samples shifted": lambda m, h, x, y: h + h[(torch.arange(len(h)) + 1) % len(h)],
    "samples sorted": lambda m, h, x, y: h.sort(0).values,
    "samples sorted by a feature": lambda m, h, x, y: h[h[:, 0].argsort()],
    "softmax of all": lambda m, h, x, y: torch.softmax(h.flatten(), 0).view_as(h),
    "softmax over samples": lambda m, h, x, y: torch.softmax(h, 0),
    "standardized": lambda m, h, x, y: h / (h.std(0) + 1e-3),
    "threshold": lambda m, h, x, y: torch.where(h > h.mean(), h, 0.5 * h),
    "third quantile": lambda m, h, x, y: h - h.quantile(0.75, dim=0),
    # state that samples change
    "average of samples": changing(lambda m, h, y: m.average.mul_(0.9).add_(0.1 * h.mean(0))),
    "average of samples, used": changing(
        lambda m, h, y: m.average.mul_(0.9).add_(0.1 * h.mean(0)), "average"
    ),
    "average of variances": changing(lambda m, h, y: m.average.lerp_(h.var(0), 0.1)),
    "codebook": codebook,
    "counter of samples": counted(len),
    "instance norm with running statistics": lambda m, h, x, y: m.tracked(h.reshape(len(h), 2, 4)).reshape(
        h.shape
    ),
    "largest so far": changing(lambda m, h, y: m.average.copy_(torch.maximum(m.average, h.amax(0)))),
    "mean kept": changing(lambda m, h, y: m.average.copy_(h.mean(0))),
    "last kept": changing(lambda m, h, y: m.average.copy_(h[-1])),
    "sum of samples": changing(lambda m, h, y: m.average.add_(h.sum(0))),
    "sums of classes": changing(lambda m, h, y: m.by_class.index_add_(0, y, h)),
    # Python that depends on the number of samples
    "a condition on the size": lambda m, h, x, y: h * 2 if x.size(0) > 3 else h,
    "a logarithm of the size": lambda m, h, x, y: h * math.log(x.size(0)),
    "a remainder of the size": lambda m, h, x, y: h * (1 + x.shape[0] % 8),
    "a share of the size": lambda m, h, x, y: h + torch.full((1, WIDTH), 1 / len(x), dtype=h.dtype),
    "the smaller of size and five": lambda m, h, x, y: h * min(len(x), 5),
}
MIDDLES = KEEPING | BREAKING


# Losses


def each(p: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(p, y, reduction="none")


def chosen(y: Tensor, dtype: torch.dtype) -> Tensor:
    return (y > 0).to(dtype)


def beside(term: Loss) -> Loss:
    """The cross entropy and a term."""
    return lambda m, h, p, y: F.cross_entropy(p, y) + term(m, h, p, y)


def weighed(weight: Callable[[Tensor], Tensor]) -> Loss:
    """The mean of the samples' losses by their weights."""
    return lambda m, h, p, y: (each(p, y) * weight(p)).mean()


def simclr(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    z = normed(torch.cat([h, 1.1 * h + 0.1]))
    alike = z @ z.T / 0.1 - 1e9 * torch.eye(2 * len(h), dtype=h.dtype)
    return F.cross_entropy(alike, torch.arange(2 * len(h)).roll(len(h)))


def clip(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    alike = normed(h) @ normed(p @ m.last.weight).T / 0.1
    own = torch.arange(len(h))
    return (F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)) / 2


def vicreg(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    z = h - h.mean(0)
    return F.relu(1 - z.std(0)).mean() + (z.T @ z / (len(z) - 1)).triu(1).square().sum() / WIDTH


def triplets(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    far, same = torch.cdist(h, h), y[:, None] == y[None]
    return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 0.2).mean()


def supervised_contrast(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    own = torch.eye(len(h), dtype=h.dtype)
    alike = normed(h) @ normed(h).T / 0.1 - 1e9 * own
    same = (y[:, None] == y[None]).to(h.dtype) * (1 - own)
    logs = alike - alike.logsumexp(1, keepdim=True)
    return -((same * logs).sum(1) / same.sum(1).clamp(min=1)).mean()


def discrepancy(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    one, other = h[: len(h) // 2], h[len(h) // 2 :]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square()).mean()

    return kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)


def balanced(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    gates = torch.softmax(h, -1)
    return WIDTH * (F.one_hot(gates.argmax(-1), WIDTH).to(h.dtype).mean(0) * gates.mean(0)).sum()


def pearson(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    one, other = p[:, 0] - p[:, 0].mean(), y - y.to(p.dtype).mean()
    return -(one * other).sum() / (one.norm() * other.norm() + 1e-6)


def ranked(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    apart = p[:, 0][:, None] - p[:, 0][None]
    return F.softplus(-apart * torch.sign((y[:, None] - y[None]).to(p.dtype))).mean()


def dice(dim: int | None) -> Loss:
    def loss(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
        q, t = torch.softmax(p, -1), F.one_hot(y, CLASSES).to(p.dtype)
        return (1 - (2 * (q * t).sum(dim) + 1) / ((q + t).sum(dim) + 1)).mean()

    return loss


def entropy_of_mean(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    mean = torch.softmax(p, -1).mean(0)
    return (mean * mean.log()).sum()


def through_gradients(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    weight = m.last.weight
    (grad,) = torch.autograd.grad(F.cross_entropy(F.linear(h, weight), y), weight, create_graph=True)
    return F.cross_entropy(F.linear(h, weight - 0.5 * grad), y)


def penalty(of: Callable[[Tensor, Tensor], Tensor], size: Callable[[Tensor], Tensor]) -> Loss:
    """A penalty on the gradient, with respect to the hidden values, of `of`."""

    def loss(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(of(p, y), h, create_graph=True)
        return size(grad)

    return loss


def adversarial(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(F.cross_entropy(p, y), h, create_graph=True)
    return F.cross_entropy(m.last(h + 0.1 * grad.detach().sign()), y)


def centered_teacher(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    teacher = torch.softmax((h.detach() - m.average) / 0.1, -1)
    m.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return -(teacher * torch.log_softmax(h, -1)).sum(-1).mean()


def slow_weights(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    m.by_class.mul_(0.9).add_(0.1 * m.last.weight.detach())
    return (F.linear(h, m.by_class) - p).square().mean()


def bool_mask(m: Net, h: Tensor, p: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(p[y > 0], y[y > 0])


KEEPING_LOSSES: dict[str, Loss] = {
    # sums, means, and ratios whose denominators depend only on the batch
    "cross entropy": lambda m, h, p, y: F.cross_entropy(p, y),
    "binary cross entropy": lambda m, h, p, y: F.binary_cross_entropy_with_logits(
        p, F.one_hot(y, CLASSES).to(p.dtype)
    ),
    "class weights": lambda m, h, p, y: F.cross_entropy(
        p, y, weight=torch.tensor([1.0, 2.0, 0.5], dtype=p.dtype)
    ),
    "cosine embedding": lambda m, h, p, y: F.cosine_embedding_loss(h, h.detach().sin(), torch.ones_like(y)),
    "dice of samples": dice(-1),
    "distance to centers": beside(lambda m, h, p, y: (h - m.table(y)).square().sum(-1).mean()),
    "focal": weighed(lambda p: (1 - torch.softmax(p, -1).amax(-1)).square()),
    "hinge": lambda m, h, p, y: F.multi_margin_loss(p, y),
    "Huber": lambda m, h, p, y: F.huber_loss(p, F.one_hot(y, CLASSES).to(p.dtype)),
    "ignored labels": lambda m, h, p, y: F.cross_entropy(p, torch.where(y == 0, -100, y)),
    "label smoothing": lambda m, h, p, y: F.cross_entropy(p, y, label_smoothing=0.1),
    "learned variance": lambda m, h, p, y: (
        F.cross_entropy(p, y) * torch.exp(-m.log_variance) + m.log_variance
    ),
    "logits' penalty": beside(lambda m, h, p, y: torch.logsumexp(p, -1).square().mean()),
    "masked mean": lambda m, h, p, y: (each(p, y) * chosen(y, p.dtype)).sum() / chosen(y, p.dtype).sum(),
    "masked mean, clamped": lambda m, h, p, y: (
        (each(p, y) * chosen(y, p.dtype)).sum() / chosen(y, p.dtype).sum().clamp(min=1)
    ),
    "penalty of gradients of samples": beside(
        penalty(lambda p, y: p.sum(), lambda grad: (grad.norm(dim=-1) - 1).square().mean())
    ),
    "Poisson": lambda m, h, p, y: F.poisson_nll_loss(p[:, 0], y.to(p.dtype)),
    "slow weights": beside(slow_weights),
    "sum over the size": lambda m, h, p, y: F.cross_entropy(p, y, reduction="sum") / len(p),
    "ones": weighed(lambda p: torch.ones(len(p), dtype=p.dtype)),
    "weight decay": beside(lambda m, h, p, y: 0.1 * sum(q.square().sum() for q in m.parameters())),
    "weights orthogonal": beside(
        lambda m, h, p, y: (
            (m.last.weight @ m.last.weight.T - torch.eye(CLASSES, dtype=p.dtype)).square().sum()
        )
    ),
}
BREAKING_LOSSES: dict[str, Loss] = {
    # samples that meet
    "Barlow twins": beside(lambda m, h, p, y: (torch.corrcoef(h.T) - torch.eye(WIDTH)).square().sum() * 0.01),
    "balanced experts": beside(balanced),
    "CLIP": clip,
    "deviation": lambda m, h, p, y: each(p, y).std(),
    "dice of all": dice(None),
    "differences of samples": beside(lambda m, h, p, y: h.diff(dim=0).square().mean()),
    "discrepancy": beside(discrepancy),
    "entropy of the mean": beside(entropy_of_mean),
    "every second sample": lambda m, h, p, y: F.cross_entropy(p[::2], y[::2]),
    "exponential": lambda m, h, p, y: torch.exp(F.cross_entropy(p, y)),
    "first sample": beside(lambda m, h, p, y: h[0].square().sum()),
    "gradients of gradients": through_gradients,
    "halves alike": beside(lambda m, h, p, y: (p.chunk(2)[0] - p.chunk(2)[-1]).square().mean()),
    "largest loss": lambda m, h, p, y: each(p, y).max(),
    "last sample": lambda m, h, p, y: F.cross_entropy(p[-1:], y[-1:]),
    "log sum exp": lambda m, h, p, y: torch.logsumexp(each(p, y), 0),
    "loss over itself": lambda m, h, p, y: F.cross_entropy(p, y) / F.cross_entropy(p, y).detach(),
    "median loss": lambda m, h, p, y: each(p, y).median(),
    "normalized targets": lambda m, h, p, y: (
        (p[:, 0] - (y - y.to(p.dtype).mean()) / (y.to(p.dtype).std() + 1e-6)).square().mean()
    ),
    "number of positives": lambda m, h, p, y: F.cross_entropy(p, y) * (h > 0).sum() / 10,
    "pairs": beside(lambda m, h, p, y: (h @ h.T).square().mean()),
    "Pearson": pearson,
    "penalty of a norm of gradients": beside(
        penalty(lambda p, y: torch.tanh(p).sum(), lambda grad: (grad.norm() - 1).square())
    ),
    "penalty of gradients of the loss": beside(penalty(F.cross_entropy, lambda grad: grad.square().sum())),
    "product of means": lambda m, h, p, y: F.cross_entropy(p, y) * (1 + h.abs().mean()),
    "ranks": ranked,
    "ratio of outputs": beside(lambda m, h, p, y: h.square().sum() / (1 + p.square().sum())),
    "robust weights": lambda m, h, p, y: (torch.softmax(each(p, y).detach(), 0) * each(p, y)).sum(),
    "root": lambda m, h, p, y: (p - F.one_hot(y, CLASSES)).square().mean().sqrt(),
    "SimCLR": beside(simclr),
    "softmax of a list": lambda m, h, p, y: (
        -(torch.softmax(y.to(p.dtype), 0) * torch.log_softmax(p[:, 0], 0)).sum()
    ),
    "square": lambda m, h, p, y: F.cross_entropy(p, y).square(),
    "supervised contrast": beside(supervised_contrast),
    "terms of one size": lambda m, h, p, y: (
        F.cross_entropy(p, y)
        + h.square().mean() * (F.cross_entropy(p, y).detach() / h.square().mean().detach())
    ),
    "triplets": beside(triplets),
    "variance explained": lambda m, h, p, y: (
        (p[:, 0] - y).square().sum() / (y - y.to(p.dtype).mean()).square().sum()
    ),
    "VICReg": beside(vicreg),
    "worst half": lambda m, h, p, y: each(p, y).topk(len(p) // 2).values.mean(),
    "worst three": lambda m, h, p, y: each(p, y).topk(3).values.mean(),
    # steps in the direction of gradients; one device's loss scale decides
    "adversarial": beside(adversarial),
    # state
    "centered teacher": beside(centered_teacher),
    # values that decide shapes
    "Gaussian": lambda m, h, p, y: F.gaussian_nll_loss(p[:, 0], y.to(p.dtype), p[:, 1].exp()),
    "a mask as an index": bool_mask,
    "weights by counts": lambda m, h, p, y: F.cross_entropy(
        p, y, weight=1 / torch.bincount(y, minlength=CLASSES).to(p.dtype).clamp(min=1)
    ),
    # Python that depends on the number of samples
    "a condition on the size": lambda m, h, p, y: F.cross_entropy(p, y) * (2.0 if len(p) >= 6 else 1.0),
    "a loop over samples": lambda m, h, p, y: (
        sum(F.cross_entropy(p[i : i + 1], y[i : i + 1]) for i in range(len(p))) / len(p)
    ),
    "a number for each place": weighed(lambda p: torch.arange(len(p), dtype=p.dtype)),
    "a plain sum": lambda m, h, p, y: F.cross_entropy(p, y, reduction="sum"),
    "a power of the size": lambda m, h, p, y: F.cross_entropy(p, y, reduction="sum") / len(p) ** 0.5,
    "a rounded size": lambda m, h, p, y: F.cross_entropy(p, y, reduction="sum") / (round(len(p) / 3) + 1),
    "a share for each place": weighed(lambda p: torch.linspace(0, 1, len(p), dtype=p.dtype)),
    "a table of sizes": lambda m, h, p, y: F.cross_entropy(p, y) * {SAMPLES: 1.0}.get(len(p), 2.0),
}
LOSSES = KEEPING_LOSSES | BREAKING_LOSSES

# What changes between steps


def frozen(m: Net, i: int) -> None:
    m.first.requires_grad_(i != 1)


def weaker(m: Net, i: int) -> None:
    m.gain = 1.0 + 0.5 * i


def clamped(m: Net, i: int) -> None:
    with torch.no_grad():
        m.last.weight.clamp_(-0.2, 0.2)


def averaged(m: Net, i: int) -> None:
    m.average.lerp_(torch.ones(WIDTH, dtype=m.average.dtype), 0.1)


HOOKS: dict[str, Callable[[Net, int], None]] = {
    "nothing": lambda m, i: None,
    "a layer is frozen": frozen,
    "a number changes": weaker,
    "a buffer changes": averaged,
    "weights are clamped": clamped,
}
# A larger eps, because Adam divides rounding by rounding where a gradient is 0.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, 0.01, eps=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01, eps=1e-2, amsgrad=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.05, eps=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.01, eps=1e-2, momentum=0.5),
}
PAIR, GRID = [0, 1], [[0, 2], [1, 3]]
PROGRAMS: dict[str, Callable[[], list[Any]]] = {
    "microbatches": lambda: piper.schedules.one_f_one_b(2, 2),
    "four microbatches": lambda: piper.schedules.one_f_one_b(2, 4),
    "replicas": lambda: [piper.Place(PAIR), piper.Replicate()],
    "ZeRO-1": lambda: [piper.Place(PAIR), piper.Replicate(zero=1)],
    "ZeRO-3": lambda: [piper.Place(PAIR), piper.Replicate(zero=3)],
    "stages of replicas": lambda: [*piper.schedules.one_f_one_b(2, 2, devices=GRID), piper.Replicate(zero=3)],
}
SIZES = {"equal": (8, 8, 8), "another later": (8, 4, 8), "a smaller last one": (8, 8, 4)}


@dataclass(frozen=True)
class Drawn:
    """A step and how it is trained. The names are keys of the tables above."""

    middle: str = "plain"
    loss: str = "cross entropy"
    hook: str = "nothing"
    optimizer: str = "SGD"
    program: str = "microbatches"
    sizes: str = "equal"
    accumulated: int = 1
    clipped: bool = False

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(3)
        return [
            (
                torch.randn(n, 6, generator=g, dtype=torch.float64),
                torch.randint(0, CLASSES, (n,), generator=g),
            )
            for n in SIZES[self.sizes]
        ]


def drawn() -> st.SearchStrategy[Drawn]:
    """What is first in a table is what an example shrinks to."""
    return st.builds(
        Drawn,
        middle=st.sampled_from([*MIDDLES]),
        loss=st.sampled_from([*LOSSES]),
        hook=st.sampled_from([*HOOKS]),
        optimizer=st.sampled_from([*OPTIMIZERS]),
        program=st.sampled_from([*PROGRAMS]),
        sizes=st.sampled_from([*SIZES]),
        accumulated=st.sampled_from([1, 2]),
        clipped=st.booleans(),
    )
