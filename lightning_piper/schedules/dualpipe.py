"""DualPipe and DualPipeV: forward passes of one direction overlap with backward passes of the other
direction.
"""

from __future__ import annotations

from collections import Counter, deque

from lightning_piper.common.argument_names import checks_names
from lightning_piper.common.units import counted
from lightning_piper.directives import Directive
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules.actions import Action, Devices, Row, checked_counts, program_of, ranks_of
from lightning_piper.schedules.searched_schedules import searched


@searched(
    lambda ranks, microbatches, _: dualpipev_rows(ranks, microbatches),
    per_rank=(2,),
    folded=True,
    split=True,
    whole_too=True,
    exists=lambda ranks, microbatches: ranks > 1 and microbatches >= 2 * ranks,
)
def dualpipev(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """DualPipe cut in half: rank r of R has the stages r and 2R - 1 - r. Each microbatch goes from rank 0 to
    the last rank and back to rank 0.

    Args:
        stages: The number of stages, which is even. Their tag is `tag`.
        microbatches: The number of microbatches, at least the number of stages. Their tag is
            `dim_name`.
        devices: The devices of each rank, as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A count is below one, the step would have too many passes, or a tag is not valid. Or
            the number of stages is odd, there are fewer microbatches than stages, or `devices` does not have
            one device (or group) for each rank.

    Source: Qi et al. (Sea AI Lab), DualPipe could be better without the Dual, 2025.
    """
    stages, microbatches = checked_counts("dualpipev", stages=stages, microbatches=microbatches)
    ranks = ranks_of("dualpipev", stages, 2)
    if microbatches < stages:
        raise DirectiveError(
            f"dualpipev: {counted(microbatches, 'microbatch')} for {counted(stages, 'stage')}. Give at least "
            f"{counted(stages, 'microbatch')} [PIPER-D020]"
        )
    return program_of(dualpipev_rows(ranks, microbatches), microbatches, devices, tag, dim_name, "dualpipev")


def dualpipev_rows(ranks: int, microbatches: int) -> list[Row]:
    """Return the rows of `dualpipev`, by rank."""
    return [
        _crossing(ranks, rank, (rank, 2 * ranks - 1 - rank), (0, 0), microbatches) for rank in range(ranks)
    ]


@checks_names
def dualpipe(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """DualPipe: half of the microbatches run from rank 0 to the last rank, the other half from the last rank
    to rank 0.

    Stage i is on the ranks i and `stages - 1 - i`. Each of them runs half of the microbatches, and the
    stage's gradients are summed over both ranks.

    Args:
        stages: The number of stages and of ranks, even; the tag of stages is `tag`.
        microbatches: The number of microbatches, which is even and at least twice the number of
            stages. Their tag is `dim_name`.
        devices: The devices of each rank, as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A count is below one, the step would have too many passes, or a tag is not valid. Or
            the number of stages or microbatches is odd, there are too few microbatches, or `devices` does not
            have one device (or group) for each rank.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024.
    """
    stages, microbatches = checked_counts("dualpipe", stages=stages, microbatches=microbatches)
    pairs = ranks_of("dualpipe", stages, 2)
    if microbatches % 2 or microbatches < 2 * stages:
        raise DirectiveError(
            f"dualpipe: {counted(microbatches, 'microbatch')} for {counted(stages, 'stage')}. Give an even number of "
            f"microbatches, at least {2 * stages} [PIPER-D020]"
        )
    half = microbatches // 2
    rows = []
    for rank in range(stages):
        # Microbatches enter at rank 0 and at the last rank. So the ranks of the second half have the mirrored
        # schedule.
        near, far = (rank, stages - 1 - rank) if rank < pairs else (stages - 1 - rank, rank)
        first = (0, half) if rank < pairs else (half, 0)
        rows.append(_crossing(pairs, near, (near, far), first, half))
    return program_of(rows, microbatches, devices, tag, dim_name, "dualpipe")


def _crossing(
    ranks: int, rank: int, stages: tuple[int, int], first: tuple[int, int], microbatches: int
) -> Row:
    """Return the row of a rank for two streams of microbatches.

    Stream 0 comes from the near end of the pipeline, and runs an early stage on this rank. Stream 1 comes
    from the far end, and runs a late stage on this rank.

    Args:
        ranks: The number of ranks from the near end to the turning point, the middle of the pipeline.
        rank: The rank, counted from the near end.
        stages: The stage of each stream on this rank.
        first: The first microbatch of each stream.
        microbatches: The number of microbatches in each stream.
    """
    done: Counter[tuple[int, str]] = Counter()  # (stream, "F" or "B") -> number of passes so far
    pending: deque[tuple[int, int]] = deque()  # stream and microbatch of deferred BW passes
    row: Row = []

    def next_(stream: int, kind: str) -> Action:
        """Return the stream's pass of this kind for its next microbatch. A BW belongs to the oldest BI whose
        BW is still to come."""
        if kind == "BW":
            stream, number = pending.popleft()
        else:
            number = done[stream, kind[0]]
            done[stream, kind[0]] += 1
            if kind == "BI":
                pending.append((stream, number))
        return Action(stages[stream], kind, first[stream] + number)

    def run(*passes: tuple[int, str]) -> None:
        row.extend((next_(*item),) for item in passes)

    def overlap(forward: int, backward: int) -> None:
        row.append((next_(forward, "F"), next_(backward, "B")))

    beyond = ranks - rank - 1  # ranks between this rank and the turning point
    run(*[(0, "F")] * (2 * beyond))
    run(*[(0, "F"), (1, "F")] * (rank + 1))
    run(*[(1, "BI"), (0, "BW"), (1, "F")] * beyond)
    for i in range(microbatches - 2 * ranks + rank + 1):
        if i == 0 and beyond == 0:
            run((0, "F"), (1, "B"))  # without overlap, the output of F leaves before B has run
        else:
            overlap(0, 1)
        overlap(1, 0)
    for _ in range(beyond):
        run((1, "B"))
        overlap(1, 0)
    # The first half of these backward passes are whole. The later ones are split, and their BW passes run
    # while gradients travel.
    run(*((1 - i % 2, "B" if i <= rank else "BI") for i in range(2 * (rank + 1))))
    run(*[(0, "BW"), (0, "BI")] * beyond)
    run(*[(0, "BW")] * (rank + 1))
    return row
