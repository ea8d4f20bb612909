"""The programs of the Piper paper for Qwen3-MoE, as lists of directives.

Each pipeline rank is a group of devices. The group divides the batch (DP) and the experts (EP).
"""

from __future__ import annotations

from collections.abc import Callable

import lightning_piper as piper
from lightning_piper import schedules

Groups = list[list[int]]  # for each pipeline rank, its devices

# Schedule -> its builder, and the number of stages on each rank.
SCHEDULES: dict[str, tuple[Callable[..., list[piper.Directive]], int]] = {
    "1F1B": (schedules.one_f_one_b, 1),
    "interleaved 1F1B": (schedules.interleaved_one_f_one_b, 2),
    "ZB-H1": (schedules.zero_bubble, 1),
    "ZB-V": (schedules.zbv, 2),
    "DualPipeV": (schedules.dualpipev, 2),
}


def replicas_inside(ranks: int, replicas: int) -> Groups:
    """Return the groups if consecutive devices are the ranks of one pipeline, as on a node for each replica."""
    return [[replica * ranks + rank for replica in range(replicas)] for rank in range(ranks)]


def parts(groups: Groups, experts: int) -> Groups:
    """Return the groups that hold all experts once: runs of `experts` devices of each group."""
    return [group[i : i + experts] for group in groups for i in range(0, len(group), experts)]


def program(
    schedule: str,
    groups: Groups,
    microbatches: int,
    zero: int = 1,
    experts: int = 1,
    stream: str = "alltoall",
    bucket_size: float = 25,
) -> list[piper.Directive]:
    """Return a pipeline with replicas, ZeRO and divided experts.

    Args:
        schedule: A key of `SCHEDULES`.
        groups: For each pipeline rank, its devices: one for each replica.
        microbatches: The number of microbatches of each replica.
        zero: The level of ZeRO, 0 to 3.
        experts: The number of devices that divide the experts. 1 does not divide them.
        stream: The stream of the exchanges of tokens.
        bucket_size: MB of gradients in one sum.
    """
    builder, per_rank = SCHEDULES[schedule]
    made = builder(per_rank * len(groups), microbatches, devices=groups)
    if len(groups[0]) > 1:
        made.append(piper.Replicate(zero=zero, bucket_size=bucket_size))
    if experts > 1:
        made.append(piper.ShardExperts(filter={"EP": "*"}, devices=parts(groups, experts), stream=stream))
    return made


def simplified_dualpipe(first: list[int], second: list[int]) -> list[piper.Directive]:
    """Return a simplified DualPipe for two microbatches on two pipeline ranks.

    Four stages lie along a V. On each rank, the forward pass of the second microbatch overlaps the backward
    pass of the first one, so that one of them computes while the tokens of the other one travel. Then the
    backward passes of both microbatches overlap.
    """

    def overlap(*passes: tuple[int, int, str]) -> list[dict[str, object]]:
        return [{"PP": stage, "MB": mb, "PASS": kind} for stage, mb, kind in passes]

    return [
        piper.Place(filter={"PP": [0, 3]}, devices=first),
        piper.Place(filter={"PP": [1, 2]}, devices=second),
        piper.Split(num_microbatches=2),
        piper.Replicate(shard_optimizer=True),
        piper.ShardExperts(filter={"EP": "*"}),
        piper.Order(filters=[overlap((3, 1, "F"), (3, 0, "B")), overlap((3, 1, "B"), (0, 0, "B"))]),
        piper.Order(filters=[overlap((2, 1, "F"), (2, 0, "B")), overlap((2, 1, "B"), (1, 0, "B"))]),
    ]
