"""What `verify` found, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_piper.errors import VerificationError
from lightning_piper.verify.cross_sample import CrossSampleDependence

Agreement = Literal["bitwise equal", "equal within rounding", "equal within the bound", "differs"]
Verdict = Literal["verified", "verified except", "executed", "NOT EQUIVALENT"]


@dataclass(frozen=True)
class Comparison:
    """How two outcomes of a step agree.

    Attributes:
        verdict: in words.
        distance: the largest difference within one gradient, metric or buffer, relative to its largest value: of that which comes
            nearest to its bound. (A gradient that is zero but for rounding, as of a bias of attention keys, moves by its own size.)
        first: its name; for `differs`, of the first one that is out of bounds.
        allowed: the distance that rounding alone explains for it.
    """

    verdict: Agreement
    distance: float = 0.0
    first: str | None = None
    allowed: float = 0.0

    def __str__(self) -> str:
        if self.verdict == "equal within rounding":
            return f"equal within {self.distance:.1e}"
        if self.verdict == "equal within the bound":
            return f"equal within {self.distance:.1e} (bound {self.allowed:.1e})"
        if self.verdict == "differs":
            return f"differs by {self.distance:.1e} ({self.first}; rounding explains {self.allowed:.1e})"
        return self.verdict


@dataclass(frozen=True)
class Row:
    """One rewrite of a report: a directive, or (`index` None) the capture before them or what the compiler does behind them.

    Attributes:
        before: compared with the DAG before the rewrite.
        single: compared with one device that accumulates eagerly over the same microbatches.
    """

    index: int | None
    name: str
    contract: str
    before: Comparison
    single: Comparison

    @property
    def ok(self) -> bool:
        """The rewrite kept its contract, and the result is that of one device on the same microbatches."""
        broken = {"bitwise": self.before.verdict != "bitwise equal", "bounded": self.before.verdict == "differs"}
        return not broken.get(self.contract, False) and self.single.verdict != "differs"


@dataclass(frozen=True)
class Report:
    """What `verify` found; `print` it.

    Attributes:
        rows: one for the capture, one for each directive, and one for the communication that the compiler eliminates from the
            finished graph, which is then the one that runs.
        whole: the last row's result compared with one device on the whole batch at once.
        causes: where that differs, why: what in the step looks across the samples of a batch, or draws or counts by microbatches.
            Also where it does not differ on this batch, what is not linear in the gradient of the loss, and may differ on others.
        couplings: the operations among them.
        executed: of a step that is not captured, or in part, which and why: of that, its border alone was checked, and what it
            computes was run.
    """

    rows: tuple[Row, ...]
    whole: Comparison = Comparison("bitwise equal")
    causes: tuple[str, ...] = ()
    couplings: tuple[CrossSampleDependence, ...] = ()
    executed: str = ""

    @property
    def verdict(self) -> Verdict:
        """`verified`: the program computes what one device computes on the whole batch. `verified except`: what one device computes
        on the same microbatches, which the step itself makes another result, or may. `executed`: the step, or the rest of
        it, runs as it is, and computes the mean of what one device computes of each part of the batch. `NOT EQUIVALENT`: neither,
        or a directive broke its contract."""
        if not all(row.ok for row in self.rows):
            return "NOT EQUIVALENT"
        if self.executed:
            return "executed"
        return "verified except" if self.causes or self.whole.verdict in ("equal within the bound", "differs") else "verified"

    @property
    def ok(self) -> bool:
        """The verdict is not `NOT EQUIVALENT`."""
        return self.verdict != "NOT EQUIVALENT"

    @property
    def conclusion(self) -> str:
        """The verdict; for `verified except` with its causes and the size of the difference, for `executed` with the reason."""
        if self.verdict == "executed":
            found = f"{self.whole} from one device on the whole batch"
            if self.whole.verdict == "bitwise equal":
                found = "the same as of one device on the whole batch"
            return f"executed, not proved: the gradients, which are means of those of its parts, are {found}; {self.executed}"
        if self.verdict != "verified except":
            return self.verdict
        causes = ", ".join(self.causes) or "an operation that was not found"
        return f"verified except {causes}: {self.whole} from one device on the whole batch"

    def __str__(self) -> str:
        head = ("directive", "contract", "vs the graph before", "vs one device, same microbatches")
        table = [head, *((_title(r), r.contract, str(r.before), str(r.single)) for r in self.rows)]
        return "\n".join([*aligned(table), *self.ending])

    @property
    def ending(self) -> list[str]:
        """The lines after the table: notes on cross-sample dependences, and the conclusion."""
        return [*(f"note: {coupling}" for coupling in self.couplings), self.conclusion]

    def require(self) -> None:
        """Raise a VerificationError if the verdict is `NOT EQUIVALENT`."""
        if not self.ok:
            raise VerificationError(f"the program does not compute what one device computes:\n{self}")


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with columns as wide as their cells."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]


def _title(row: Row) -> str:
    return row.name if row.index is None else f"{row.index} {row.name}"
