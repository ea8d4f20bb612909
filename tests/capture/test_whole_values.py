"""Logged values that are computed from means and sums over the batch, but are none: they are those of the whole batch."""

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
from lightning_piper.capture import capture, flatten, weighing
from lightning_piper.capture.eager import Outcome, run_eagerly
from lightning_piper.directives import Directive
from lightning_piper.ir.values import Slice
from lightning_piper.session.verification import unlike_one_device
from lightning_piper.verify import interpret
from tests.strategy.fitting import Batches, local, trainer

SIZE = 12
Log = Callable[[nn.Module, Tensor, Tensor], Any]
# p: predictions, y: labels, of which some are ignored.
COMPUTED: dict[str, Log] = {
    "root": lambda m, p, y: F.mse_loss(p[:, 0], y.double()).sqrt(),
    "perplexity": lambda m, p, y: F.cross_entropy(p, y).exp(),
    "perplexity, of a number": lambda m, p, y: math.exp(min(F.cross_entropy(p, y).item(), 20)),
    "ratio": lambda m, p, y: (p.argmax(-1) == y).sum() / (p.argmax(-1) == 0).sum().clamp(min=1),
    "f1": lambda m, p, y: ((p.argmax(-1) < 2) & (y >= 0)).sum() / (0.5 * ((p.argmax(-1) < 2).sum() + (y >= 0).sum())),
    "of two terms": lambda m, p, y: (F.cross_entropy(p, y) + p.square().sum()).sqrt(),
    "mean of roots": lambda m, p, y: torch.stack([p.square().mean().sqrt(), p.abs().mean().sqrt()]).mean(),
    "root of the largest": lambda m, p, y: p.square().max().sqrt(),
    "product": lambda m, p, y: p.mean() * F.cross_entropy(p, y),
    "with a weight": lambda m, p, y: p.square().mean().sqrt() / m.weight.norm(),
    "in decibels": lambda m, p, y: 10 * torch.log10(1.0 / F.mse_loss(p[:, 0], y.double())),
}
NOT: dict[str, Log] = {
    "deviation": lambda m, p, y: p.std(),
    "by the number of samples": lambda m, p, y: p.square().sum().sqrt() / len(p),
    "mean of ratios": lambda m, p, y: (p.square().sum(0) / p.abs().sum(0)).mean(),
    "around the mean": lambda m, p, y: (p - p.mean()).square().mean(),
    "scaled, then squared": lambda m, p, y: (p / p.sum()).square().sum(),
}
KNOWN: dict[str, Log] = {
    "mean": lambda m, p, y: p.mean(),
    "beside the mean": lambda m, p, y: (p - 0.5 * p.mean()).mean(),
    "weights": lambda m, p, y: (y.double() / y.double().sum() * p.square().mean(1)).sum(),
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
    """One device on the whole batch; the program; and the values of which nothing is known."""
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
    with mock.patch.object(weighing, "computed_from", lambda *_: None):
        whole, found, unknown = outcomes(COMPUTED)
    assert set(unknown) == set(COMPUTED)
    found_apart = distances(whole, found)
    assert {name for name in COMPUTED if found_apart[name] > 1e-6} == set(COMPUTED)


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


@pytest.mark.parametrize("program", [None, PROGRAM], ids=["one device", "program"])
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
    assert len(said) == len(names) and all(sum(f"self.log({name!r}) at " in text for text in said) == 1 for name in names)
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
    assert not list(unlike_one_device(piper.compile(module, data(), [], step="validation_step"))), "where nothing is cut"
