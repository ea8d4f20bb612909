"""R1, the other system: interleaved 1F1B if neighbors run in lockstep.

In `PipelineScheduleMulti` of torch, the passes of all ranks are in a table of time steps. At the end of a time step,
a rank waits for all its messages of this time step. So it also waits until the passes of the neighbors to which
it sends, or from which it receives, are over. `times` compares this with ranks that wait for their inputs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.paper.table import compared, gain, percent, show
from lightning_piper.schedules.actions import Action, Row
from lightning_piper.schedules.interleaving import interleaved_rows
from lightning_piper.schedules.pipeline import one_f_one_b_rows


def needed(action: Action, stages: int) -> Action | None:
    """Return the pass whose output a pass reads. None: it reads the batch."""
    if action.kind == "F":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.stage == stages - 1:
        return action._replace(kind="F")
    return action._replace(stage=action.stage + 1)


def earliest(rows: Sequence[Row], stages: int, seconds: Mapping[str, float]) -> dict[Action, float]:
    """Return the end of each pass if ranks wait for their inputs alone. Messages take no time.

    Args:
        rows: The actions of each rank, in order.
        stages: The number of stages.
        seconds: Kind of a pass -> its duration.
    """
    ends: dict[Action, float] = {}
    left = [[action for group in row for action in group] for row in rows]
    free = [0.0] * len(rows)
    while any(left):
        for rank, actions in enumerate(left):
            while actions and ((source := needed(actions[0], stages)) is None or source in ends):
                start = max(free[rank], ends[source] if source else 0)
                free[rank] = ends[actions[0]] = start + seconds[actions[0].kind]
                actions.pop(0)
    return ends


def lockstep(rows: Sequence[Row], stages: int, seconds: Mapping[str, float]) -> float:
    """Return the time of a step in which neighbors run in lockstep. Stage s runs on rank s modulo the number of
    ranks."""
    table: dict[float, list[Action]] = {}
    for action, end in earliest(rows, stages, {"F": 1, "B": 1}).items():
        table.setdefault(end, []).append(action)
    free = [0.0] * len(rows)
    for _, actions in sorted(table.items()):
        for action in actions:
            free[action.stage % len(rows)] += seconds[action.kind]
        over = list(free)
        for action in actions:
            receiver = action.stage + (1 if action.kind == "F" else -1)
            if 0 <= receiver < stages:
                pair = action.stage % len(rows), receiver % len(rows)
                for rank in pair:
                    free[rank] = max(free[rank], *(over[each] for each in pair))
    return max(free)


def r1_lockstep() -> None:
    """Print the gain of interleaved 1F1B over 1F1B, free and in lockstep. A backward pass takes twice the time of
    a forward pass, and nothing else takes time."""
    rows = []
    for ranks in (4, 8):
        microbatches, found = 2 * ranks, dict[str, list[float]]()
        for made, stages in (
            (one_f_one_b_rows(ranks, microbatches), ranks),
            (interleaved_rows(ranks, microbatches, 2), 2 * ranks),
        ):
            forward = ranks / stages
            seconds = {"F": forward, "B": 2 * forward}
            found.setdefault("free", []).append(max(earliest(made, stages, seconds).values()))
            found.setdefault("lockstep", []).append(lockstep(made, stages, seconds))
        for name, times in found.items():
            paper = compared(gain(*times), -14)[1:] if name == "lockstep" else ["", ""]
            rows.append([f"PP{ranks}", name, *times, percent(gain(*times)), *paper])
    show(["", "ranks", "1F1B", "interleaved", "gain", "paper", "points"], rows)
