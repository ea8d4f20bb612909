"""Compare the prediction for a program with its recording, and search with the recorded costs.

The difference shows where the predicted costs are wrong. The search shows whether the recorded costs lead to
a better program.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import nn

from lightning_piper.common.units import duration
from lightning_piper.compiler import Compiled, compile
from lightning_piper.directives import Directive, to_json
from lightning_piper.directives.group_sharding import Sharding
from lightning_piper.directives.program import Annotations, annotate_as
from lightning_piper.errors import PiperError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.profile.files import read_json, steps_in
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.costs.chain import copy_of
from lightning_piper.search.costs.recorded_costs import FIELDS, from_recording
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.program_writer import TAG
from lightning_piper.search.proposal import Proposal, search, sizes_of, work_of
from lightning_piper.search.report import described
from lightning_piper.simulate import Simulation, simulate
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

Stages = Sequence[Sequence[int]]  # the indices of the blocks of each stage


class ComparedTime(NamedTuple):
    """A quantity of a step in seconds, predicted and recorded. `what` names it, such as "F of stage 1" or
    "device 0, busy"."""

    what: str
    predicted: float
    recorded: float

    @property
    def difference(self) -> float:
        return self.recorded - self.predicted


@dataclass(frozen=True, repr=False)
class PredictionComparison:
    """A program's prediction compared with its recording. `print` shows the largest differences first.

    Attributes:
        step: The whole step.
        passes: The passes of each stage, all microbatches together. The largest difference comes first.
        devices: The busy, exposed and bubble time of each device. The largest difference comes first.
        time: Predicted seconds of this program's step with the recorded costs.
        proposal: The result of a search with the recorded costs.
        same: Whether the search proposes this program.
    """

    step: ComparedTime
    passes: tuple[ComparedTime, ...]
    devices: tuple[ComparedTime, ...]
    time: float
    proposal: Proposal
    same: bool

    def __repr__(self) -> str:
        predicted, recorded = duration(self.step.predicted), duration(self.step.recorded)
        return f"<PredictionComparison: predicted {predicted} a step, recorded {recorded}>"

    def __str__(self) -> str:
        """Return a table of the compared times, and the program that the search with the recorded costs
        proposes."""
        rows = [("", "predicted", "recorded", "difference")]
        for row in (self.step, *self.passes, *self.devices):
            sign = "-" if row.difference < 0 else "+"
            more = f"{sign}{duration(abs(row.difference), 4)}"
            rows.append((row.what, duration(row.predicted, 4), duration(row.recorded, 4), more))
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        lines = [
            "  ".join(
                x.rjust(w) if k else x.ljust(w) for k, (x, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines += [
            "",
            f"with the recorded costs, this program is predicted to take {duration(self.time, 4)} a step; a search "
            "chooses",
        ]
        if self.same:
            return "\n".join([*lines, "the same"])
        chosen = described(self.proposal.chosen, len(self.proposal.workload.blocks))
        return "\n".join(
            [*lines, f"{chosen}: {duration(self.proposal.time, 4)} a step", "", str(self.proposal.written)]
        )


def compare(
    folder: Path,
    module: nn.Module,
    batch: Any,
    program: Sequence[Directive],
    annotations: Annotations,
    hardware: str | None = None,
    memory: str | Number | None = None,
    progress: Callable[[str], None] | None = None,
) -> PredictionComparison:
    """Compare a recorded program with the prediction from the costs of its blocks. Then search for the best
    program with the recorded costs.

    Args:
        folder: The log directory of a run with `PiperStrategy(profile=...)`.
        module: A LightningModule without the annotations of the program.
        batch: The batch of one step.
        program, annotations: The recorded program. The search may use as many devices as the program.
        hardware: The name or the path of a hardware file, to calculate costs (default: measure costs on this
            machine).
        memory: Memory of each device, in bytes or as text such as "24GiB" (default: the memory of the
            hardware).
        progress: Called with a line of text about the progress of the search.

    Raises:
        PiperError: There is no valid recording, or it is of a different program or batch size. Or the program
            shards weights, sequences or experts, because the costs of sharded blocks are not known. Or a
            boundary between stages is inside of a block. Or the search or the capture raises an error.
    """
    if any(isinstance(directive, Sharding) for directive in program):
        raise PiperError(
            "comparison with a recording: the program shards weights, sequences or experts, but costs are measured for "
            "blocks with whole tensors. Record a program without these directives [PIPER-R002]"
        )
    if progress:
        progress("calculating the costs of the blocks" if hardware else "measuring the costs of the blocks")
    annotated = copy_of(module)
    annotate_as(annotated, annotations)
    compiled = compile(annotated, batch, program)
    steps = _steps(folder, compiled)
    cut = blocks_of(annotated, batch, short=False)
    stages = stages_of(cut)
    on = Hardware.measure() if hardware is None else Hardware.read(hardware)
    sizes = sorted({*sizes_of(batch), *(_samples(chunk) for chunk in compiled.dag.of_type(Chunk))})
    before = work_of(module, batch, None if hardware is None else on, sizes, cut)
    after = from_recording(folder, before, stages)
    predicted, now = _simulated(compiled, before, stages, on), _simulated(compiled, after, stages, on)
    found = search(module, batch, len(compiled.plans), memory, hardware=on, workload=after, progress=progress)
    spans = [list(range(*span)) for span in found.chosen.spans(len(cut.names))]
    same = found.directives == tuple(program) and spans == [list(stage) for stage in stages]
    whole = ComparedTime(
        "step", float(predicted.step_time), median(float(step["step_time"]) for step in steps)
    )
    passes = _largest_first(_passes(compiled, before, after, stages))
    return PredictionComparison(
        whole, passes, _largest_first(_devices(predicted, steps)), float(now.step_time), found, same
    )


def _steps(folder: Path, compiled: Compiled) -> list[Mapping[str, Any]]:
    """Return the figures of the recorded steps, as JSON data.

    Raises:
        PiperError: There are no recorded steps, a file is not a valid recording, or the steps are of a
            different program or batch size.
    """
    found = []
    for path in steps_in(folder):
        try:
            content = read_json(path)
            plan = read_json(path.parent / Path(content["plan"]).name)
            same = (
                plan["directives"] == json.loads(json.dumps(to_json(compiled.program)))
                and plan["samples"] == compiled.dag.size
            )
            step = content["step"]
            float(step["step_time"])
            for device in compiled.plans if same else ():
                [float(step["devices"][str(device)][what]) for what in ("busy", "exposed", "bubble")]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            found_there = f"{type(error).__name__}: {error}"
            raise PiperError(
                f"{str(path)!r} or its plan is not a valid recording ({found_there}). Record again with "
                "PiperStrategy(profile=...) [PIPER-R002]"
            ) from error
        if not same:
            raise PiperError(
                f"{str(path)!r} was recorded with another program or batch size. Give the directives of that "
                f"run, and a batch of {plan['samples']} samples [PIPER-R002]"
            )
        found.append(step)
    if not found:
        raise PiperError(
            f"there is no recording in {str(folder)!r}. Give the log directory of a run with "
            "PiperStrategy(profile=...) [PIPER-R001]"
        )
    return found


def stages_of(cut: BlockCut) -> list[list[int]]:
    """Return the indices of the blocks of each stage of an annotated module.

    A block without a tag belongs to the stage of the block before it. Such blocks at the beginning belong to
    stage 0.

    Raises:
        PiperError: A boundary between stages is inside of a block.
    """
    regions = cut.step.at(cut.step.size).regions
    found: dict[int, list[int]] = {}
    stage = 0
    for block, numbers in enumerate(cut.regions):
        tags = sorted({regions[number].tags[TAG] for number in numbers if TAG in regions[number].tags})
        if len(tags) > 1:
            raise PiperError(
                f"the boundary between stages {TAG}={tags} is inside the block {cut.names[block]!r}. Put "
                "each block into one stage [PIPER-R002]"
            )
        stage = tags[0] if tags else stage
        found.setdefault(stage, []).append(block)
    return [found[stage] for stage in sorted(found)]


def _samples(chunk: Chunk) -> int:
    return chunk.slice.stop - chunk.slice.start


def _stage(chunk: Chunk, stages: Stages) -> int | None:
    """Return the stage of a chunk; None if its tag is not a stage, or if it has no tag and there are several
    stages."""
    found = chunk.tags.get(TAG, None if len(stages) > 1 else 0)
    return found if isinstance(found, int) else None


def _seconds(workload: Workload, blocks: Sequence[int], kind: str, samples: int) -> float:
    """Return the seconds of one pass of a stage with these blocks, on a microbatch of this many samples."""
    works = [work for block in blocks if (work := workload.blocks[block].at(samples)) is not None]
    return float(sum(getattr(work, field) for work in works for field in FIELDS[kind]))


def _simulated(compiled: Compiled, workload: Workload, stages: Stages, hardware: Hardware) -> Simulation:
    """Simulate the program with the costs of a workload.

    If a pass of a stage is cut into several nodes, each node takes an equal part of the pass's time. Nodes
    outside of all stages take no time.
    """

    def key(chunk: Chunk) -> tuple[Any, ...]:
        return _stage(chunk, stages), chunk.kind, chunk.slice, chunk.tags.get("PASS")

    nodes = Counter(key(chunk) for chunk in compiled.dag.of_type(Chunk))

    def duration(chunk: Chunk) -> float:
        stage = _stage(chunk, stages)
        return (
            0.0
            if stage is None
            else _seconds(workload, stages[stage], chunk.kind, _samples(chunk)) / nodes[key(chunk)]
        )

    return simulate(compiled.dag, compiled.plans, duration, hardware.network(compiled.plans))


def _passes(compiled: Compiled, before: Workload, after: Workload, stages: Stages) -> list[ComparedTime]:
    """Return the seconds of each pass of each stage, over all microbatches: predicted with the costs
    `before`, and recorded in the costs `after`."""
    times: dict[tuple[int, str], dict[Any, int]] = {}  # (stage, pass) -> slice -> number of samples
    for chunk in compiled.dag.of_type(Chunk):
        stage = _stage(chunk, stages)
        if stage is not None and chunk.tags.get("PASS", chunk.kind) == chunk.kind:
            times.setdefault((stage, chunk.kind), {})[chunk.slice] = _samples(chunk)
    return [
        ComparedTime(
            f"{kind} of stage {stage}",
            *(sum(_seconds(x, stages[stage], kind, n) for n in of.values()) for x in (before, after)),
        )
        for (stage, kind), of in sorted(times.items())
    ]


def _devices(predicted: Simulation, steps: Sequence[Mapping[str, Any]]) -> list[ComparedTime]:
    """Return the busy, exposed and bubble time of each device, predicted and recorded. The recorded time is
    the median over the steps."""
    return [
        ComparedTime(
            f"device {device}, {what}",
            float(getattr(figures, what)),
            median(float(s["devices"][str(device)][what]) for s in steps),
        )
        for device, figures in predicted.devices.items()
        for what in ("busy", "exposed", "bubble")
    ]


def _largest_first(rows: Sequence[ComparedTime]) -> tuple[ComparedTime, ...]:
    return tuple(sorted(rows, key=lambda row: -abs(row.difference)))
