"""`dispatch`, `combine` and `grouped_linear` on one device."""

from __future__ import annotations

import pytest
import torch

import lightning_piper as piper
from lightning_piper import grouped_matmul
from lightning_piper.annotate import numbering
from lightning_piper.errors import CaptureError
from lightning_piper.routing import exchanging

SIZES = ([3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4])


def operands(
    sizes: list[int], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 8, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), 16, 8, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.tensor(sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_linear_is_one_product_for_each_expert(sizes: list[int], dtype: torch.dtype) -> None:
    """Bitwise, forward and backward, and gradients lie as parameters do; an expert without rows gets a
    gradient of zeros.
    """
    x, weight, counts = operands(sizes, dtype)
    found = piper.grouped_linear(x, weight, counts)
    found.square().sum().backward()
    meant_x, meant_weight = x.detach().clone(), weight.detach().clone()
    parts, gradients, start = [], [], 0
    for e, n in enumerate(sizes):
        rows, w = meant_x[start : start + n].requires_grad_(), meant_weight[e].clone().requires_grad_()
        y = torch.nn.functional.linear(rows, w)
        y.square().sum().backward()
        parts.append(y)
        gradients.append((rows.grad, w.grad))
        start += n
    assert torch.equal(found, torch.cat(parts))
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, torch.cat([g for g, _ in gradients]))  # type: ignore[misc]
    assert weight.grad.is_contiguous()
    for e, (_, g) in enumerate(gradients):
        assert g is not None
        assert torch.equal(weight.grad[e], torch.zeros_like(weight[e]) if sizes[e] == 0 else g)


def test_grouped_linear_passes_gradcheck() -> None:
    x, weight, counts = operands([2, 0, 1])
    assert torch.autograd.gradcheck(lambda a, b: piper.grouped_linear(a, b, counts), (x, weight))


def test_the_operations_are_sound() -> None:
    """Their shape rules, autograd and aliasing agree with what they do, by torch's own checks."""
    x, weight, counts = operands([2, 0, 3])
    torch.library.opcheck(grouped_matmul._grouped_mm, (x, weight.transpose(1, 2), counts))
    torch.library.opcheck(
        grouped_matmul._grouped_outer, (x.detach(), torch.randn(5, 4, dtype=torch.float64), counts)
    )


def test_grouped_linear_under_autocast() -> None:
    x, weight, counts = operands([3, 1], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert piper.grouped_linear(x, weight, counts).dtype is torch.bfloat16


def test_wrong_counts_are_noticed() -> None:
    x, weight, _ = operands([3, 1])
    with pytest.raises(ValueError, match="add up to 5, but x has 4 rows"):
        piper.grouped_linear(x, weight, torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="counts"):
        piper.grouped_linear(x, weight, torch.tensor([5, -1]))
    with pytest.raises(CaptureError, match=r"grouped_linear: counts are torch\.float32"):
        piper.grouped_linear(x, weight, torch.tensor([3.0, 1.0]))


def test_nothing_happens_outside_of_a_capture() -> None:
    tokens, counts = torch.randn(4, 3, requires_grad=True), torch.tensor([1, 3])
    rows, sizes = piper.dispatch(tokens, counts)
    assert rows is tokens and sizes is counts
    assert piper.combine(rows) is tokens
    boxes = torch.randn(2, 3, 4)
    assert piper.dispatch(boxes) is boxes


def test_in_a_capture_they_are_identities_with_identity_gradients() -> None:
    tokens, counts = torch.randn(4, 3, requires_grad=True), torch.tensor([1, 3])
    with numbering(), exchanging(()):
        rows, sizes = piper.dispatch(tokens, counts)
        out = piper.combine(rows * 2)
    assert torch.equal(rows, tokens) and torch.equal(sizes, counts) and torch.equal(out, tokens * 2)
    out.backward(torch.arange(12.0).view(4, 3))
    assert torch.equal(tokens.grad, torch.arange(12.0).view(4, 3) * 2)  # type: ignore[arg-type]


def test_a_division_that_does_not_fit_is_refused() -> None:
    with (
        numbering(),
        exchanging((2,)),
        pytest.raises(CaptureError, match="3 experts cannot be divided evenly over 2 devices"),
    ):
        piper.dispatch(torch.randn(4, 3), torch.tensor([1, 1, 2]))
