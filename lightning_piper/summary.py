"""Texts for the log: how the devices of a compiled program share the work, which properties the static check
does not prove, and how long a capture took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from lightning_piper.common.units import compact, counted, duration
from lightning_piper.directives import Place, Replicate
from lightning_piper.directives.program import Program
from lightning_piper.directives.replicate import LEVELS, shards_of
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.gather import rounded_params

LONG = 3  # seconds: a shorter capture is not worth a line
STAGE = "PP"  # the tag of pipeline stages
_STAGES = 8  # the summary lists the parameters of up to this many stages


def degrees_of(dag: TrainingDAG, program: Program, devices: int) -> str:
    """Return the devices and the degrees, such as "4 devices: 2 stages x 2 replicas, ZeRO-3"."""
    stages = len(_stages(dag, program))
    degrees = [f"{stages} stages"] if stages > 1 else []
    degrees += [f"{dag.replicas} replicas"] if dag.replicas > 1 else []
    axes = zip(dag.mesh.axes, dag.mesh.shape, strict=True)
    degrees += [f"{axis}={size}" for axis, size in axes if axis != DATA and size > 1]
    kinds = [" x ".join(degrees), _zero(dag, program), *_roundings(dag), *_trades(dag, program)]
    text = ", ".join(filter(None, kinds))
    return f"{devices} device{'s' * (devices > 1)}" + f": {text}" * bool(text)


def _zero(dag: TrainingDAG, program: Program) -> str:
    """Return the ZeRO stages of the replicas; empty without replicas, or if the replicas shard nothing."""
    fields = [shards_of(each) for each in program if isinstance(each, Replicate)]
    found = sorted({max((LEVELS.index(field) + 1 for field in own), default=0) for own in fields})
    return " and ".join(f"ZeRO-{stage}" for stage in found) if dag.replicas > 1 and any(found) else ""


def _roundings(dag: TrainingDAG) -> Iterator[str]:
    """Yield a phrase for each dtype to which the program rounds sharded parameters (`gather_dtype`)."""
    for dtype, count in Counter(rounded_params(dag).values()).items():
        yield f"{counted(count, 'parameter')} rounded to {str(dtype).removeprefix('torch.')} before use"


def _trades(dag: TrainingDAG, program: Program) -> Iterator[str]:
    """Yield a phrase for each of these features that a program has: microbatches, `recompute`, `offload`."""
    counts = sorted({len(slices) // dag.replicas for slices in dag.slices().values()})
    if counts[-1] > 1:
        by_region = ", by region" if len(counts) > 1 else ""
        yield f"{' or '.join(map(str, counts))} microbatches{' in each replica' * (dag.replicas > 1)}{by_region}"
    yield from (op for op in ("recompute", "offload") if any(each.op == op for each in program))


def _stages(dag: TrainingDAG, program: Program) -> list[set[int]]:
    """Return the regions of each stage, in the order in which the step runs the stages.

    The regions that the same `place` selects are a stage, even if several directives place its microbatches. If they
    have several indices of the tag `PP`, each index is a stage. The
    regions that a place selects only by the absence of tags (`{"PP": "-"}`) belong to the first other stage on the
    same devices.
    """
    chunks: dict[int, list[Chunk]] = {}
    for chunk in dag.of_type(Chunk):
        chunks.setdefault(chunk.region, []).append(chunk)
    named = {
        number
        for number, each in enumerate(program)
        if isinstance(each, Place) and any(value != "-" for value in each.filter.values())
    }
    stages: dict[Hashable, set[int]] = {}
    on: dict[tuple[int, ...], set[int]] = {}  # devices -> their first stage
    for region, own in sorted(chunks.items()):
        if by := frozenset(chunk.placed_by for chunk in own) & named:
            stage = stages.setdefault((by, dag.code.regions[region].tags.get(STAGE)), set())
            stage.add(region)
            for chunk in own:
                on.setdefault(chunk.devices, stage)
    for region in chunks.keys() - set[int]().union(*stages.values()):
        devices = chunks[region][0].devices
        if devices not in on:
            on[devices] = stages[devices] = set()
        on[devices].add(region)
    return sorted(stages.values(), key=min)


def parameters_of(dag: TrainingDAG, program: Program) -> str:
    """Return the number of parameters of the whole step, such as "parameters: 1.24B". If there are several stages, add
    the numbers that they use: "(by stage: 640M / 640M, 40M of them in several stages)".

    Args:
        dag: The finished DAG.
        program: Its directives.
    """
    sizes = {name: info.spec.numel for name, info in dag.step.params.items()}
    used: dict[int, set[str]] = {}
    for chunk in {chunk.key: chunk for chunk in dag.of_type(Chunk)}.values():
        used.setdefault(chunk.region, set()).update(dag.interface(chunk).params)
    names = [set[str]().union(*(used[region] for region in regions)) for regions in _stages(dag, program)]
    stages = [sum(sizes[name] for name in own) for own in names]
    total = f"parameters: {compact(sum(sizes.values()))}"
    if len(stages) == 1:
        return total
    uses = Counter(name for own in names for name in own)
    shared = sum(sizes[name] for name, n in uses.items() if n > 1)
    tied = f", {compact(shared)} of them in several stages" * bool(shared)
    if len(stages) > _STAGES:
        return f"{total} ({compact(min(stages))} to {compact(max(stages))} in a stage{tied})"
    return f"{total} (by stage: {' / '.join(map(compact, stages))}{tied})"


def unproved(dag: TrainingDAG, executed: str, draws: bool) -> Iterator[str]:
    """Yield the properties that the static check of a program does not prove, as texts.

    Args:
        dag: The finished DAG.
        executed: `CapturedStep.executed`.
        draws: Whether the step draws random numbers.
    """
    code = dag.code
    if executed:
        yield f"uncaptured code ({executed})"
    if draws:
        yield "random numbers (one device draws other numbers)"
    if found := list(_roundings(dag)):
        yield f"the result with unrounded parameters ({', '.join(found)})"
    if all(len(parts) == 1 for parts in dag.slices().values()):
        return
    if code.meet is not None:
        yield f"operations that mix samples ({code.meet})"
    elif code.assumed and not executed:
        yield "the loss of the whole batch (the loss is not a sum of means)"
    if code.nonlinear is not None:
        yield f"a backward pass that is not linear in the gradient of the loss ({code.nonlinear})"
    if norms := list(batch_statistics(dag)):
        yield f"batch norms over a microbatch ({norms[0]})"


def told_of_capture(step: str, seconds: float) -> str | None:
    """Return a line about a capture that the user had to wait for; None if it was short."""
    return f"PiperStrategy captured {step} in {duration(seconds)}" if seconds > LONG else None


def batch_statistics(dag: TrainingDAG) -> Iterator[str]:
    """Yield the label of each region that takes its statistics from a microbatch, with the line of the
    region."""
    code = dag.code
    for (region, kind), parts in dag.slices().items():
        interface = code.interfaces.get((region, kind))
        if len(parts) > 1 and kind == "F" and interface is not None and interface.takes_statistics:
            yield f"{code.regions[region].label} ({code.regions[region].source})"
