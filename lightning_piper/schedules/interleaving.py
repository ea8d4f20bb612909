"""1F1B with several stages on each rank, which shortens the bubble and needs more messages."""

from __future__ import annotations

from lightning_piper.common.units import counted
from lightning_piper.directives import Directive
from lightning_piper.errors import DirectiveError
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
    lambda ranks, microbatches, per_rank: interleaved_rows(ranks, microbatches, per_rank),
    per_rank=(2, 3, 4, 5, 6, 7, 8),
    exists=lambda ranks, microbatches: ranks > 1 and microbatches % max(1, microbatches // ranks) == 0,
    argument="stages_per_device",
)
def interleaved_one_f_one_b(
    stages: int,
    microbatches: int,
    stages_per_device: int = 2,
    devices: Devices | None = None,
    tag: str = "PP",
    dim_name: str = "MB",
) -> list[Directive]:
    """Interleaved 1F1B: rank r of R has the stages r, r + R, r + 2R, ...

    A microbatch passes over all ranks `stages_per_device` times. Microbatches run in rounds of R
    microbatches. If R does not divide the number M of microbatches, a round has M / max(1, M // R)
    microbatches. A rank runs its first stage for all microbatches of a round, then its next stage, and so on.

    Args:
        stages: The number of stages; their tag is `tag`.
        microbatches: The number of microbatches; their tag is `dim_name`.
        stages_per_device: The number of stages on each rank.
        devices: The devices of each rank, as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A count is below one, the step would have too many passes, or a tag is not valid. Or
            `stages` is not a multiple of `stages_per_device`, the rounds do not divide the microbatches, or
            `devices` does not have one device (or group) for each rank.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    2021.
    """
    name = "interleaved_one_f_one_b"
    stages, microbatches, stages_per_device = checked_counts(
        name, stages=stages, microbatches=microbatches, stages_per_device=stages_per_device
    )
    ranks = ranks_of(name, stages, stages_per_device)
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise DirectiveError(
            f"{name}: {counted(microbatches, 'microbatch')} on {counted(ranks, 'rank')} cannot run in {rounds} rounds of "
            f"equal size. Give {counted(microbatches - microbatches % rounds, 'microbatch')} [PIPER-D020]"
        )
    return program_of(
        interleaved_rows(ranks, microbatches, stages_per_device), microbatches, devices, tag, dim_name, name
    )


def interleaved_rows(ranks: int, microbatches: int, stages_per_device: int) -> list[Row]:
    """Return the rows of interleaved 1F1B. The caller has checked that the rounds divide the microbatches."""
    stages, rounds = ranks * stages_per_device, max(1, microbatches // ranks)
    size = microbatches // rounds
    rows = []
    for rank in range(ranks):
        local = range(rank, stages, ranks)
        forward = _rounds(local, "F", rounds, size)
        backward = _rounds(local[::-1], "B", rounds, size)
        warmup = min((stages_per_device - 1) * size + 2 * (ranks - 1 - rank), len(forward))
        steady = [action for pair in zip(forward[warmup:], backward, strict=False) for action in pair]
        rows.append(one_by_one(*forward[:warmup], *steady, *backward[len(forward) - warmup :]))
    return rows


def _rounds(stages: range, kind: str, rounds: int, size: int) -> list[Action]:
    """Return one pass of each stage for each microbatch, ordered by round, then stage, then microbatch."""
    return [
        Action(stage, kind, r * size + mb) for r in range(rounds) for stage in stages for mb in range(size)
    ]
