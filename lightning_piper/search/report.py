"""The result of a search, as an object and as text: the best candidate, and why other candidates are not the
best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from lightning_piper.common.units import counted, duration
from lightning_piper.search.estimate import Estimate
from lightning_piper.search.space import Candidate, Space
from lightning_piper.simulate.durations import Number

OFTEN = 0.1  # seconds between two lines about the progress of a search
_WHY = {  # reason in `Found.cut` -> its text
    "bound": "excluded, because a bound shows that they are not better",
    "memory": "excluded, because they do not fit",
    "left": "not examined when the budget was used up",
}
# The order of the passes in a program of one stage, by the name of the schedule.
_TURNS = {"gpipe": "all forward passes first", "one_f_one_b": "alternating forward and backward passes"}


@dataclass(frozen=True)
class CandidateRow:
    """A row of the table: a candidate, its estimate, and why it is not the best one. For the best candidate,
    `reason` is empty."""

    candidate: Candidate
    estimate: Estimate
    reason: str


@dataclass(frozen=True, repr=False)
class Found:
    """A result of a search. `print` shows it.

    Attributes:
        best: The best candidate that was found.
        estimate: The time and memory of `best`.
        gap: How much more `best` may need than the best candidate of the space, as a share; 0 if it is proved
            to be the best. Infinite if the only lower bound that the search knows is 0.
        table: Up to twenty of the best candidates that fit, and up to five better candidates that do not fit.
            Candidates that differ only in their cuts share a row. In a large space these are the best
            candidates that the budget reached.
        size: Number of candidates of the space.
        cut: Reason ("bound", "memory" or "left") -> number of candidates that were not estimated.
        evaluated: Number of candidates whose time was estimated in the proof. `size` is the sum of this
            number and the numbers in `cut`.
        space: The space that was searched.
    """

    best: Candidate
    estimate: Estimate
    gap: Number
    table: tuple[CandidateRow, ...]
    size: int
    cut: Mapping[str, int]
    evaluated: int
    space: Space

    @property
    def less(self) -> Number:
        """How much less than `best` the best candidate of the space may need, as a share: 0.5 if `gap` is
        1."""
        return 1 - 1 / (1 + self.gap) if self.gap else 0

    def __repr__(self) -> str:
        return f"<Found: {described(self.best)}; of {counted(self.size, 'candidate')}>"

    def __str__(self) -> str:
        """Return the best candidate, the table, and how many candidates were estimated or excluded."""
        if not self.gap:
            proved = "no other candidate is better"
        elif math.isinf(self.gap):
            proved = "the budget ended before any bound on better candidates"
        else:
            proved = f"at most {float(self.gap):.2%} from the best candidate"
        lines = [
            f"{described(self.best, len(self.space.workload.blocks))}",
            f"{_needs(self.estimate)}; {proved}",
            "",
        ]
        head = ("time", "bubble", "exposed", "memory", "program", "why not")
        rows = [head] + [
            (
                duration(float(row.estimate.time), 4),
                f"{row.estimate.bubble:.1%}",
                f"{row.estimate.exposed_share:.1%}",
                size(max(row.estimate.memory)),
                described(row.candidate),
                row.reason,
            )
            for row in self.table
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        lines += ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        counts = [
            (self.evaluated, "estimated one by one"),
            *((n, _WHY[why]) for why, n in sorted(self.cut.items())),
        ]
        lines += ["", f"{counted(self.size, 'candidate')}:", *(f"  {n:,} {what}" for n, what in counts if n)]
        return "\n".join(lines)


def described(candidate: Candidate, blocks: int | None = None) -> str:
    """Return a candidate as text: "one_f_one_b, 4 stages on 4 ranks, 8 microbatches; 2 replicas at ZeRO 1".

    If `blocks` is the number of blocks of the model, the text ends with the number of blocks of each stage.
    If there is one stage, the text names neither a schedule nor the blocks.
    """
    layout = candidate.layout
    several, m = layout.stages > 1, layout.microbatches
    microbatches = "1 microbatch" if m == 1 else f"{m} microbatches"
    parts = (
        [f"{layout.schedule}, {layout.stages} stages on {layout.ranks} ranks, {microbatches}"]
        if several
        else []
    )
    if layout.replicas > 1:
        apart = " on adjacent devices" if several and layout.data_inside else ""
        within = f" in groups of {layout.shard_size}" if layout.groups > 1 else ""
        parts.append(f"{layout.replicas} replicas{within} at ZeRO {_levels(candidate)}{apart}")
    if layout.tensor > 1:
        parts.append(f"tensor-parallel over {layout.tensor} devices")
    if layout.routed > 1:
        parts.append(f"experts sharded over {layout.routed} devices")
    if several:
        parts += _less_kept(candidate)
    else:
        parts = parts or ["one device"]
        parts += [f"{microbatches}, {_TURNS[layout.schedule]}"] if m > 1 else []
        parts += ["recomputed"] if candidate.recomputed else ["offloaded"] if candidate.offloaded else []
    if blocks is not None and several:
        parts.append("blocks " + "+".join(str(j - i) for i, j in candidate.spans(blocks)))
    return "; ".join(parts)


def _less_kept(candidate: Candidate) -> list[str]:
    """Return which stages recompute and offload, as texts such as "the first 2 stages recompute"; empty if
    none do."""
    found: list[str] = []
    for n, what in ((candidate.recomputed, "recompute"), (candidate.offloaded, "offload")):
        which = "next" if found else "first"
        if n:
            found.append(f"the {which} stage {what}s" if n == 1 else f"the {which} {n} stages {what}")
    return found


def _levels(candidate: Candidate) -> str:
    """Return the ZeRO levels as text: `1` if all stages have level 1. `3+1 (2+6 stages)`: the first two
    stages have level 3, and the other six stages have level 1."""
    runs = [(level, sum(1 for _ in run)) for level, run in groupby(candidate.levels)]
    levels, stages = ("+".join(map(str, column)) for column in zip(*runs, strict=True))
    return levels if len(runs) == 1 else f"{levels} ({stages} stages)"


def _needs(estimate: Estimate) -> str:
    return (
        f"{duration(float(estimate.time), 4)} a step, bubble {estimate.bubble:.1%}, exposed communication "
        f"{estimate.exposed_share:.1%}, {size(max(estimate.memory))} on the fullest device"
    )


def size(nbytes: Number) -> str:
    """Return a number of bytes as text with a readable unit and four digits: "1.5 GiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def exact_size(nbytes: Number) -> str:
    """Return a number of bytes, rounded up to an integer, as text: "157248 bytes (153.6 KiB)". The text in brackets
    is a little more than the number if four digits are not enough."""
    exact = math.ceil(nbytes)
    if exact < 1024:
        return f"{exact} bytes"
    unit = 1024 ** (min(exact.bit_length() - 1, 40) // 10)
    digits = 10 ** max(0, 4 - len(str(exact // unit)))
    return f"{exact} bytes ({size(-(-exact * digits // unit) * unit / digits)})"


def search_progress(say: Callable[[str], None], objective: str) -> Callable[[int, float, float], None]:
    """Return a function for `best_of(progress=...)` that calls `say` with a line of text, at most every `OFTEN`
    seconds."""
    last = time.monotonic()

    def told(_evaluated: int, bound: float, best: float) -> None:
        nonlocal last
        if time.monotonic() - last < OFTEN:
            return
        last = time.monotonic()
        if math.isinf(best):
            say("searching: no program fits so far")
        else:
            unit = size if objective == "memory" else duration
            say(
                f"searching: the best program so far needs {unit(best)}, and none needs less than {unit(bound)}"
            )

    return told


def reason(space: Space, estimate: Estimate, best: Estimate, by_memory: bool) -> str:
    """Return why a candidate is not the best one, as text.

    If the candidate does not fit, the text says how many bytes are missing. Otherwise, with `by_memory`, it
    says how much more memory the fullest device needs. Otherwise, it names the part of the step's time
    (`_parts`) that exceeds the same part of the best candidate by most, such as "bubble: +3.1% of the best
    step time". If no part is larger, the text is "equal to the best".
    """
    over = [(m - space.memory, rank) for rank, m in enumerate(estimate.memory)]
    if max(over)[0] > 0:
        return f"rank {max(over)[1]} needs {size(max(over)[0])} too much memory"
    if max(estimate.host) > space.hardware.host_memory:
        return f"the host needs {size(max(estimate.host) - space.hardware.host_memory)} too much memory"
    if by_memory:
        return f"{size(max(estimate.memory) - max(best.memory))} more on the fullest device"
    own, other = _parts(estimate), _parts(best)
    most = max(own, key=lambda part: own[part] - other[part])
    share = float((own[most] - other[most]) / best.time) if best.time else 0.0
    return f"{most}: +{share:.1%} of the best step time" if share > 0 else "equal to the best"


def _parts(estimate: Estimate) -> dict[str, Number]:
    """Return the parts whose sum is the time of a step."""
    work = sum(estimate.busy) / len(estimate.busy)
    return {
        "computation of a rank": work,
        "bubble": estimate.ideal - work,
        "exposed transfers": estimate.transferred - estimate.ideal,
        "exposed communication between replicas": estimate.time - estimate.transferred,
    }
