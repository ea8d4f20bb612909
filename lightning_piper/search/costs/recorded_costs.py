"""A workload from a recorded run: the recorded times of a program's stages, distributed over their blocks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_piper.common.limits import is_number, shown
from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError
from lightning_piper.profile.files import read_json, steps_in
from lightning_piper.search.costs.workload import Block, Work, Workload
from lightning_piper.simulate.durations import Number

# Pass -> the fields of `Work` whose sum is the time of the pass.
FIELDS = {
    "F": ("forward",),
    "B": ("backward_input", "backward_weights"),
    "BI": ("backward_input",),
    "BW": ("backward_weights", "apart"),
}
_SAMPLES = re.compile(r"\s(\d+):(\d+)\s")
_Recorded = dict[tuple[int, str], float]  # (stage, pass) -> seconds of one microbatch


def from_recording(
    folder: str | Path, workload: Workload, stages: Sequence[Sequence[int]], tag: str = "PP"
) -> Workload:
    """Return a workload in which the blocks of a stage together take the recorded time of each pass: the
    median over all recorded steps and microbatches. `workload` is not changed.

    Args:
        folder: The log directory of a run with `PiperStrategy(profile=...)`.
        workload: A workload of the same module, measured or analytic. It distributes the recorded seconds of
            a stage over its blocks, and extrapolates to other numbers of samples.
        stages: The blocks of each stage of the recorded program, which ran under `tag` = 0, 1, ... Each block
            is in one stage. With one stage, the program need not have the tag.
        tag: The tag of the program's stages.

    Raises:
        PiperError: There is no recording, a file is not a valid recording, or it does not have these stages.
            Or microbatches of different sizes were recorded, `stages` does not name each block once, or a
            recorded pass takes no time in `workload`.
    """
    if sorted(block for stage in stages for block in stage) != list(range(len(workload.blocks))):
        raise PiperError(
            f"from_recording(stages={shown(stages)}) does not name each of the {len(workload.blocks)} blocks once. Name each "
            "block in one stage"
            " [PIPER-R002]"
        )
    paths = steps_in(Path(folder))
    if not paths:
        raise PiperError(
            f"from_recording: there is no recording in {str(folder)!r}. Give the log directory of a run "
            "with PiperStrategy(profile=...) [PIPER-R001]"
        )
    found: dict[tuple[int, str], list[float]] = {}
    sizes: set[int] = set()
    for path in paths:
        try:
            sizes.add(_read(path, read_json(path), tag, found, None if len(stages) > 1 else 0))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise PiperError(
                f"{str(path)!r} or its plan is not a valid recording ({type(error).__name__}: {error}). "
                "Record again with PiperStrategy(profile=...) [PIPER-R002]"
            ) from error
    if len(sizes) > 1:
        raise PiperError(
            f"from_recording: the recorded steps have microbatches of {sorted(sizes)} samples. Record "
            "batches of one size [PIPER-R002]"
        )
    recorded = {key: median(seconds) for key, seconds in found.items()}
    if {stage for stage, _ in recorded} != set(range(len(stages))):
        there = sorted({stage for stage, _ in recorded})
        raise PiperError(
            f"from_recording(stages=...): {counted(len(stages), 'stage')}, but the recorded program has {tag}={there}. "
            "Give the blocks of each recorded stage [PIPER-R002]"
        )
    blocks = list(workload.blocks)
    for number, stage in enumerate(stages):
        for i, block in zip(
            stage, _scaled([blocks[i] for i in stage], number, recorded, sizes.copy().pop()), strict=True
        ):
            blocks[i] = block
    return dataclasses.replace(workload, blocks=tuple(blocks))


def _read(
    path: Path,
    step: Mapping[str, Any],
    tag: str,
    found: dict[tuple[int, str], list[float]],
    untagged: int | None,
) -> int:
    """Add the seconds of each microbatch of a recorded step to `found`. Return the number of samples of a
    microbatch.

    Args:
        path: The file of the step.
        step: The content of the file.
        tag: The tag of stages.
        found: (stage, pass) -> seconds of each microbatch.
        untagged: The stage of work without the tag. None: work without the tag does not count.

    Raises:
        PiperError: The microbatches have different sizes, or no recorded node belongs to a stage.
        ValueError: The step names a plan outside of its folder, or a duration is not a number >= 0.
        Exception: The content or its plan is not a valid recording. The caller turns this error, and a
            ValueError, into a PiperError.
    """
    if Path(step["plan"]).name != step["plan"]:
        raise ValueError(f"the plan is {step['plan']!r}, which is not a file in the same folder")
    plan = read_json(path.parent / step["plan"])
    # (stage, pass, samples of the microbatch) -> sum of the seconds of all regions of the stage. The samples
    # identify a microbatch whatever the name of its tag is.
    seconds: dict[tuple[int, str, tuple[int, int]], float] = {}
    sizes: set[int] = set()
    tags: set[str] = set()  # of all recorded passes
    for number, node in plan["nodes"].items():
        duration, stage = step["durations"].get(f"%{number}"), node["tags"].get(tag, untagged)
        # `again`: whether this is a recomputed forward pass. The search adds recomputed passes itself.
        again = node["tags"].get("PASS", node["kind"]) != node["kind"]
        if node["kind"] in FIELDS and duration is not None and not again:
            tags |= node["tags"].keys() - {"PASS"}
            if stage is None:
                continue
            if not is_number(duration):
                raise ValueError(f"%{number} takes {shown(duration)} seconds")
            start, stop = map(int, _SAMPLES.findall(node["text"])[0])
            sizes.add(stop - start)
            key = stage, node["kind"], (start, stop)
            seconds[key] = seconds.get(key, 0.0) + float(duration)
    if not sizes:
        fix = "Record a program with stages"
        if tags:
            fix = (
                f"Its passes have the tags {', '.join(sorted(tags))}. If one of them numbers the stages, give it: "
                "from_recording(..., tag=...). Otherwise, record a program with stages"
            )
        raise PiperError(f"{str(path)!r} has no times of passes with the tag {tag!r}. {fix} [PIPER-R002]")
    if len(sizes) > 1:
        raise PiperError(
            f"{str(path)!r} has microbatches of {sorted(sizes)} samples under {tag!r}. Record microbatches "
            "of one size [PIPER-R002]"
        )
    for (stage, kind, _), duration in seconds.items():
        found.setdefault((stage, kind), []).append(duration)
    return sizes.pop()


def _scaled(blocks: Sequence[Block], stage: int, recorded: _Recorded, samples: int) -> list[Block]:
    """Return the blocks of a stage, scaled so that their times sum to the recorded times. Passes that were
    not recorded keep their times.

    Raises:
        PiperError: A recorded pass takes no time in these blocks.
    """
    factors: dict[str, Number] = {}
    for kind, fields in FIELDS.items():
        if (stage, kind) not in recorded:
            continue
        known = sum(
            getattr(work, field)
            for block in blocks
            for field in fields
            if (work := block.at(samples)) is not None
        )
        if not known:
            raise PiperError(
                f"from_recording: {kind} of stage {stage} was recorded, but takes no time in the workload. "
                "Give the workload of the recorded module [PIPER-R002]"
            )
        factors |= dict.fromkeys(fields, recorded[stage, kind] / float(known))

    def scaled(work: Work) -> Work:
        return work._replace(**{field: getattr(work, field) * factor for field, factor in factors.items()})

    return [
        dataclasses.replace(block, work={key: scaled(work) for key, work in block.work.items()})
        for block in blocks
    ]
