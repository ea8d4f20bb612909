"""What of a region's forward pass its backward pass computes again instead of keeping it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recomputation:
    """Of the regions with these tags.

    Attributes:
        filter: selects regions by their tags.
        keep: patterns of names of operations whose results are kept; or a fraction of the memory that torch's partitioner would
            have kept values take, between those that take the least time (1) and the region's inputs alone (0).
        chosen: by region, the names of what a fraction keeps, as chosen at the first size: the step is cut alike at all of them.
    """

    filter: Mapping[str, object]
    keep: tuple[str, ...] | float
    chosen: dict[int, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)
