"""The graph shows where a step certainly mixes samples on the way to the loss. For other steps, Piper reports
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_piper.capture import capture
from lightning_piper.capture.losses import sample_trial
from tests.models import MLP, regression

Step = Callable[[Any, Tensor, Tensor], Tensor]
Loss = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]


def _tokens(rows: Tensor) -> Tensor:
    """Put a token that all samples share before the tokens of each row, as vision transformers do."""
    return torch.cat([torch.ones(1, 1, 2).expand(len(rows), -1, -1), rows[:, None]], 1)


def _halved(rows: Tensor) -> Tensor:
    """Divide by 2 in place, in a view, whose gradient is copied into an empty tensor with strides."""
    rows = rows.clone()
    rows.squeeze(1).mul_(0.5)
    return rows


MEET: dict[str, tuple[Loss, str]] = {
    "half": (lambda net, x, y: F.mse_loss(net(x[: len(x) // 2]), y[len(x) // 2 :]), "slice"),
    "chunk": (lambda net, x, y: F.mse_loss(*net(x).chunk(2)), "split"),
    "first": (lambda net, x, y: (net(x) - net(x)[0]).square().mean(), "select"),
    "softmax": (lambda net, x, y: (net(x).softmax(0) * y).mean(), "softmax"),
    "rolled": (lambda net, x, y: F.mse_loss(net(x).roll(1, 0), y), "roll"),
    "product": (lambda net, x, y: F.cross_entropy(F.normalize(net(x)) @ y.t(), torch.arange(len(x))), "mm"),
    "chosen rows": (
        lambda net, x, y: (
            ((net(x)[:, None] * torch.ones(3, 1))[torch.arange(len(x)), y.argmax(1)] @ y.t()).exp().mean()
        ),
        "mm",
    ),
    "tokens": (
        lambda net, x, y: (_tokens(net(x)).transpose(1, 2).permute(0, 2, 1)[:, 0] @ y.t()).exp().mean(),
        "mm",
    ),
    "pairs": (lambda net, x, y: (net(x)[:, None] - net(x)[None]).abs().mean(), "sub"),
    "distances": (lambda net, x, y: torch.cdist(net(x), y).mean(), "cdist"),
    "centered": (lambda net, x, y: (net(x) - net(x).mean(0)).square().mean(), "pow"),
    "around the mean": (lambda net, x, y: (net(x) - net(x).mean()).square().mean(), "pow"),
    "shares": (lambda net, x, y: ((net(x).exp() / net(x).exp().sum()).log() * y).mean(), "log"),
    "scaled": (lambda net, x, y: F.mse_loss(net(x) / (net(x).std(0) + 1e-3), y), "mse_loss"),
    "the largest taken off": (lambda net, x, y: (net(x) - net(x).max()).exp().mean(), "exp"),
}

# Each kind has a control in which samples are independent. `own` has the layers that some kinds need.
KINDS: dict[str, tuple[Step, str, Step]] = {
    "attention": (
        lambda own, h, y: F.scaled_dot_product_attention(h[None], h[None], h[None])[0].square().mean(),
        "aten.",
        lambda own, h, y: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:,
            0].square().mean(),
    ),
    "two views": (
        lambda own, h, y: (z := F.normalize(torch.cat([h, h * 2])), (z @ z.t()).logsumexp(1).mean())[1], "mm",
        lambda own, h, y: (1 - F.cosine_similarity(*torch.cat([h, h * 2]).chunk(2))).mean(),
    ),
    "einsum": (
        lambda own, h, y: torch.einsum("id,jd->ij", h, h).square().mean(), "bmm",
        lambda own, h, y: torch.einsum("id,ie->ide", h, h).square().mean(),
    ),
    "layer norm": (
        lambda own, h, y: F.layer_norm(h.t(), [6]).exp().mean(), "layer_norm",
        lambda own, h, y: F.layer_norm(h, [2]).exp().mean(),
    ),
    "group norm": (
        lambda own, h, y: F.group_norm(h[None], 2).exp().mean(), "group_norm",
        lambda own, h, y: F.group_norm(h, 2).exp().mean(),
    ),
    "fft": (lambda own, h, y: torch.fft.fft(h, dim=0).abs().mean(), "fft", lambda own, h,
        y: torch.fft.fft(h, dim=1).abs().mean()),
    "cumprod": (lambda own, h, y: h.cumprod(0).mean(), "cumprod", lambda own, h, y: h.cumprod(1).mean()),
    "pdist": (lambda own, h, y: F.pdist(h).mean(), "pdist", lambda own, h,
        y: F.pairwise_distance(h, y).mean()),
    "cdist": (lambda own, h, y: torch.cdist(h, h).mean(), "cdist", lambda own, h,
        y: torch.cdist(h, own.table).mean()),
    "reversed": (
        lambda own, h, y: (h[torch.arange(5, -1, -1)] * y).mean(), "index", lambda own, h,
        y: (h[torch.arange(6)] * y).mean(),
    ),
    "mixup": (
        lambda own, h, y: (h + h[torch.randperm(6)]).square().mean(), "index",
        lambda own, h, y: (h + torch.randn(6, 2)).square().mean(),
    ),
    "groups": (
        lambda own, h, y: h.view(2, -1).softmax(0)[0].square().mean(), "view", lambda own, h,
        y: h.view(6, 1, -1).square().mean(),
    ),
    "the largest": (
        lambda own, h, y: h.square().sum(1).max(), "max", lambda own, h, y: h.square().max(1)[0].mean(),
    ),
    "a deviation": (lambda own, h, y: h.std(), "aten.", lambda own, h, y: h.std(1).mean()),
    "class counts": (
        lambda own, h, y: F.cross_entropy(h, y.argmax(1),
            weight=1 / (1 + F.one_hot(y.argmax(1), 2).sum(0)).to(h.dtype)), "nll",
        lambda own, h, y: F.cross_entropy(h, y.argmax(1), weight=torch.tensor([0.3, 0.7], dtype=h.dtype)),
    ),
    "normalized targets": (
        lambda own, h, y: F.mse_loss(h, (y - y.mean(0)) / y.std(0)), "mse_loss",
        lambda own, h, y: F.mse_loss(h, (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)),
    ),
    "inner step": (
        lambda own, h, y: F.linear(h, own.table - torch.autograd.grad(
            F.linear(h, own.table).square().mean(), own.table, create_graph=True)[0]).square().mean(),
            "aten.",
        lambda own, h, y: F.linear(h, own.table - own.table.square()).square().mean(),
    ),
    "gradient penalty": (
        lambda own, h, y: torch.autograd.grad(
            F.linear(h, own.table).square().mean(), own.table, create_graph=True)[0].square().sum(), "pow",
        lambda own, h, y: torch.autograd.grad(F.linear(h, own.table).tanh().sum(), h,
            create_graph=True)[0].square().mean(),
    ),
    "frequencies": (
        lambda own, h, y: F.embedding(y.argmax(1), own.table, scale_grad_by_freq=True).square().mean(),
        "embedding_dense_backward",
        lambda own, h, y: F.embedding(y.argmax(1), own.table).square().mean(),
    ),
    "observed range": (
        lambda own, h, y: torch.fake_quantize_per_tensor_affine(
            h, ((h.max() - h.min()) / 255).detach(), torch.zeros((), dtype=torch.int32), 0,
            255).square().mean(), "fake_quantize",
        lambda own, h, y: torch.fake_quantize_per_tensor_affine(h, 0.01, 0, -128, 127).square().mean(),
    ),
    "hardest": (lambda own, h, y: h.square().sum(1).topk(2)[0].mean(), "topk", lambda own, h,
        y: h.topk(1)[0].mean()),
    "robust": (
        lambda own, h, y: (each := h.square().sum(1), (each.detach().softmax(0) * each).sum())[1], "softmax",
        lambda own, h, y: (h.detach().softmax(1) * h).sum(),
    ),
    "norm": (
        lambda own, h, y: (h / h.norm()).exp().mean(), "exp", lambda own, h,
        y: (h / h.norm(dim=1, keepdim=True)).exp().mean(),
    ),
    "places": (
        lambda own, h, y: (h.sum(1) * torch.arange(6)).mean(), "mul", lambda own, h,
        y: (h * torch.arange(2)).mean(),
    ),
    "neighbors": (
        lambda own, h, y: F.avg_pool1d(h.t()[None], 3, 1, 1).square().mean(), "avg_pool",
        lambda own, h, y: F.avg_pool1d(h[:, None], 1).square().mean(),
    ),
}  # fmt: skip
APART: dict[str, Loss] = {
    "mean": lambda net, x, y: F.mse_loss(net(x), y),
    "columns": lambda net, x, y: F.mse_loss(net(x)[:, :1], y[:, 1:]) + net(x)[..., 0].mean(),
    "all of them": lambda net, x, y: F.mse_loss(net(x)[:100], y[0:]),
    "joined": lambda net, x, y: F.mse_loss(*net(torch.cat([x, 2 * x])).chunk(2)),
    "own class": lambda net, x, y: net(x).log_softmax(1)[torch.arange(len(x)), y.argmax(1)].mean(),
    "weights": lambda net, x, y: ((net(x) - y).square() * y.exp()).sum() / y.exp().sum(),
    "a mean beside each": lambda net, x, y: ((net(x) - y).square() + 0.1 * net(x).abs().mean()).mean(),
    "attention": lambda net, x, y: (h := net(x)[..., None], (h @ h.mT).softmax(-1).square().mean())[1],
    "own tokens": lambda net, x, y: (_tokens(net(x)).transpose(1, 2).mean(2) * y).exp().mean(),
    "normed in place": lambda net, x, y: F.mse_loss(_halved(net(x)[:, None])[:, 0], y),
    "only logged": lambda net, x, y: (net(x).detach().mean(0).std(), F.mse_loss(net(x), y))[1],
}


class Own(MLP):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(lambda x: self.second(torch.tanh(self.first(x))), *batch)


class Kind(MLP):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.table = step, torch.nn.Parameter(torch.ones(3, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, self.second(torch.tanh(self.first(batch[0]))), batch[1])


@pytest.mark.parametrize("name", KINDS)
def test_kinds_beside_their_controls(name: str) -> None:
    step, operation, control = KINDS[name]
    met = capture(Kind(step), regression(6)).at(6).meet
    assert met is not None and operation in met and "test_cross_sample.py:" in met
    assert capture(Kind(control), regression(6)).at(6).meet is None


@pytest.mark.parametrize("name", MEET)
def test_where_samples_meet(name: str) -> None:
    loss, operation = MEET[name]
    met = capture(Own(loss), regression(6)).at(6).meet
    assert met is not None and operation in met


@pytest.mark.parametrize("turned", [Tensor.t, lambda x: x.transpose(0, 1), lambda x: x.permute(-1, 0)])
def test_as_many_samples_as_features(turned: Callable[[Tensor], Tensor]) -> None:
    """The shape of what is turned does not say that it was."""
    met = (
        capture(Own(lambda net, x, y: (net(x) @ turned(net(x))).logsumexp(1).mean()), regression(2))
        .at(2)
        .meet
    )
    assert met is not None and "mm" in met


@pytest.mark.parametrize("name", APART)
def test_where_they_do_not(name: str) -> None:
    assert capture(Own(APART[name]), regression(6)).at(6).meet is None


def test_one_sample_meets_no_other() -> None:
    assert capture(Own(MEET["softmax"][0]), regression(1)).at(1).meet is None


def test_trials_leave_the_draws_of_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would seed the generators of all GPUs too, and nothing would restore them."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(sample_trial, "_tried", {})
    module, batch = Own(MEET["rolled"][0]), regression(6)
    host = torch.get_rng_state()
    assert capture(module, batch).at(6).meet is not None
    assert sample_trial._tried and not seeded
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(1)
    assert seeded == [1]  # the control
