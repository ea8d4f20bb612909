"""The loss whose backward pass sets gradients that were computed before."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lightning_piper.errors import ExecutionError, PiperError
from lightning_piper.holdings.gradient_injection import GradientInjection

CPU = torch.device("cpu")


def parameters():
    a, b, frozen = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    frozen.requires_grad_(False)
    return {"a": a, "b": b, "frozen": frozen}


def test_backward_hands_out_the_gradients_without_copying_them():
    params, grad = parameters(), torch.tensor([1.0, 2.0, 3.0])
    place = grad.data_ptr()
    loss = GradientInjection(params, CPU).loss(torch.tensor(0.5), {"a": grad})
    del grad
    assert loss.item() == 0.5 and params["a"].grad is None
    loss.backward()
    assert params["a"].grad.tolist() == [1.0, 2.0, 3.0]
    assert params["a"].grad.data_ptr() == place
    assert params["b"].grad is None and params["frozen"].grad is None


def test_scales_and_accumulates():
    params = parameters()
    injection = GradientInjection(params, CPU)
    for _ in range(3):
        (injection.loss(torch.tensor(1.0), {"a": torch.ones(3), "b": torch.ones(3)}) / 4).backward()
    assert params["a"].grad.tolist() == [0.75] * 3 == params["b"].grad.tolist()


def test_runs_hooks_of_parameters():
    params = parameters()
    params["a"].register_hook(lambda grad: grad * 10)
    GradientInjection(params, CPU).loss(torch.tensor(1.0), {"a": torch.ones(3)}).backward()
    assert params["a"].grad.tolist() == [10.0] * 3


def test_works_without_parameters():
    loss = GradientInjection({}, CPU).loss(torch.tensor(2.0), {})
    loss.backward()
    assert loss.requires_grad and loss.item() == 2.0


def test_refuses_a_second_backward():
    loss = GradientInjection(parameters(), CPU).loss(torch.tensor(1.0), {"a": torch.ones(3)})
    loss.backward(retain_graph=True)
    with pytest.raises(ExecutionError, match="backward ran twice"):
        loss.backward()


def test_divides_by_the_scale_that_the_gradients_have():
    params = parameters()
    loss = GradientInjection(params, CPU).loss(
        torch.tensor(1.0), {"a": torch.full((3,), 1024.0)}, scale=1024.0
    )
    (loss * 512).backward()
    assert params["a"].grad.tolist() == [512.0] * 3


@pytest.mark.parametrize(
    "factors, good", [((0.5, 0.5, 0.5), True), ((0.5, 0.25, 0.5), False), ((0.5, 0.5, 1.0), False)]
)
def test_batches_that_are_kept_must_have_one_factor(factors, good):
    params = parameters()
    injection = GradientInjection(params, CPU)
    for i, factor in enumerate(factors[:-1]):
        (injection.loss(torch.tensor(float(i)), {}, kept=True) * factor).backward()
    last = injection.loss(torch.tensor(1.0), {"a": torch.ones(3)}) * factors[-1]
    with contextlib.nullcontext() if good else pytest.raises(PiperError, match="different factors"):
        last.backward()
        assert params["a"].grad.tolist() == [0.5] * 3


def test_batches_that_are_kept_must_have_one_scale():
    injection = GradientInjection(parameters(), CPU)
    (injection.loss(torch.tensor(1.0), {}, scale=2.0, kept=True) * 2).backward()
    with pytest.raises(PiperError, match="different factors"):
        (injection.loss(torch.tensor(1.0), {}, scale=4.0) * 4).backward()
