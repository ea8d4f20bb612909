"""ZB-V: two stages on each rank, placed along a V, with split backward passes."""

from __future__ import annotations

from collections import Counter

from lightning_piper.directives import Directive
from lightning_piper.schedules.actions import (
    Action,
    Devices,
    Row,
    checked_counts,
    one_by_one,
    program_of,
    ranks_of,
)
from lightning_piper.schedules.searched_schedules import searched


@searched(
    lambda ranks, microbatches, _: zbv_rows(ranks, microbatches), per_rank=(2,), folded=True, split=True
)
def zbv(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """ZB-V: rank r of R has the stages r and 2R - 1 - r, so that the last stage is on the rank of the first
    stage.

    Args:
        stages: The number of stages, which is even. Their tag is `tag`.
        microbatches: The number of microbatches; their tag is `dim_name`. With fewer than 2R - 1, the
            schedule has gaps.
        devices: The devices of each rank, as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A count is below one, the step would have too many passes, or a tag is not valid. Or
            the number of stages is odd, or `devices` does not have one device (or group) for each rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (the V-shaped schedule with the
    memory of 1F1B).
    """
    stages, microbatches = checked_counts("zbv", stages=stages, microbatches=microbatches)
    ranks = ranks_of("zbv", stages, 2)
    return program_of(zbv_rows(ranks, microbatches), microbatches, devices, tag, dim_name, "zbv")


def zbv_rows(ranks: int, microbatches: int) -> list[Row]:
    """Return the rows of `zbv`, by rank."""
    return [_row(ranks, rank, microbatches) for rank in range(ranks)]


def _row(ranks: int, rank: int, microbatches: int) -> Row:
    """Return the row of a rank of ZB-V."""
    # ZB-V on R ranks is defined for at least 2R - 1 microbatches. With fewer microbatches, this function
    # builds the row for 2R - 1 and drops the passes of the microbatches that do not exist.
    total = max(2 * ranks - 1, microbatches)
    down, up = rank, 2 * ranks - 1 - rank
    done: Counter[tuple[int, str]] = Counter()  # (stage, kind) -> number of passes so far
    row: list[Action] = []

    def run(stage: int, *kinds: str) -> None:
        for kind in kinds:
            row.append(Action(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(down, "F")
    for _ in range(rank):
        run(up, "F")
        run(down, "F")
    for _ in range(ranks - rank):
        run(up, "F", "BI", "BW")
    while done[up, "F"] < total:
        if done[down, "F"] < total:
            run(down, "F")
        run(down, "BI", "BW")
        run(up, "F", "BI", "BW")
    for _ in range(rank):
        run(down, "BI")
        run(up, "BI")
    for _ in range(ranks - rank):
        run(down, "BI", "BW")
    for stage in (up, down):
        run(stage, *["BW"] * (total - done[stage, "BW"]))
    return one_by_one(*(action for action in row if action.microbatch < microbatches))
