"""Where samples certainly meet on the way to the loss is seen in the graph; where they do not, nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_piper.capture import capture
from tests.models import MLP, regression

Loss = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]


def _tokens(rows: Tensor) -> Tensor:
    """Each row behind a token that all samples have, as images have one."""
    return torch.cat([torch.ones(1, 1, 2).expand(len(rows), -1, -1), rows[:, None]], 1)


MEET: dict[str, tuple[Loss, str]] = {
    "half": (lambda net, x, y: F.mse_loss(net(x[: len(x) // 2]), y[len(x) // 2 :]), "slice"),
    "chunk": (lambda net, x, y: F.mse_loss(*net(x).chunk(2)), "split"),
    "first": (lambda net, x, y: (net(x) - net(x)[0]).square().mean(), "select"),
    "softmax": (lambda net, x, y: (net(x).softmax(0) * y).mean(), "softmax"),
    "rolled": (lambda net, x, y: F.mse_loss(net(x).roll(1, 0), y), "roll"),
    "product": (lambda net, x, y: F.cross_entropy(F.normalize(net(x)) @ y.t(), torch.arange(len(x))), "mm"),
    "chosen rows": (
        lambda net, x, y: ((net(x)[:, None] * torch.ones(3, 1))[torch.arange(len(x)), y.argmax(1)] @ y.t()).exp().mean(),
        "mm",
    ),
    "tokens": (
        lambda net, x, y: (_tokens(net(x)).transpose(1, 2).permute(0, 2, 1)[:, 0] @ y.t()).exp().mean(),
        "mm",
    ),
    "pairs": (lambda net, x, y: (net(x)[:, None] - net(x)[None]).abs().mean(), "sub"),
    "distances": (lambda net, x, y: torch.cdist(net(x), y).mean(), "cdist"),
    "centred": (lambda net, x, y: (net(x) - net(x).mean(0)).square().mean(), "sub"),
    "around the mean": (lambda net, x, y: (net(x) - net(x).mean()).square().mean(), "pow"),
    "shares": (lambda net, x, y: ((net(x).exp() / net(x).exp().sum()).log() * y).mean(), "log"),
    "scaled": (lambda net, x, y: F.mse_loss(net(x) / (net(x).std(0) + 1e-3), y), "div"),
}
APART: dict[str, Loss] = {
    "mean": lambda net, x, y: F.mse_loss(net(x), y),
    "columns": lambda net, x, y: F.mse_loss(net(x)[:, :1], y[:, 1:]) + net(x)[..., 0].mean(),
    "all of them": lambda net, x, y: F.mse_loss(net(x)[:100], y[0:]),
    "joined": lambda net, x, y: F.mse_loss(*net(torch.cat([x, 2 * x])).chunk(2)),
    "own class": lambda net, x, y: net(x).log_softmax(1)[torch.arange(len(x)), y.argmax(1)].mean(),
    "weights": lambda net, x, y: ((net(x) - y).square() * y.exp()).sum() / y.exp().sum(),
    "a mean beside each": lambda net, x, y: ((net(x) - y).square() + 0.1 * net(x).abs().mean()).mean(),
    "the largest taken off": lambda net, x, y: (net(x) - net(x).max()).exp().mean(),
    "attention": lambda net, x, y: (h := net(x)[..., None], (h @ h.mT).softmax(-1).square().mean())[1],
    "own tokens": lambda net, x, y: (_tokens(net(x)).transpose(1, 2).mean(2) * y).exp().mean(),
    "only logged": lambda net, x, y: (net(x).detach().mean(0).std(), F.mse_loss(net(x), y))[1],
}


class Own(MLP):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(lambda x: self.second(torch.tanh(self.first(x))), *batch)


@pytest.mark.parametrize("name", MEET)
def test_where_samples_meet(name: str) -> None:
    loss, operation = MEET[name]
    met = capture(Own(loss), regression(6)).at(6).meet
    assert met is not None and operation in met


@pytest.mark.parametrize("turned", [Tensor.t, lambda x: x.transpose(0, 1), lambda x: x.permute(-1, 0)])
def test_as_many_samples_as_features(turned: Callable[[Tensor], Tensor]) -> None:
    """The shape of what is turned does not say that it was."""
    met = capture(Own(lambda net, x, y: (net(x) @ turned(net(x))).logsumexp(1).mean()), regression(2)).at(2).meet
    assert met is not None and "mm" in met


@pytest.mark.parametrize("name", APART)
def test_where_they_do_not(name: str) -> None:
    assert capture(Own(APART[name]), regression(6)).at(6).meet is None


def test_one_sample_meets_no_other() -> None:
    assert capture(Own(MEET["softmax"][0]), regression(1)).at(1).meet is None
