"""Numbers in the code of a step that may be choices which depend on the number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_piper.capture import capture
from lightning_piper.capture.steps.code_structure import calls_of, choices, same_calls
from lightning_piper.errors import CaptureError


def calls_for(step: Callable[[Tensor], Tensor], *sizes: int):
    def joint(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(step(x), x)[0]

    return {n: calls_of(make_fx(joint, tracing_mode="fake")(torch.zeros(n, 4, 3)).graph) for n in sizes}


STEPS = {
    "the mean of all": (lambda x: (x * x).mean(), False),
    "the mean of the samples": (lambda x: (x * x).mean(0).sum(), False),
    "a group norm": (lambda x: torch.nn.functional.group_norm(x, 2).pow(3).sum(), False),
    "a sum divided by the number of samples": (lambda x: (x * x).sum() / len(x), True),
    "a factor for small batches": (lambda x: (x * (1.0 if len(x) < 8 else 2.0)).pow(2).sum(), True),
    "a factor that is NaN": (lambda x: (x * math.nan).sum(), False),
}


@pytest.mark.parametrize("step, expected", STEPS.values(), ids=STEPS)
def test_numbers_that_the_code_may_choose(step, expected):
    calls = calls_for(step, 4, 8)
    assert choices(calls) == expected and same_calls(calls)


def test_a_third_size_tells_a_choice_from_the_number_of_samples():
    divided, chosen = (STEPS[name][0] for name in list(STEPS)[3:5])
    assert same_calls(calls_for(divided, 4, 8, 16)) and not same_calls(calls_for(chosen, 4, 8, 16))


class Added(L.LightningModule):
    """Adds a number to the loss, for a number of samples."""

    def __init__(self, number: Callable[[int], float]) -> None:
        super().__init__()
        self.net, self.number = nn.Linear(3, 3).double(), number

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch), batch) + torch.tensor(self.number(len(batch)))


def test_a_number_that_is_nan_does_not_depend_on_the_number_of_samples():
    batch = torch.ones(4, 3, dtype=torch.float64)
    for number in (3.0, math.nan):
        step = capture(Added(lambda n, number=number: number), batch)
        assert [step.at(n).terms for n in (2, 8)] == [step.at(4).terms] * 2
    step = capture(Added(lambda n: math.nan if n < 6 else 1.0), batch)
    step.at(4)
    with pytest.raises(CaptureError, match="depends on the batch size in a way that Piper cannot follow"):
        step.at(8)
