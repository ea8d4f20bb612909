"""Steps, as users write them, that break an assumption of a program or seem to break one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DOUBLE = torch.float64


class Net(L.LightningModule):
    """A model with a hidden layer `h`, an output, a table, and buffers that steps may change."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.table = nn.Linear(6, 8), nn.Linear(8, 4), nn.Embedding(10, 8)
        for name, value in {
            "count": torch.zeros(()),
            "queue": torch.randn(5, 8),
            "center": torch.zeros(8),
        }.items():
            self.register_buffer(name, value)
        self.double()
        self.step, self.seen, self.losses = step, 0, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, *batch)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


Step = Callable[[Any, Tensor, Tensor], Tensor]


def out(net: Net, x: Tensor) -> Tensor:
    return net.last(net.hidden(x))


def errors(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The error of each sample."""
    return (out(net, x) - y).square().mean(1)


def mse(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out(net, x), y)


# Samples that meet


def sinkhorn(net: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = out(net, x)
    codes = torch.exp(scores.detach() / 0.5).t()
    for _ in range(3):
        codes = codes / codes.sum(1, keepdim=True)
        codes = codes / codes.sum(0, keepdim=True)
    return -(codes.t() * F.log_softmax(scores, 1)).sum(1).mean()


def similarities(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x)
    return (h @ h.T).softmax(-1).diagonal().log().neg().mean()


def standardized(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.first(x)
    return F.mse_loss(net.last((h - h.mean(0)) / (h.std(0) + 1e-5)), y)


def correlation(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = out(net, x)[:, 0]
    return -F.cosine_similarity(h - h.mean(), y[:, 0] - y[:, 0].mean(), dim=0)


def neighbors(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = out(net, x)
    return F.mse_loss(h, y) + (h[1:] - h[:-1]).square().mean()


def running_mean(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x).cumsum(0) / torch.arange(1, len(x) + 1).unsqueeze(1)
    return F.mse_loss(net.last(h), y)


def groups(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h, group = net.hidden(x), (y[:, 0] > 0).long()
    sums = torch.zeros(2, 8, dtype=DOUBLE).index_add(0, group, h)
    return (h - sums[group]).square().mean()


def mixup(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return mse(net, 0.7 * x + 0.3 * x.flip(0), 0.7 * y + 0.3 * y.flip(0))


def rolled(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return mse(net, x + 0.1 * torch.roll(x, 1, 0), y)


def pooled(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.last(F.avg_pool1d(net.hidden(x).t().unsqueeze(0), 3, 1, 1)[0].t()), y)


def group_norm(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.last(F.group_norm(net.first(x).t().unsqueeze(0), 2)[0].t()), y)


def instance_norm(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.last(F.instance_norm(net.first(x).t().unsqueeze(0))[0].t()), y)


def attention(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.first(x)[None]
    return F.mse_loss(net.last(F.scaled_dot_product_attention(h, h, h)[0]), y)


def fourier(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.last(torch.tanh(torch.fft.fft(net.first(x), dim=0).real)), y)


def gram(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x)
    return F.mse_loss(net.last(h), y) + torch.einsum("id,jd->ij", h, h).triu(1).square().mean()


def barlow(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x)
    h = (h - h.mean(0)) / h.std(0)
    return (h.T @ h / len(h) - torch.eye(8, dtype=DOUBLE)).square().sum()


def triplets(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = out(net, x)
    distances = torch.cdist(h, h)
    return F.relu(distances.max(1).values - distances.mean(1) + 1).mean()


def halves(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h, n = out(net, x), len(x) // 2
    return F.mse_loss(h[:n], y[:n]) + 0.1 * h[n:].square().mean()


def two_views(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = out(net, x)
    one, two = h.view(2, -1, 4)
    return F.mse_loss(one, two) + F.mse_loss(h, y)


def inner_step(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h, weight = net.hidden(x), net.last.weight
    (grad,) = torch.autograd.grad(
        F.mse_loss(F.linear(h, weight, net.last.bias), y), weight, create_graph=True
    )
    return F.mse_loss(F.linear(h, weight - 0.1 * grad, net.last.bias), y)


def by_frequency(net: Net, x: Tensor, y: Tensor) -> Tensor:
    rows = F.embedding((x[:, 0].abs() * 5).long().clamp(0, 9), net.table.weight, scale_grad_by_freq=True)
    return F.mse_loss(net.last(rows + net.hidden(x)), y)


def normalized_targets(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return mse(net, x, (y - y.mean(0)) / (y.std(0) + 1e-6))


def quantized(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x)
    scale = h.detach().abs().max() / 127
    return F.mse_loss(net.last(h + (torch.round(h / scale) * scale - h).detach()), y)


def ranked(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = out(net, x)
    return ((h - y).square().mean(1) * h[:, 0].argsort().argsort().double()).mean()


def sorted_outputs(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return (out(net, x)[:, 0].sort().values - y[:, 0].sort().values).abs().mean()


# Losses that are no sums over samples


def hard_examples(net: Net, x: Tensor, y: Tensor) -> Tensor:
    each = errors(net, x, y)
    kept = (each > each.mean()).detach()
    return (each * kept).sum() / kept.sum()


def variances(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = out(net, x)
    return F.mse_loss(h, y) + F.relu(1 - h.std(0)).mean()


def explained(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return (out(net, x) - y).square().sum() / (y - y.mean(0)).square().sum()


def dice(net: Net, x: Tensor, y: Tensor) -> Tensor:
    p, t = torch.sigmoid(out(net, x)), (y > 0).double()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def entropy_of_mean(net: Net, x: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(out(net, x), 1).mean(0)
    return mse(net, x, y) + (p * p.log()).sum()


def balanced_experts(net: Net, x: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(out(net, x), 1)
    return mse(net, x, y) + 4 * (F.one_hot(p.argmax(1), 4).double().mean(0) * p.mean(0)).sum()


# Backward passes


class _Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.sign() * 0.01


def signs(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.last(_Signs.apply(net.hidden(x))), y)


def hooked(hook: Callable[[Tensor], Tensor]) -> Step:
    def step(net: Net, x: Tensor, y: Tensor) -> Tensor:
        h = net.hidden(x)
        h.register_hook(hook)
        return F.mse_loss(net.last(h), y)

    return step


def penalized(net: Net, x: Tensor, y: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(out(net, inputs).sum(), inputs, create_graph=True)
    return mse(net, x, y) + ((grad.norm(2, 1) - 1) ** 2).mean()


# State


def counted(net: Net, x: Tensor, y: Tensor) -> Tensor:
    net.count += 1
    return mse(net, x, y) * (1 + net.count * 0.1)


def centered(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x)
    net.center.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return F.mse_loss(net.last(h - net.center.clone()), y)


def queued(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.hidden(x)
    loss = (h @ net.queue.clone().t()).logsumexp(1).mean()
    net.queue.copy_(torch.cat([h.detach(), net.queue])[:5])
    return loss


def scaled_by_average(net: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(net, x, y)
    net.count.mul_(0.9).add_(0.1 * loss.detach())
    return loss / (net.count.clone() + 1e-3)


def attribute(net: Net, x: Tensor, y: Tensor) -> Tensor:
    net.seen += 1
    return mse(net, x, y) * net.seen


def kept_losses(net: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(net, x, y)
    net.losses.append(float(loss.detach()))
    return loss * (1 + 0.1 * len(net.losses))


# Python that looks at the number of samples


def first_few(net: Net, x: Tensor, y: Tensor) -> Tensor:
    few = min(len(x), 5)
    return mse(net, x[:few], y[:few])


# Steps that break no assumption


def weighted(net: Net, x: Tensor, y: Tensor) -> Tensor:
    weights = y[:, 0].abs()
    return (errors(net, x, y) * weights).sum() / weights.sum()


def decayed(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return mse(net, x, y) + 0.01 * sum(p.square().sum() for p in net.parameters())


def masked(net: Net, x: Tensor, y: Tensor) -> Tensor:
    each = (out(net, x) - y).square()
    counts = torch.ones_like(each) * (y > 0)
    return (each * counts).sum() / counts.sum()


def focal(net: Net, x: Tensor, y: Tensor) -> Tensor:
    p, t = torch.sigmoid(out(net, x)), (y > 0).double()
    return F.binary_cross_entropy(p, t, reduction="sum") / t.sum().clamp(min=1)


# With microbatches and with replicas: the result differs from that of one device, and there is a warning.
NAMED: dict[str, Step] = {
    **{f.__name__: f for f in (
        sinkhorn, similarities, standardized, correlation, neighbors, running_mean, groups, mixup, rolled,
        pooled, group_norm,
        instance_norm, attention, fourier, gram, barlow, triplets, halves, two_views, inner_step,
        by_frequency,
        normalized_targets, quantized, ranked, sorted_outputs, hard_examples, variances, explained, dice,
        entropy_of_mean,
        balanced_experts, first_few,
    )},
    "distances": lambda net, x, y: F.pdist(out(net, x)).mean(),
    "largest": lambda net, x, y: (out(net, x) - y).abs().max(),
    "log sum exp": lambda net, x, y: errors(net, x, y).logsumexp(0),
    "the worst three": lambda net, x, y: errors(net, x, y).topk(3).values.mean(),
    "a quantile": lambda net, x, y: errors(net, x, y).quantile(0.7),
    "a root": lambda net, x, y: mse(net, x, y).sqrt(),
    "a logarithm": lambda net, x, y: mse(net, x, y).log(),
    "a logarithm of the size": lambda net, x, y: mse(net, x, y) / math.log(len(x) + 1),
    "a condition on the size": lambda net, x, y: mse(net, x, y) * 2 if x.size(0) > 5 else mse(net, x, y),
}  # fmt: skip
# Refused with microbatches. Replicas train these steps as under DDP, and say so.
NOT_LINEAR: dict[str, Step] = {
    "signs": signs,
    "clamped": hooked(lambda grad: grad.clamp(-0.001, 0.001)),
    "normalized": hooked(lambda grad: grad / (grad.norm() + 1e-8)),
}
# With microbatches the result differs, and there is a warning. With replicas the step is not captured.
STATE: dict[str, Step] = {"centered": centered, "queued": queued, "scaled by an average": scaled_by_average}
# Refused with microbatches. With replicas the step is not captured.
PYTHON: dict[str, Step] = {"attribute": attribute, "kept losses": kept_losses}
# The result is that of one device, and there is no message.
EQUAL: dict[str, Step] = {
    "mean": mse,
    "weighted": weighted,
    "decayed": decayed,
    "masked": masked,
    "focal": focal,
    "counted": counted,
    "a gradient penalty": penalized,
    "a hook that halves": hooked(lambda grad: grad * 0.5),
    "cross entropy": lambda net, x, y: F.cross_entropy(out(net, x), y.argmax(1)),
    "two means": lambda net, x, y: F.smooth_l1_loss(out(net, x), y) + F.l1_loss(out(net, x), y),
}
