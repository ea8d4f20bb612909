"""Test by a trial whether an operation of a backward pass is linear in some of its arguments.

The operation runs alone on random numbers that differ by many orders of magnitude. A linear operation maps 0
to 0 and sums to sums. It also maps scaled inputs to scaled results: the factors are 2, -1, a very large
factor and a very small factor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lightning_piper.capture.torch_private import _torch

LINEAR, STILL = "linear", "still"  # verdicts of `try_linearity`
MANY = 1 << 22  # the largest total number of elements in the arguments of a trial
FEW = 4  # the largest size of a dimension in a trial of an elementwise operation
_known: dict[str, str | None] = {}  # an operation with its arguments and specs -> the verdict


def try_linearity(node: Node, moving: Collection[Node]) -> str | None:
    """Run an operation on random inputs to find out whether it is linear.

    Args:
        moving: the arguments in which the operation should be jointly linear.

    Returns:
        `LINEAR` if the operation is linear, or always returns floating-point zeros. `STILL` if its result does not depend on
        these arguments. None if the operation is not linear, or if the trial is not possible.
    """
    names = {x: f"%{i}{x in moving}{_spec(x)}" for i, x in enumerate(node.all_input_nodes)}
    key = f"{node.target} {map_arg((node.args, dict(node.kwargs)), names.__getitem__)}"
    if key not in _known:
        try:
            with _torch.with_data(), torch.no_grad():
                _known[key] = _LinearityTrial(node, moving).verdict()
        # the operation does not accept random numbers, or needs a device that this process lacks
        except Exception:
            _known[key] = None
    return _known[key]


def _spec(x: Node) -> str:
    value = x.meta.get("val")
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}" if isinstance(value, torch.Tensor) else ""


class _LinearityTrial:
    """A trial of one operation. The arguments in `moving` get several random values. Every other argument
    keeps one random value.

    Raises:
        NotImplementedError: the operation draws random numbers, or its arguments are too large.
    """

    def __init__(self, node: Node, moving: Collection[Node]) -> None:
        target: Any = node.target
        self._node, self._generator = node, torch.Generator().manual_seed(0)
        self._few = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        if _torch.is_random(node) or sum(self._shape(x).numel() for x in node.all_input_nodes) > MANY:
            raise NotImplementedError
        self._still = {x: self._drawn(x) for x in node.all_input_nodes if x not in moving}
        self._moving = list(moving)

    def verdict(self) -> str | None:
        """Run the operation on several values of the moving arguments. Return `LINEAR`, `STILL` or None, as
        `try_linearity` does."""
        one, other = self._spread(), self._spread()
        zero, of_one, of_other = (
            self._outputs_of([x * 0 for x in one]),
            self._outputs_of(one),
            self._outputs_of(other),
        )
        # The result is the same for all values of the moving arguments.
        if all(
            torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(zero, of_one, of_other, strict=True)
        ):
            return LINEAR if all(x.is_floating_point() and not x.count_nonzero() for x in zero) else STILL
        if any(not (x.is_floating_point() or x.is_complex()) or x.count_nonzero() for x in zero):
            return None
        # Powers of two, so that scaling causes no rounding. float16 has a smaller range.
        step = 2.0 ** (8 if any(x.dtype == torch.float16 for x in one) else 60)
        for factor in (2.0, step, 1 / step, -1.0):
            if not all(
                map(_alike, self._outputs_of([x * factor for x in one]), [x * factor for x in of_one])
            ):
                return None
        both = self._outputs_of([x + y for x, y in zip(one, other, strict=True)])
        return (
            LINEAR if all(map(_near, both, [x + y for x, y in zip(of_one, of_other, strict=True)])) else None
        )

    def _outputs_of(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the operation on these values of the moving arguments, and return the resulting tensors."""
        given = {**self._still, **dict(zip(self._moving, values, strict=True))}
        args, kwargs = map_arg((self._node.args, dict(self._node.kwargs)), lambda x: given[x].clone())
        target: Any = self._node.target
        return [x for x in _torch.tree_leaves(target(*args, **kwargs)) if isinstance(x, torch.Tensor)]

    def _shape(self, x: Node) -> torch.Size:
        shape = x.meta["val"].shape
        return torch.Size(min(size, FEW) for size in shape) if self._few else shape

    def _drawn(self, x: Node) -> torch.Tensor:
        """Return a value for the argument `x`: random numbers between 0.1 and 0.9, which most functions
        accept.

        Integers are 0, which is a valid index. Bools are random.
        """
        like = x.meta["val"]
        drawn = torch.rand(self._shape(x), generator=self._generator) * 0.8 + 0.1
        if like.dtype == torch.bool:
            return (drawn > 0.5).to(like.device)
        return (drawn if like.is_floating_point() or like.is_complex() else torch.zeros_like(drawn)).to(
            like.device, like.dtype
        )

    def _spread(self) -> list[torch.Tensor]:
        """Return random values for the moving arguments, with magnitudes that differ by many powers of
        two."""
        found = []
        for x in self._moving:
            like, shape = x.meta["val"], self._shape(x)
            span = 4 if like.dtype == torch.float16 else 20
            exponent = torch.randint(-span, span + 1, shape, generator=self._generator)
            drawn = torch.randn(shape, generator=self._generator) * 2.0**exponent
            found.append(drawn.to(like.device, like.dtype))
        return found


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two results agree up to a small relative error.

    Multiplying by a power of two causes no rounding, but some kernels vary the order of additions.
    """
    return torch.allclose(x, y, rtol=1e-3, atol=0.0)


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two results agree up to a small error relative to the largest element."""
    largest = max((float(each.abs().max()) for each in (x, y) if each.numel()), default=0.0)
    return torch.allclose(x, y, rtol=0.0, atol=largest * 64 * torch.finfo(x.dtype).eps)
