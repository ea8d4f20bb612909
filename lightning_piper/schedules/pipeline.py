"""Pipelines with one stage for each device, or for each group of devices over which a `replicate` divides the
batch.
"""

from __future__ import annotations

from lightning_piper.directives import Directive
from lightning_piper.schedules.actions import Action, Devices, Row, checked_counts, one_by_one, program_of
from lightning_piper.schedules.searched_schedules import searched


@searched(
    lambda ranks, microbatches, _: gpipe_rows(ranks, microbatches), exists=lambda ranks, microbatches: True
)
def gpipe(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """GPipe: all forward passes, then all backward passes.

    Args:
        stages: The number of stages; their tag is `tag`.
        microbatches: The number of microbatches; their tag is `dim_name`.
        devices: The device of each stage, or a group of devices over which a `replicate` then divides the
            batch (default: stage i runs on device i).
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A count is below one, the step would have too many passes, a tag is not valid, or
            `devices` does not have one device (or group) for each stage.

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
    """
    stages, microbatches = checked_counts("gpipe", stages=stages, microbatches=microbatches)
    return program_of(gpipe_rows(stages, microbatches), microbatches, devices, tag, dim_name, "gpipe")


def gpipe_rows(stages: int, microbatches: int) -> list[Row]:
    """Return the rows of `gpipe`, by rank. `fitted` and the search also use them."""
    return [
        one_by_one(*(Action(stage, kind, mb) for kind in "FB" for mb in range(microbatches)))
        for stage in range(stages)
    ]


@searched(
    lambda ranks, microbatches, _: one_f_one_b_rows(ranks, microbatches),
    exists=lambda ranks, microbatches: True,
    alike="gpipe",
)
def one_f_one_b(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """1F1B: after a warmup of `stages - stage` forward passes, each stage alternates one backward and one
    forward pass.

    A stage holds the activations of at most `stages - stage` microbatches. See `gpipe` for arguments and
    errors.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019 (the variant
    with a flush at the end of each step, as in Megatron-LM).
    """
    stages, microbatches = checked_counts("one_f_one_b", stages=stages, microbatches=microbatches)
    return program_of(
        one_f_one_b_rows(stages, microbatches), microbatches, devices, tag, dim_name, "one_f_one_b"
    )


def one_f_one_b_rows(stages: int, microbatches: int) -> list[Row]:
    """Return the rows of `one_f_one_b`, by rank."""
    return [_one_f_one_b(stage, min(stages - stage, microbatches), microbatches) for stage in range(stages)]


def _one_f_one_b(stage: int, warmup: int, microbatches: int) -> Row:
    """Return the row of a stage with `warmup` forward passes before its first backward pass."""
    row = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(microbatches):
        row.append(Action(stage, "B", mb))
        if warmup + mb < microbatches:
            row.append(Action(stage, "F", warmup + mb))
    return one_by_one(*row)


@searched(lambda ranks, microbatches, _: zero_bubble_rows(ranks, microbatches), split=True)
def zero_bubble(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """ZB-H1 (also ZB1P): 1F1B with split backward passes.

    Stage r runs the BW of a microbatch r microbatches after its BI. So the stage has work at the end of the
    step, when it would otherwise wait for gradients. Every stage holds the activations of at most `stages`
    microbatches. See `gpipe` for arguments and errors.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """
    stages, microbatches = checked_counts("zero_bubble", stages=stages, microbatches=microbatches)
    return program_of(
        zero_bubble_rows(stages, microbatches), microbatches, devices, tag, dim_name, "zero_bubble"
    )


def zero_bubble_rows(stages: int, microbatches: int) -> list[Row]:
    """Return the rows of `zero_bubble`, by rank."""
    return [
        _zero_bubble(stage, min(stages - 1 - stage, microbatches), microbatches) for stage in range(stages)
    ]


def _zero_bubble(stage: int, warmup: int, microbatches: int) -> Row:
    """Return the row of a stage in which each BW runs `stage` microbatches after its BI."""
    row = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(microbatches):
        if warmup + mb < microbatches:
            row.append(Action(stage, "F", warmup + mb))
        row.append(Action(stage, "BI", mb))
        if mb >= stage:
            row.append(Action(stage, "BW", mb - stage))
    row += [Action(stage, "BW", mb) for mb in range(max(0, microbatches - stage), microbatches)]
    return one_by_one(*row)


@searched(lambda ranks, microbatches, _: zb_h2_rows(ranks, microbatches), split=True, alike="zero_bubble")
def zb_h2(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """ZB-H2: zero bubble with up to twice the memory of 1F1B. More forward passes at the start keep stages
    from waiting.

    Every stage holds the activations of at most 2 `stages` - 1 microbatches. If F, BI and BW take equally
    long, a stage waits only before its first pass and after its last pass. In sum, it waits as long as
    `stages` - 1 passes take.

    In the paper, the next step's work fills these gaps. Its optimizer does not wait for all gradients, but
    validates its update later and may roll it back. Here the optimizer runs when all gradients have arrived,
    as on one device. So each step has this bubble of `stages` - 1 passes, even in the steady state, and the
    paper's step does not. With equal times a step is therefore as long as with `zero_bubble`. With some
    unequal times it is shorter.

    See `gpipe` for arguments and errors.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241).
    """
    stages, microbatches = checked_counts("zb_h2", stages=stages, microbatches=microbatches)
    return program_of(zb_h2_rows(stages, microbatches), microbatches, devices, tag, dim_name, "zb_h2")


def zb_h2_rows(stages: int, microbatches: int) -> list[Row]:
    """Return the rows of `zb_h2`, by rank."""
    return [
        _zb_h2(stage, min(2 * (stages - stage) - 1, microbatches), microbatches) for stage in range(stages)
    ]


def _zb_h2(stage: int, warmup: int, microbatches: int) -> Row:
    """Return the row of a stage in which each BW runs `2 * stage` microbatches after its BI."""
    lag = 2 * stage  # BW runs this many microbatches after BI
    row = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(microbatches):
        row.append(Action(stage, "BI", mb))
        if mb >= lag:
            row.append(Action(stage, "BW", mb - lag))
        if warmup + mb < microbatches:
            row.append(Action(stage, "F", warmup + mb))
    row += [Action(stage, "BW", mb) for mb in range(max(0, microbatches - lag), microbatches)]
    return one_by_one(*row)
