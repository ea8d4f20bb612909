"""Pipelines with one stage a device, or a group of devices over which `replicate` divides the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_piper.directives import Directive, Order, Place, Split
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.filters import Filter

Homes = Sequence[int | Sequence[int]]  # of each stage: a device, or a group of devices


def gpipe(stages: int, microbatches: int, devices: Homes | None = None, tag: str = "PP", dim_name: str = "MB") -> list[Directive]:
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
    program = _stages("gpipe", stages, microbatches, devices, tag, dim_name)
    for stage in range(stages):
        passes = [("F", mb) for mb in range(microbatches)] + [("B", mb) for mb in range(microbatches)]
        program.append(Order(filters=[_filter(tag, stage, dim_name, *item) for item in passes]))
    return program


def one_f_one_b(
    stages: int, microbatches: int, devices: Homes | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """After a warm-up of `stages - stage` forwards, each stage alternates one backward and one forward.

    A stage holds the activations of at most `stages - stage` microbatches. Arguments and errors as for `gpipe`.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019 (the variant with a flush at
    the end of each step, as in Megatron-LM).
    """
    program = _stages("one_f_one_b", stages, microbatches, devices, tag, dim_name)
    for stage in range(stages):
        order = [_filter(tag, stage, dim_name, *item) for item in _one_f_one_b_passes(stages - stage, microbatches)]
        program.append(Order(filters=order))
    return program


def _one_f_one_b_passes(warmup: int, microbatches: int) -> Iterator[tuple[str, int]]:
    warmup = min(warmup, microbatches)
    yield from (("F", mb) for mb in range(warmup))
    for mb in range(microbatches):
        yield "B", mb
        if warmup + mb < microbatches:
            yield "F", warmup + mb


def _filter(tag: str, stage: int, dim_name: str, kind: str, mb: int) -> Filter:
    return {tag: stage, dim_name: mb, "PASS": kind}


def _stages(name: str, stages: int, microbatches: int, devices: Homes | None, tag: str, dim_name: str) -> list[Directive]:
    for what, value in (("stages", stages), ("microbatches", microbatches)):
        if type(value) is not int or value < 1:
            raise DirectiveError(f"{name}: {what}={value!r}; give an integer >= 1")
    given: Homes = range(stages) if devices is None else devices
    homes: list[Sequence[int]] = [[home] if isinstance(home, int) else home for home in given]
    if len(homes) != stages:
        raise DirectiveError(f"{name}: {len(homes)} devices for {stages} stages; give one device, or one group, for each stage")
    program: list[Directive] = [Place(filter={tag: stage}, devices=home) for stage, home in enumerate(homes)]
    return [*program, Split(filter={}, dim_name=dim_name, num_microbatches=microbatches)]
