"""The trial finds the steps that compute something else on parts of a batch, and no others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from lightning_piper.capture import capture
from lightning_piper.verify.trial import Difference, largest_difference

Body = Callable[[Tensor], Tensor]
BATCH = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Step(L.LightningModule):
    """A layer, and `body`, which is applied to its output."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(3, 2).double(), body

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.body(self.layer(batch)).square().mean()


def found(body: Body) -> Difference | None:
    module = Step(body)
    step = capture(module, BATCH)
    tensors = {step.canonical[name]: x.detach() for name, x in module.named_parameters()}
    return largest_difference(step, tensors, [BATCH], size=2)


def test_a_step_that_reads_the_number_of_samples_differs() -> None:
    assert "mul at" in str(found(lambda h: h * math.log(len(h))))


def test_results_that_are_not_finite_on_all_samples_are_not_compared() -> None:
    assert found(lambda h: h / h.new_zeros(())) is None
    assert found(lambda h: h * h.new_full((), math.nan)) is None
    only_parts = str(found(lambda h: h / (len(h) - 2)))
    assert "is infinite or NaN only on parts of the samples, from div at" in only_parts
    assert "differs by" in str(found(lambda h: h * len(h)))


def test_a_step_that_computes_something_else_each_time_is_not_tried() -> None:
    """The number of samples is not the cause."""
    assert found(lambda h: h * time.perf_counter_ns()) is None


DRAWS: dict[str, Body] = {
    "noise for each sample": lambda h: h + torch.randn_like(h),
    "numbers of two distributions": lambda h: (
        torch.where(torch.rand(len(h), 1) < 0.5, h, -h) + torch.empty_like(h).exponential_()
    ),
    "steps of a diffusion": lambda h: h * torch.randint(1, 100, (len(h), 1)),
    "a Normal of torch.distributions": lambda h: Normal(h, 1.0).rsample(),
    "Gumbel noise": lambda h: F.gumbel_softmax(h),
    "one number": lambda h: h * torch.rand(()),
    "dropout": lambda h: F.dropout(h, 0.5),
    "noise that is drawn again": lambda h: checkpoint(
        lambda x: x * torch.rand_like(x), h, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_get_the_random_numbers_of_the_whole_batch(name: str) -> None:
    draw = DRAWS[name]
    assert found(draw) is None
    assert "cumprod at" in str(found(lambda h: draw(torch.cumprod(h, 0))))
    assert "cumprod at" in str(found(lambda h: torch.cumprod(draw(h), 0)))


CHOICES: dict[str, Body] = {
    "a permutation": lambda h: h[torch.randperm(len(h))],
    "positions": lambda h: h[torch.randint(0, len(h), (len(h),))],
    "noise for pairs of samples": lambda h: torch.rand(len(h), len(h), dtype=h.dtype) @ h,
    "a gamma distribution": lambda h: h * torch._standard_gamma(torch.ones_like(h)),
    "a draw for large batches": lambda h: torch.cumprod(h, 0) + (torch.rand(()) if len(h) > 2 else 0),
    "a draw for small batches": lambda h: (
        torch.cumprod(h, 0) + torch.rand(()) + (len(h) > 2 or torch.rand(()))
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_step_whose_parts_cannot_get_them_is_not_tried(name: str) -> None:
    assert found(CHOICES[name]) is None
