"""A table of a pipeline's passes: the changes of each pass, and its checks."""

from __future__ import annotations

from pathlib import Path

from lightning_piper.common.units import Stopwatch, duration
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done
from lightning_piper.passes.trace import PassTrace
from lightning_piper.verify.report import Report, aligned
from lightning_piper.verify.static_check import check

HEAD = ("pass", "contract", "static check")
EXECUTED = ("vs the graph before", "vs one device, same microbatches")
COUNTED = ("added", "changed", "removed", "time")


class Passes:
    """A hook of `run_pipeline` that traces passes and runs the static check after every pass.

    `compile` judges some passes together with the next pass. This hook checks each of them.

    Attributes:
        watch: Measures the time of the checks.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Make a hook.

        Args:
            folder: See `PassTrace`.
        """
        self._trace, self._verdicts = PassTrace(folder), list[str]()
        self.watch = Stopwatch()

    def __call__(self, dag: TrainingDAG, done: Done) -> None:
        self._trace(dag, done)
        self._verdicts.append("failed")
        with self.watch:
            check(dag, final=done.by.finished)
        self._verdicts[-1] = "ok"

    def table(self, report: Report | None = None) -> list[str]:
        """Return a line for each pass that ran. With a report, lines include its comparisons."""
        executed = {(row.index, row.name): row for row in report.rows} if report is not None else {}
        lines = [(*HEAD, *(EXECUTED if report is not None else ()), *COUNTED)]
        for change, verdict in zip(self._trace.changes, self._verdicts, strict=True):
            done = change.done
            cells = [done.by.title, done.contract, verdict]
            if report is not None:
                row = executed.get((done.by.index, done.by.name))
                cells += ["-", "-"] if row is None else [str(row.before), str(row.single)]
            counts = (change.added, change.changed, change.removed)
            lines.append((*cells, *map(str, counts), duration(done.seconds)))
        return aligned(lines)
