"""Gives the parts of a batch the random numbers that the whole batch drew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Slice

# Draws through which no gradient flows, and which do not choose among the elements of a tensor.
_PLAIN = {
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal", "normal_",
    "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
    "uniform", "uniform_",
}  # fmt: skip


class OtherDraws(Exception):
    """The parts of a batch cannot get the random numbers of the whole batch, so the trial has no result. The message
    says why."""


class SameDraws(_torch.TorchDispatchMode):
    """A mode in which a part of a batch gets the random numbers that the whole batch drew for its samples.

    Args:
        size: The number of samples in the whole batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = size
        # for each draw of the whole batch: (function, its numeric arguments, the numbers that it drew)
        self._drawn: list[tuple[Any, list[int | float], torch.Tensor]] = []
        # whether the whole batch runs; the parts of this context; how many draws they have made
        self._first, self._parts, self._number = True, list[Slice](), 0

    @contextlib.contextmanager
    def over(self, parts: Sequence[Slice]) -> Iterator[None]:
        """Return a context in which the caller runs the step once for each of `parts`.

        The first context must be for the whole batch as a single part.

        Raises:
            OtherDraws: The parts cannot get the numbers of the whole batch.
        """
        self._parts, self._number = list(parts), 0
        with self:
            yield
        if not self._first and self._number != len(parts) * len(self._drawn):
            raise OtherDraws("the parts and the whole batch draw random numbers at different places")
        self._first = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a draw of the whole batch, or replace a draw of a part by the numbers of the part's samples.
        Raise an error if there are no such numbers. All other operations run unchanged.
        """
        result = func(*args, **(kwargs or {}))
        if not _torch.call_is_random(func, args, kwargs or {}):
            return result
        if func.overloadpacket.__name__ not in _PLAIN:
            raise OtherDraws(f"{func} cannot give a part the random numbers of the whole batch")
        numbers = [x for x in [*args, *(kwargs or {}).values()] if isinstance(x, int | float)]
        if self._first:
            self._drawn.append((func, numbers, result.clone()))
            return result
        if self._number == len(self._parts) * len(self._drawn):
            raise OtherDraws("a part draws more random numbers than the whole batch")
        part, at = divmod(self._number, len(self._drawn))
        self._number += 1
        known, limits, whole = self._drawn[at]
        if known is not func or limits != numbers:  # for example a limit that is the number of samples
            raise OtherDraws(f"{func} draws other random numbers in a part than in the whole batch")
        return result.copy_(self._of(whole, result.shape, self._parts[part]))

    def _of(self, whole: torch.Tensor, shape: torch.Size, part: Slice) -> torch.Tensor:
        """Return the numbers that the samples of `part` have in `whole`, a draw of the whole batch. The
        result has the given shape. Raise an error if no dimension of the draw counts the samples."""
        if whole.shape == shape:
            return whole
        dims = [d for d, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if a != b]
        if len(dims) != 1 or (whole.shape[dims[0]], shape[dims[0]]) != (self._size, len(part)):
            raise OtherDraws(f"random numbers of shape {tuple(shape)} do not belong to single samples")
        return whole.narrow(dims[0], part.start, len(part))
