"""One colour for each kind of work, light enough for black text on it."""

from __future__ import annotations

COMMUNICATION = "#c9c9c9"
BOOKKEEPING = "#ececec"
_COLOURS = {
    "F": "#9cc3e6", "B": "#f6b26b", "BI": "#ffd966", "BW": "#a9d18e", "send": COMMUNICATION, "recv": COMMUNICATION,
}  # fmt: skip
_OTHER_PASS, _COLLECTIVE = "#d5a6bd", "#b4a7d6"
_BOOKKEEPING_OPS = ("add", "concat", "cut", "deliver", "merge", "pack", "report")


def colour(kind: str) -> str:
    """Of a pass or an operation, as `simulate.Span.kind` names them."""
    if kind in _COLOURS:
        return _COLOURS[kind]
    if kind in _BOOKKEEPING_OPS:
        return BOOKKEEPING
    return _OTHER_PASS if kind.isupper() else _COLLECTIVE


def rank(kind: str) -> tuple[int, str]:
    """Where a kind stands in a legend: known passes, other passes, operations."""
    known = [k for k in _COLOURS if k.isupper()]
    return (known.index(kind) if kind in known else len(known) + (not kind.isupper()), kind)
