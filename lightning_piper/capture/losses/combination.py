"""The rule by which a node's value on the whole batch is computed from its values on parts of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightning_piper.capture.losses.denominators import Expression


class Reduction(StrEnum):
    """How Piper computes a node's value on the whole batch from its values on parts of the batch.

    Attributes:
        WHOLE: the value does not depend on the batch.
        ROWS: the value has a sample dimension.
        LINEAR: the whole batch's value is the weighted sum of the parts' values.
        MIXED: the value is a sum of linear and whole values with different denominators.
        MAX, MIN: the maximum or minimum of the parts' values.
        OTHER: the value combines in none of these ways, or Piper does not know how it combines.
    """

    WHOLE = "whole"
    ROWS = "rows"
    LINEAR = "linear"
    MIXED = "mixed"
    MAX = "max"
    MIN = "min"
    OTHER = "other"


WHOLE, ROWS, LINEAR, MIXED, MAX, MIN, OTHER = Reduction


@dataclass(frozen=True)
class Combination:
    """How the whole batch's value of a node follows from its values on parts of the batch.

    Attributes:
        reduction: how the parts combine.
        denominator: an expression of sums over the batch (see `ir.terms`). If `reduction` is `ROWS`, it
            divides each row (None: 1). If `reduction` is `LINEAR`, a part's weight is the part's share of it.
            None for other reductions.
    """

    reduction: Reduction
    denominator: Expression | None = None
