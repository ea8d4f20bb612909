"""Common parts of the charts: rows, and the text in a box."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_piper.simulate import Simulation, Span

Row = tuple[int, str]  # (device, stream)

# The index of each tag in a chunk's label, such as 0 and 3 in `F[PP=0,MB=3]`.
_INDEX = re.compile(r"=([^,\]]*)(?=[,\]])")


def rows_of(simulation: Simulation) -> dict[Row, list[Span]]:
    """Return row -> its spans that take time, in the order of the timeline.

    Rows are sorted by device. Of each device, streams with chunks come first, then streams are in
    alphabetical order. A stream without a span that takes time has no row.
    """
    rows: dict[Row, list[Span]] = {}
    for span in simulation.timeline:
        if span.end > span.start:
            rows.setdefault((span.device, span.stream), []).append(span)
    return dict(
        sorted(rows.items(), key=lambda row: (row[0][0], not any(is_chunk(s) for s in row[1]), row[0][1]))
    )


def is_chunk(span: Span) -> bool:
    """Return whether a span is a chunk. The kind of a chunk is its pass, in capitals (`F`). The kind of any
    other node is in small letters (`send`)."""
    return span.kind.isupper()


def indices(span: Span) -> list[str]:
    """Return the indices of a chunk's tags as texts, in order: "0" and "3" of `F[PP=0,MB=3]`."""
    return _INDEX.findall(span.label)


def distinct_names(spans: Sequence[Span]) -> list[str]:
    """Return a short name for each of the chunks: its pass and the indices of its tags, without indices that
    all chunks share.

    For example, `F[PP=0,MB=3]` is `F3` if all chunks have `PP=0`, and `F0.3` among chunks of several stages.
    A single chunk has all its indices.
    """
    found = [indices(span) for span in spans]
    depth = max((len(x) for x in found), default=0)
    shared = {k for k in range(depth) if len({tuple(x[k : k + 1]) for x in found}) == 1 and len(found) > 1}
    return [
        span.kind + ".".join(x[k] for k in range(len(x)) if k not in shared)
        for span, x in zip(spans, found, strict=True)
    ]
