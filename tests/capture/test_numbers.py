"""Numbers that are inputs compute the same as Python numbers: the same bits, in the same dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_piper.capture.proxies.numbers import NumberInputs, NumberProxy

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "t * n": lambda t, n: t * n, "n * t": lambda t, n: n * t, "t + n": lambda t, n: t + n, "t - n": lambda t,
    n: t - n,
    "n - t": lambda t, n: n - t, "t / n": lambda t, n: t / n, "n / t": lambda t, n: n / t, "t < n": lambda t,
    n: t < n,
    "n == t": lambda t, n: n == t, "torch.mul": torch.mul, "t.sub(n)": lambda t, n: t.sub(n),
    "t += n": lambda t, n: t.clone().add_(n) if t.is_floating_point() else t + n,
    "t ** n": lambda t, n: t**n, "alpha": lambda t,
    n: t.add(t, alpha=n) if isinstance(n, int) or t.is_floating_point() else t,
}  # fmt: skip
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


def same(found: Tensor, wanted: Tensor) -> bool:
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    )


@pytest.mark.parametrize("value", [0.3, 3, 1e-9, -0.0])
@pytest.mark.parametrize("shape", [(), (1,), (5,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_beside_a_tensor_is_as_a_python_number(
    dtype: torch.dtype, shape: tuple[int, ...], value: Any
) -> None:
    tensor = (torch.rand(shape, dtype=torch.float64) * 5 + 1).to(dtype)
    for name, operation in OPERATIONS.items():
        inputs = NumberInputs()
        number = inputs.source("n", "n", lambda: value)
        try:
            wanted = operation(tensor, value)
        except RuntimeError:
            continue  # subtraction of bools
        with inputs.tracing(()):
            found = operation(tensor, number)
        assert same(found, wanted), name


COMPLEX = (torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, *COMPLEX], ids=str)
def test_a_complex_number_beside_a_tensor_is_as_a_python_number(dtype: torch.dtype) -> None:
    tensor = (torch.rand(5, dtype=torch.float64) * 5 + 1).to(dtype)
    for name in ("t * n", "t + n", "n - t", "t / n", "n == t", "torch.mul"):
        inputs = NumberInputs()
        number = inputs.source("n", "n", lambda: 0.3)
        with inputs.tracing(()):
            found = OPERATIONS[name](tensor, number * 2j)
        assert same(found, OPERATIONS[name](tensor, 0.3 * 2j)), name


def test_a_number_that_a_cache_keeps_is_its_value() -> None:
    inputs, today = NumberInputs(), [0.5]
    number = inputs.source("n", "n", lambda: today[0])
    twice = functools.lru_cache(lambda x: x * 2)
    with inputs.tracing(()):
        assert type(twice(number)) is NumberProxy
    today[0] = 0.75
    kept = twice(0.5)
    assert type(kept + 0) is float and kept + 0 == 1.0 and torch.equal(torch.ones(2) * kept, torch.ones(2))
    assert not inputs.numbers


def test_isinstance_sees_the_kind_of_number() -> None:
    inputs = NumberInputs()
    with inputs.tracing(()):
        whole, real = inputs.source("a", "a", lambda: 2), inputs.source("b", "b", lambda: 0.5)
        assert isinstance(whole, int) and isinstance(real, float) and not isinstance(real, int)
