"""Objects that are sent between processes arrive whole, and their large tensors are not pickled."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_piper.processes.objects import APART, SMALL, dumps, of_outline, outlined

LARGE = APART // 4


def moved(value: Any) -> tuple[Any, int, int]:
    """The object that arrives, the bytes of its outline, and the number of tensors that are sent beside it."""
    outline, tensors = outlined(value)
    found, rooms = of_outline(outline)
    assert [(x.dtype, x.shape) for x in tensors] == [(x.dtype, x.shape) for x in rooms]
    for room, x in zip(rooms, tensors, strict=True):
        room.copy_(x)
    return found, len(outline), len(tensors)


def test_a_state_arrives_whole_and_its_large_tensors_are_not_pickled() -> None:
    state = {
        n: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(8, LARGE),
            "more": [torch.randn(LARGE).to(torch.bfloat16), n, "text"],
        }
        for n in range(3)
    }
    state[0]["same"] = state[0]["exp_avg"]
    found, nbytes, count = moved(state)
    assert (nbytes < 4 * APART, count) == (True, 3)
    assert found[0]["same"] is found[0]["exp_avg"]
    for n, own in state.items():
        assert found[n]["more"][1:] == own["more"][1:]
        assert torch.equal(found[n]["more"][0], own["more"][0])
        assert all(torch.equal(found[n][key], own[key]) for key in ("step", "exp_avg"))
    assert len(pickle.dumps(state)) > 3 * 8 * APART, "as it would be without it"


@pytest.mark.parametrize("make, beside", [
    (lambda x: x[LARGE // 2 :], 1),
    (lambda x: x.t(), 0),
    (lambda x: torch.nn.Parameter(x), 1),
    (lambda x: x.clone().requires_grad_(), 0),
    (lambda x: torch.complex(x, x).conj(), 0),
    (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), 0),
    (lambda x: x.to_sparse(), 2),
], ids=["view", "transposed", "parameter", "with grad", "conjugate", "quantized", "sparse"])  # fmt: skip
def test_tensors_of_every_kind_arrive_as_they_are(make: Any, beside: int) -> None:
    x = make(torch.randn(LARGE, 4))
    (y,), _, count = moved([x])
    assert count == beside
    assert (type(y), y.dtype, y.shape, y.requires_grad, y.layout) == (
        type(x),
        x.dtype,
        x.shape,
        x.requires_grad,
        x.layout,
    )
    dense = [z.dequantize() if z.is_quantized else z.to_dense() for z in (x.detach(), y.detach())]
    assert torch.equal(*dense)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


def test_small_tensors_of_every_dtype_are_the_same_after_a_short_pickle() -> None:
    numbers = {dtype: torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    for dtype, found in pickle.loads(dumps(numbers)).items():
        assert (found.dtype, found.shape) == (dtype, numbers[dtype].shape)
        assert found.view(torch.uint8).tolist() == numbers[dtype].view(torch.uint8).tolist()
        found[0] = 0  # the memory can be written
    assert 4 * len(dumps(numbers)) < len(pickle.dumps(numbers))


def test_other_tensors_have_the_pickle_of_torch() -> None:
    marked = torch.ones(2)
    marked.mark = "kept"  # type: ignore[attr-defined]
    others = [torch.ones(SMALL), torch.ones(0, 3), torch.nn.Parameter(torch.ones(2)), marked]
    found = pickle.loads(dumps(others))
    assert [(type(x), x.shape) for x in found] == [(type(x), x.shape) for x in others]
    assert found[3].mark == "kept"
