"""Numbers in the code of a step that may be choices which depend on the number of samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_piper.capture.steps.code_structure import calls_of, choices, same_calls


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
}


@pytest.mark.parametrize("step, expected", STEPS.values(), ids=STEPS)
def test_numbers_that_the_code_may_choose(step, expected):
    calls = calls_for(step, 4, 8)
    assert choices(calls) == expected and same_calls(calls)


def test_a_third_size_tells_a_choice_from_the_number_of_samples():
    divided, chosen = (STEPS[name][0] for name in list(STEPS)[3:])
    assert same_calls(calls_for(divided, 4, 8, 16)) and not same_calls(calls_for(chosen, 4, 8, 16))
