"""One color for each kind of work, light enough for black text. An operation's color is in the class of its
instruction (`Instruction.color`).
"""

from __future__ import annotations

from lightning_piper.ops.base import INSTRUCTIONS
from lightning_piper.ops.communication.p2p import SendInstruction
from lightning_piper.ops.instruction import Collective

BOOKKEEPING = "#ececec"
COMMUNICATION = SendInstruction.color
_PASSES = {"F": "#9cc3e6", "B": "#f6b26b", "BI": "#ffd966", "BW": "#a9d18e"}
_OTHER_PASS = "#d5a6bd"


def color(kind: str) -> str:
    """Return the color of a kind of work as a hexadecimal RGB code, such as `#9cc3e6`.

    Args:
        kind: a pass (`F`), an instruction (`send`), or another kind in `simulate.Span.kind`. An unknown name
            in capitals gets the color of other passes, and any other unknown name the color of collectives.
    """
    if kind in _PASSES:
        return _PASSES[kind]
    if kind in INSTRUCTIONS:
        return INSTRUCTIONS[kind].color or BOOKKEEPING
    if kind == "recv":
        return COMMUNICATION
    return _OTHER_PASS if kind.isupper() else Collective.color


def rank(kind: str) -> tuple[int, str]:
    """Return the sort key of a kind in a legend: first F, B, BI and BW, then other passes, then operations."""
    known = list(_PASSES)
    return (known.index(kind) if kind in known else len(known) + (not kind.isupper()), kind)
