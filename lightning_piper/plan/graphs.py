"""The passes that a plan does not allow as graphs of an accelerator, and the values that always lie in the same
memory.

A graph reads and writes the same memory in every replay. A copy brings its inputs there, and the memory of its
outputs stays allocated. So a pass runs without a graph if a graph would keep memory that the program frees on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_piper.plan.instructions import AllGatherInstruction, HostCopy, Instruction, Run
from lightning_piper.plan.plan import Plan


def kept_out(plan: Plan) -> dict[int, str]:
    """Return the passes that may not be graphs: node of the `Run` -> reason."""
    gathered = {x.into for x in plan.instructions if isinstance(x, AllGatherInstruction) and not x.kept}
    fetched = _written(x for x in plan.instructions if isinstance(x, HostCopy) and not x.to_host)
    stored = {r.slot for x in plan.instructions if isinstance(x, HostCopy) and x.to_host for r in x.reads}
    found: dict[int, str] = {}
    first: dict[object, int] = {}  # pass and samples -> node of its first run
    again: set[int] = set()  # slots of recomputed passes
    for run in (x for x in plan.instructions if isinstance(x, Run)):
        reads, writes = {read.slot for read in run.reads}, {slot for slot in run.writes if slot is not None}
        recomputed = first.setdefault((run.key, run.slice), run.node) != run.node
        again |= writes if recomputed else set()
        if reads & gathered:
            found[run.node] = "read parameters that are gathered for each use"
        elif recomputed or reads & again:
            found[run.node] = "recompute values, or read recomputed values"
        elif reads & fetched or writes & stored:
            found[run.node] = "have values in host memory"
        elif run.degrees:
            found[run.node] = "work on a number of rows that is known only in the step"
    return found


def at_fixed_addresses(plan: Plan) -> frozenset[int]:
    """Return the slots of gathered buckets whose memory the device keeps between steps."""
    return frozenset(_written(x for x in plan.instructions if isinstance(x, AllGatherInstruction) and x.kept))


def _written(instructions: Iterable[Instruction]) -> set[int]:
    return {slot for x in instructions for slot in x.writes if slot is not None}
