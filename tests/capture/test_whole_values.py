"""Logged values that are computed from means and sums over the batch, but are not means or sums themselves.
They equal the values of the whole batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import capture, flatten
from lightning_piper.capture.eager.eager_reference import Outcome, run_eagerly
from lightning_piper.capture.losses import loss_weights
from lightning_piper.directives import Directive
from lightning_piper.ir.values import Slice
from lightning_piper.session.verification import unlike_one_device
from lightning_piper.verify import interpret
from tests.strategy.fitting import Batches, local, trainer

SIZE = 12
Log = Callable[[nn.Module, Tensor, Tensor], Any]


def hits(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels, and which of them were found."""
    return (known := y.clamp(min=0)), (p.argmax(-1) == known).double()


def confusion(p: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y.clamp(min=0), 3).double().T @ F.one_hot(p.argmax(-1), 3).double()


def added_up(p: Tensor, y: Tensor, put: str) -> Tensor:
    """Return the same matrix, computed cell by cell."""
    known, found, counts = y.clamp(min=0), p.argmax(-1), torch.zeros(9)
    if put == "index_put":
        return counts.view(3, 3).index_put((known, found), torch.ones(()), accumulate=True)
    return getattr(counts, put)(0, 3 * known + found, torch.ones(len(y))).view(3, 3)


def iou(counts: Tensor) -> Tensor:
    both = counts.diagonal()
    return (both / (counts.sum(0) + counts.sum(1) - both).clamp(min=1)).mean()


def accuracy_by_class(p: Tensor, y: Tensor) -> Tensor:
    (known, hit), none = hits(p, y), torch.zeros(3).double()
    return (none.scatter_add(0, known, hit) / none.index_add(0, known, torch.ones_like(hit))).nanmean()


def macro_f1(p: Tensor, y: Tensor) -> Tensor:
    found, there = F.one_hot(p.argmax(-1), 3), F.one_hot(y.clamp(min=0), 3)
    both, only, missed = ((a * b).sum(0) for a, b in ((found, there), (found, 1 - there), (1 - found, there)))
    return (2 * both / (2 * both + only + missed)).mean()


def kappa(counts: Tensor) -> Tensor:
    n = counts.sum()
    agree, chance = counts.diagonal().sum() / n, counts.sum(0) / n @ (counts.sum(1) / n)
    return (agree - chance) / (1 - chance)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    n = len(a)
    over = (n * (a * a).sum() - a.sum() ** 2) * (n * (b * b).sum() - b.sum() ** 2)
    return (n * (a * b).sum() - a.sum() * b.sum()) / over.sqrt()


def r_squared(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a - b).square().sum() / ((b * b).sum() - b.sum() ** 2 / len(b))


def entropy(a: Tensor) -> Tensor:
    shares = torch.histc(a, bins=4, min=-1, max=1) / len(a)
    return -torch.special.xlogy(shares, shares).sum()


