"""The report of `verify`."""

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
    """The agreement of two outcomes of a step.

    Attributes:
        verdict: The agreement in words.
        distance: The largest difference within one gradient, metric or buffer, relative to its largest value.
            It is taken from the result that comes nearest to its bound. (A gradient that is zero except for
            rounding, as of a bias of attention keys, moves by its own size.)
        first: The name of the result with this distance; None if all results are bitwise equal. If the
            verdict is `differs`, it is the first result out of bounds.
        allowed: The distance that rounding explains for this result. For `equal within the bound` it includes
            the error bounds of approximate operations.
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
class ReportRow:
    """One rewrite in a report.

    It is a directive or, if `index` is None, the capture before all directives or a compiler pass after them.

    Attributes:
        before: The comparison with the DAG before the rewrite.
        single: The comparison with one device that accumulates over the same microbatches.
    """

    index: int | None
    name: str
    contract: str
    before: Comparison
    single: Comparison

    @property
    def ok(self) -> bool:
        """Whether the rewrite kept its contract and agrees with one device on the same microbatches."""
        broken = {
            "bitwise": self.before.verdict != "bitwise equal",
            "bounded": self.before.verdict == "differs",
        }
        return not broken.get(self.contract, False) and self.single.verdict != "differs"


@dataclass(frozen=True, repr=False)
class Report:
    """The findings of `verify`. Print it to read them.

    Attributes:
        rows: One for the capture, one for each directive, and one for the elimination of communication from
            the finished graph.
        whole: The comparison of the last row's result with one device on the whole batch at once.
        causes: The reasons why `whole` differs: operations that mix samples, draw random numbers or change
            buffers by microbatch. A backward pass that is not linear in the gradient of the loss is a cause
            even if this batch shows no difference, because other batches may.
        couplings: The operations among the causes.
        executed: The reason why a step is not captured, or only in part; empty for a captured step. With
            a reason, the static check covers only the nodes around the uncaptured code, and the comparisons
            run this code.
    """

    rows: tuple[ReportRow, ...]
    whole: Comparison = Comparison("bitwise equal")
    causes: tuple[str, ...] = ()
    couplings: tuple[CrossSampleDependence, ...] = ()
    executed: str = ""

    def __repr__(self) -> str:
        return f"<Report: {self.verdict}, {len(self.rows)} rewrites>"

    @property
    def verdict(self) -> Verdict:
        """The verdict in words.

        `verified`: the program computes what one device computes on the whole batch. `verified except`: it
        computes what one device computes on the same microbatches, but the step itself makes this differ from
        the whole batch, or may. `executed`: the step, or a part of it, runs uncaptured. The program computes
        the mean of one device's results on each part of the batch. `NOT EQUIVALENT`: the program computes
        neither, or a directive broke its contract.
        """
        if not all(row.ok for row in self.rows):
            return "NOT EQUIVALENT"
        if self.executed:
            return "executed"
        return (
            "verified except"
            if self.causes or self.whole.verdict in ("equal within the bound", "differs")
            else "verified"
        )

    @property
    def ok(self) -> bool:
        """Whether the verdict is not `NOT EQUIVALENT`."""
        return self.verdict != "NOT EQUIVALENT"

    @property
    def conclusion(self) -> str:
        """The verdict as a text. After `verified except` come the causes and the size of the difference,
        after `executed` the size of the difference and the reason.
        """
        if self.verdict == "executed":
            found = f"{self.whole} from one device on the whole batch"
            if self.whole.verdict == "bitwise equal":
                found = "the same as on one device with the whole batch"
            return (
                f"executed, not proved: the gradients, averaged over the parts of the batch, are {found}; "
                f"{self.executed}"
            )
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
            raise VerificationError(
                f"the program does not compute what one device computes:\n{self}\nIf you wrote a directive or an "
                "operation, correct it. Otherwise, report this [PIPER-V001]"
            )


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with columns as wide as their cells."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]


def _title(row: ReportRow) -> str:
    return row.name if row.index is None else f"{row.index} {row.name}"
