"""Terms of the loss and of logged values, and the weight of each microbatch and replica in them.

On the whole batch a term is T, and on part i it is T_i. T is the sum of w_i T_i, with one of these weights:

- samples: n_i / N. The term is a mean over samples.
- sum: 1. The term is a sum over samples.
- ratio: d(s_i) / d(sum of s). The term is a ratio whose denominator d is a function of sums s over the batch
  alone, such as a number of tokens that are not ignored.
- max, min: no weight. The term is the largest, or smallest, value of the batch.
- each: 1. The term is not a value, but the gradient with which the backward pass of each part starts. It is
  used if the backward pass is not linear in this gradient. Piper then weights the resulting gradients instead
  of the loss.

A device that has the sums s of the whole batch therefore knows the weight of every backward pass before it
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from lightning_piper.ir.values import Slice


class Weighing(StrEnum):
    """A way in which a term's values on parts of the batch become its value on the whole batch."""

    SAMPLES = "samples"
    SUM = "sum"
    RATIO = "ratio"
    MAX = "max"
    MIN = "min"
    EACH = "each"


@dataclass(frozen=True)
class Denominator:
    """A ratio's denominator as a function of the batch.

    Attributes:
        batch: Indices of the batch leaves that the denominator reads.
        buffers: Canonical names of the module's buffers that the denominator reads.
        run: Takes a list of these tensors and returns the sums s, each a tensor without dimensions.
        width: The number of sums plus one. The last column is the number of samples.
        of: Computes the denominator from a list of `width` float64 tensors of one shape. With `part=True`,
            the result is the divisor of the captured code on a part of the batch: in a guarded denominator, a
            factor that is 0 or not finite counts as 1.
        guarded: Whether the captured code replaces such factors by 1.
    """

    batch: tuple[int, ...]
    buffers: tuple[str, ...]
    run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
    width: int
    of: Callable[..., torch.Tensor]
    guarded: bool = False

    def counted(
        self, leaves: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], part: Slice
    ) -> torch.Tensor:
        """Return the sums s of samples `part` of a batch, and the number of samples, as float64 `[width]`.

        `run` must be code for `len(part)` samples.
        """
        given = [
            leaves[i][part.start : part.stop].contiguous() if leaves[i].ndim else leaves[i]
            for i in self.batch
        ]
        made = self.run([*given, *(buffers[name] for name in self.buffers)])
        device = leaves[0].device
        return torch.stack(
            [
                *(x.double() for x in made),
                torch.full((), float(len(part)), dtype=torch.float64, device=device),
            ]
        )


@dataclass(frozen=True)
class Term:
    """A term of the loss, or a logged value, and its weights.

    Attributes:
        weighing: How the values on parts of the batch are weighted.
        label: The weight in words.
        denominator: The denominator of a ratio; None for every other term.
    """

    weighing: Weighing
    label: str
    denominator: Denominator | None = None

    @property
    def folds(self) -> str:
        """How weighted values are combined: `sum`, `max` or `min`."""
        return self.weighing if self.weighing in (Weighing.MAX, Weighing.MIN) else "sum"