# p: predictions; y: labels, of which some are ignored.
COMPUTED: dict[str, Log] = {
    "root": lambda m, p, y: F.mse_loss(p[:, 0], y.double()).sqrt(),
    "perplexity": lambda m, p, y: F.cross_entropy(p, y).exp(),
    "perplexity, of a number": lambda m, p, y: math.exp(min(F.cross_entropy(p, y).item(), 20)),
    "ratio": lambda m, p, y: (p.argmax(-1) == y).sum() / (p.argmax(-1) == 0).sum().clamp(min=1),
    "f1": lambda m, p, y: (
        ((p.argmax(-1) < 2) & (y >= 0)).sum() / (0.5 * ((p.argmax(-1) < 2).sum() + (y >= 0).sum()))
    ),
    "of two terms": lambda m, p, y: (F.cross_entropy(p, y) + p.square().sum()).sqrt(),
    "mean of roots": lambda m, p, y: torch.stack([p.square().mean().sqrt(), p.abs().mean().sqrt()]).mean(),
    "root of the largest": lambda m, p, y: p.square().max().sqrt(),
    "product": lambda m, p, y: p.mean() * F.cross_entropy(p, y),
    "with a weight": lambda m, p, y: p.square().mean().sqrt() / m.weight.norm(),
    "in decibels": lambda m, p, y: 10 * torch.log10(1.0 / F.mse_loss(p[:, 0], y.double())),
    "by the number of samples": lambda m, p, y: p.square().sum().sqrt() / len(p),
    "mean of ratios": lambda m, p, y: (p.square().sum(0) / p.abs().sum(0)).mean(),
    "iou": lambda m, p, y: iou(confusion(p, y)),
    "iou of what is put": lambda m, p, y: iou(added_up(p, y, "index_put")),
    "iou of what is scattered": lambda m, p, y: iou(added_up(p, y, "scatter_add")),
    "iou of what is added": lambda m, p, y: iou(added_up(p, y, "index_add")),
    "accuracy by class": lambda m, p, y: accuracy_by_class(p, y),
    "macro f1": lambda m, p, y: macro_f1(p, y),
    "kappa": lambda m, p, y: kappa(confusion(p, y)),
    "the two most frequent": lambda m, p, y: confusion(p, y).sum(0).topk(2).values.prod().sqrt(),
    "pearson": lambda m, p, y: pearson(p[:, 0], p[:, 1]),
    "covariance": lambda m, p, y: (p.T @ p / len(p) - torch.outer(p.mean(0), p.mean(0))).norm(),
    "range of each": lambda m, p, y: (p.amax(0) - p.min(0).values).mean(),
    "mean of the largest": lambda m, p, y: p.amax(0).mean(),
    "sum of the smallest": lambda m, p, y: p.min(0).values.sum() * 2,
    "whole number": lambda m, p, y: (10 * p.sum()).long().double(),
    "histogram": lambda m, p, y: entropy(p[:, 0]),
    "more than the number of samples": lambda m, p, y: len(y) + 1 - (p > 0).sum().double(),
    "a mean and the number of samples": lambda m, p, y: p.mean() + 1 / len(y),
    "a mean beside the number of samples": lambda m, p, y: len(y) * p.mean() - len(y),
    "squared number of samples": lambda m, p, y: p.sum() + len(y) ** 2,
    "with a parameter": lambda m, p, y: (
        F.one_hot(p.argmax(-1), 3).sum(0) / (1 + p.abs().sum(0)) * m.bias
    ).sum(),
}
NOT: dict[str, Log] = {
    "deviation": lambda m, p, y: p.std(),
    "overwritten": lambda m, p, y: torch.zeros(3).double().index_put((hits(p, y)[0],), p[:, 0]).norm(),
    "around the mean": lambda m, p, y: (p - p.mean()).square().mean(),
    "shares, summed and rooted": lambda m, p, y: (p.abs() / y.double().abs().sum()).sum(1).sqrt().sum(),
    "largest share": lambda m, p, y: (p / y.double().abs().sum()).amax(),
    "shares, cumulated": lambda m, p, y: (p / y.double().abs().sum()).cumsum(1).clamp(-0.01, 0.01).sum(),
    "last sample": lambda m, p, y: p.abs().prod(1)[-1].mean(),
    "scaled, then squared": lambda m, p, y: (p / p.sum()).square().sum(),
}
KNOWN: dict[str, Log] = {
    "mean": lambda m, p, y: p.mean(),
    "beside the mean": lambda m, p, y: (p - 0.5 * p.mean()).mean(),
    "r squared": lambda m, p, y: r_squared(
        p[:, 0], y.clamp(min=0).double()
    ),  # the denominator depends on the batch
    "weights": lambda m, p, y: (y.double() / y.double().sum() * p.square().mean(1)).sum(),
    "samples that count": lambda m, p, y: (len(y) - (y == -100).sum()).double(),
    "errors": lambda m, p, y: p.numel() - (p > 0).sum().double(),
    "more than samples": lambda m, p, y: (p > 0).sum().double() + 2 * len(y),
    "fewer than samples": lambda m, p, y: p.square().sum() - len(y),
    "by the samples that count": lambda m, p, y: (
        F.cross_entropy(p, y, reduction="sum") / (len(y) - (y == -100).sum())
    ),
    "share of errors": lambda m, p, y: (len(y) - (p.argmax(-1) == y).sum().double()) / len(y),
}


