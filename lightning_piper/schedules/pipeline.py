"""Pipelines with one stage a device, or a group of devices over which `replicate` divides the batch."""

from __future__ import annotations

from lightning_piper.directives import Directive
from lightning_piper.schedules.actions import Action, Devices, Row, counts, one_by_one, program_of


def gpipe(stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB") -> list[Directive]:
    """All forwards, then all backwards.

    Args:
        stages: number of indices of `tag`.
        microbatches: pieces of the batch, tagged `dim_name`.
        devices: the device of each stage, or a group of devices for each, which a `replicate` then divides the batch over; stage i
            runs on device i when left out.

    Raises:
        DirectiveError: a count below one, or not one device (or group) a stage.

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
    """
    stages, microbatches = counts("gpipe", stages=stages, microbatches=microbatches)
    return program_of(gpipe_rows(stages, microbatches), microbatches, devices, tag, dim_name, "gpipe")


def gpipe_rows(stages: int, microbatches: int) -> list[Row]:
    return [one_by_one(*(Action(stage, kind, mb) for kind in "FB" for mb in range(microbatches))) for stage in range(stages)]


def one_f_one_b(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """After a warm-up of `stages - stage` forwards, each stage alternates one backward and one forward.

    A stage holds the activations of at most `stages - stage` microbatches. Arguments and errors as for `gpipe`.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019 (the variant with a flush at
    the end of each step, as in Megatron-LM).
    """
    stages, microbatches = counts("one_f_one_b", stages=stages, microbatches=microbatches)
    return program_of(one_f_one_b_rows(stages, microbatches), microbatches, devices, tag, dim_name, "one_f_one_b")


def one_f_one_b_rows(stages: int, microbatches: int) -> list[Row]:
    return [_one_f_one_b(stage, min(stages - stage, microbatches), microbatches) for stage in range(stages)]


def _one_f_one_b(stage: int, warmup: int, microbatches: int) -> Row:
    row = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(microbatches):
        row.append(Action(stage, "B", mb))
        if warmup + mb < microbatches:
            row.append(Action(stage, "F", warmup + mb))
    return one_by_one(*row)


def zero_bubble(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """ZB-H1, also ZB1P: 1F1B with split backward passes. Stage r runs BW r microbatches behind BI, and so has work when it
    would else wait for gradients at the end.

    Every stage holds the activations of at most `stages` microbatches. Arguments and errors as for `gpipe`.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """
    stages, microbatches = counts("zero_bubble", stages=stages, microbatches=microbatches)
    return program_of(zero_bubble_rows(stages, microbatches), microbatches, devices, tag, dim_name, "zero_bubble")


def zero_bubble_rows(stages: int, microbatches: int) -> list[Row]:
    return [_zero_bubble(stage, min(stages - 1 - stage, microbatches), microbatches) for stage in range(stages)]


def _zero_bubble(stage: int, warmup: int, microbatches: int) -> Row:
    row = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(microbatches):
        if warmup + mb < microbatches:
            row.append(Action(stage, "F", warmup + mb))
        row.append(Action(stage, "BI", mb))
        if mb >= stage:
            row.append(Action(stage, "BW", mb - stage))
    row += [Action(stage, "BW", mb) for mb in range(max(0, microbatches - stage), microbatches)]
    return one_by_one(*row)


def zb_h2(stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB") -> list[Directive]:
    """Zero bubble with up to twice the memory of 1F1B: more forward passes at the begin, so that no stage ever waits for another.

    Every stage holds the activations of at most 2 `stages` - 1 microbatches, which is how many it takes. If F, BI and BW take
    equally long, a stage waits only before its first pass and behind its last one: `stages` - 1 passes together.

    The paper has these gaps filled with the next step's work: its optimizer does not wait for all gradients, and is validated,
    and rolled back, later. Here the optimizer runs when all gradients are there, as on one device. So each step pays this bubble of
    `stages` - 1 passes, in the steady state, too, where the paper's has none.
    With equal times a step is therefore as long as under `zero_bubble`; it is shorter for some of those that differ.

    Arguments and errors as for `gpipe`.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241).
    """
    stages, microbatches = counts("zb_h2", stages=stages, microbatches=microbatches)
    return program_of(zb_h2_rows(stages, microbatches), microbatches, devices, tag, dim_name, "zb_h2")


def zb_h2_rows(stages: int, microbatches: int) -> list[Row]:
    return [_zb_h2(stage, min(2 * (stages - stage) - 1, microbatches), microbatches) for stage in range(stages)]


def _zb_h2(stage: int, warmup: int, microbatches: int) -> Row:
    lag = 2 * stage  # BW runs so many microbatches behind BI
    row = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(microbatches):
        row.append(Action(stage, "BI", mb))
        if mb >= lag:
            row.append(Action(stage, "BW", mb - lag))
        if warmup + mb < microbatches:
            row.append(Action(stage, "F", warmup + mb))
    row += [Action(stage, "BW", mb) for mb in range(max(0, microbatches - lag), microbatches)]
    return one_by_one(*row)
