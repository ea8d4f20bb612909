"""Terms of the loss and of logged values: what a microbatch, and a replica, weighs in each.

On the whole batch a term is T, on part i of it T_i, and T is the sum of w_i T_i, where the weights are

    samples    n_i / N                 a mean over samples
    sum        1                       a sum over samples
    ratio      d(s_i) / d(sum of s)    a ratio whose denominator d is a function of sums s over the batch alone, such as a number
                                       of tokens that are not ignored
    max, min   none                    the largest, or smallest, value of the batch
    each       1                       no value, but the gradient with which the loss of each part enters a backward pass that is
                                       not linear in it; there, gradients are weighed in the place of the loss

so that whoever knows the sums s of the whole batch can give every backward pass its weight before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from lightning_piper.ir.values import Slice


class Weighing(StrEnum):
    """How a term is put together from its values on parts of the batch."""

    SAMPLES = "samples"
    SUM = "sum"
    RATIO = "ratio"
    MAX = "max"
    MIN = "min"
    EACH = "each"


@dataclass(frozen=True)
class Denominator:
    """The denominator of a ratio, as a function of the batch.

    Attributes:
        batch: indices of the batch leaves that it reads.
        buffers: the module's buffers that it reads, by canonical name.
        run: takes a list of these tensors; gives the sums s, each a tensor without dimensions.
        width: how many these are, and one more: the number of samples.
        of: the denominator, from a list of `width` float64 tensors of one shape. With `part`, that by which the captured code
            divides on a part of the batch: where nothing counts there, it takes 1 for a sum that is 0.
        guarded: the captured code does so, for without anything that counts the denominator is 0 or no number.
    """

    batch: tuple[int, ...]
    buffers: tuple[str, ...]
    run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
    width: int
    of: Callable[..., torch.Tensor]
    guarded: bool = False

    def counted(self, leaves: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], part: Slice) -> torch.Tensor:
        """The sums of the samples `part` of a batch, float64 `[width]`. The code is that of a batch of as many samples."""
        given = [leaves[i][part.start : part.stop].contiguous() if leaves[i].ndim else leaves[i] for i in self.batch]
        made = self.run([*given, *(buffers[name] for name in self.buffers)])
        device = leaves[0].device
        return torch.stack([*(x.double() for x in made), torch.full((), float(len(part)), dtype=torch.float64, device=device)])


@dataclass(frozen=True)
class Term:
    """How one term of the loss, or a logged value, is weighed.

    Attributes:
        weighing: see above.
        label: what the weight is, for texts.
        denominator: of a ratio.
    """

    weighing: Weighing
    label: str
    denominator: Denominator | None = None

    @property
    def folds(self) -> str:
        """How weighted values become one: `sum`, `max` or `min`."""
        return self.weighing if self.weighing in (Weighing.MAX, Weighing.MIN) else "sum"
