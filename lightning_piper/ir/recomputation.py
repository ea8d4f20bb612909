"""The part of a region's forward pass that its backward pass recomputes instead of saving it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recomputation:
    """A request to recompute forward results in the backward passes of some regions.

    Attributes:
        filter: Selects the regions by their tags.
        keep: Either patterns of operation names, whose results are saved; or a memory budget for torch's
            partitioner as a fraction. With 1, it saves the values that make the backward pass fastest; with
            0, it saves the region's inputs only.
        chosen: Region -> names of the results that a fraction saves. They are chosen at the first size, so
            that all sizes of the step are cut in the same way.
    """

    filter: Mapping[str, object]
    keep: tuple[str, ...] | float
    chosen: dict[int, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)
