"""Tables of our figures next to the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def show(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table. Numbers are rounded to three digits."""
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for row in rows:
        print(
            "| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row) + " |", flush=True
        )


def gain(slow: float, fast: float) -> float:
    """Return how many percent more steps run in the same time if a step takes `fast` instead of `slow`."""
    return 100 * (slow / fast - 1)


def percent(found: float) -> str:
    return f"{found:+.1f} %"


def compared(found: float, paper: float) -> list[str]:
    """Return our percentage, the paper's, and the difference in points."""
    return [percent(found), percent(paper), f"{found - paper:+.1f}"]