class Logging(L.LightningModule):
    def __init__(self, logs: dict[str, Log]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net, self.logs = nn.Linear(4, 3).double(), logs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        p = self.net(x).tanh()
        for name, value in self.logs.items():
            self.log(name, value(self.net, p, y))
        return F.cross_entropy(p, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, value in self.logs.items():
            self.log(f"val {name}", value(self.net, self.net(batch[0]).tanh(), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    y = torch.randint(0, 3, (SIZE,), generator=generator)
    y[:4] = torch.tensor([1, -100, -100, 2])
    return torch.randn(SIZE, 4, dtype=torch.float64, generator=generator), y


PROGRAM: list[Directive] = [
    piper.Place(filter={}, devices=[0, 1]),
    piper.Split(filter={}, dim_name="MB", num_microbatches=3),
    piper.Replicate(filter={}, devices=[0, 1]),
]


def outcomes(logs: dict[str, Log]) -> tuple[Outcome, Outcome, tuple[str, ...]]:
    """Return the outcome of one device on the whole batch, the outcome of the program, and the values that
    Piper does not know how to combine.
    """
    module = Logging(logs)
    compiled = piper.compile(module, data(), PROGRAM)
    leaves, tensors = flatten(data())[0], {n: x.detach() for n, x in module.named_parameters()}
    step = capture(module, data())
    whole = run_eagerly(step, tensors, leaves, [Slice(0, SIZE)])
    return whole, interpret(compiled.dag, tensors, leaves), compiled.dag.code.unknown


def distances(a: Outcome, b: Outcome) -> dict[str, float]:
    return {name: float((a.metrics[name] - b.metrics[name]).abs()) for name in a.metrics}


def test_what_is_computed_from_means_and_sums_is_that_of_the_whole_batch() -> None:
    whole, found, unknown = outcomes({**COMPUTED, **KNOWN})
    assert found.metrics.keys() == whole.metrics.keys() and not unknown
    for name, distance in distances(whole, found).items():
        # Lightning takes a number in float32.
        assert distance < (1e-6 if name == "perplexity, of a number" else 1e-13), name


def test_values_of_parts_would_give_another_one() -> None:
    """The control: the mean of the roots of parts is another number."""
    with mock.patch.object(loss_weights, "sources_of", lambda *_: None):
        whole, found, unknown = outcomes(COMPUTED)
    assert set(unknown) == set(COMPUTED)
    found_apart = distances(whole, found)
    assert {name for name in COMPUTED if not found_apart[name] <= 1e-6} == set(COMPUTED)


def test_what_is_computed_from_something_else_is_known_to_differ() -> None:
    whole, found, unknown = outcomes(NOT)
    assert set(unknown) == set(NOT)
    assert all(distance > 1e-5 for name, distance in distances(whole, found).items() if name in NOT)


@contextmanager
def warned() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in seen if "self.log(" in str(each.message)]


@pytest.mark.parametrize(
    "program", [pytest.param(None, marks=pytest.mark.long), PROGRAM], ids=["one device", "program"]
)
def test_a_fit_logs_what_one_device_logs(program: Any) -> None:
    options: dict[str, Any] = {"max_steps": 2}
    logged = []
    with warned() as said:
        for strategy in ("auto", local(program or [piper.Place(filter={}, devices=[0])])):
            fit, record = trainer(strategy, **options)
            fit.fit(Logging({**COMPUTED, **NOT}), Batches([data()] * 2))
            logged.append(record.logged[0])
    one, other = logged
    differ = {name for name in one if (one[name] - other[name]).abs() > 1e-6}
    names = set(NOT) if program else set()
    assert differ == names and one.keys() == other.keys()
    assert len(said) == len(names) and all(
        sum(f"self.log({name!r}) at " in text for text in said) == 1 for name in names
    )
    assert all(f"{__file__}:" in text for text in said)


def test_so_it_is_in_steps_without_a_backward_pass() -> None:
    module = Logging({**COMPUTED, **NOT}).eval()
    compiled = piper.compile(module, data(), PROGRAM, step="validation_step")
    leaves, tensors = flatten(data())[0], {n: x.detach() for n, x in module.named_parameters()}
    one = interpret(piper.compile(module, data(), [], step="validation_step").dag, tensors, leaves)
    found = distances(one, interpret(compiled.dag, tensors, leaves))
    assert {name for name, distance in found.items() if distance > 1e-13} == {f"val {name}" for name in NOT}
    said = list(unlike_one_device(compiled))
    assert [text.partition(" at ")[0] for text in said] == [f"self.log('val {name}')" for name in NOT]
    assert not list(unlike_one_device(piper.compile(module, data(), [], step="validation_step"))), (
        "where nothing is cut"
    )
