"""The regions that a program leaves without a device."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import selecting
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import Region

SHOWN = 5  # regions in a message
PLACE = "place"  # the op of `Place`


def without_device(dag: TrainingDAG) -> tuple[str, str] | None:
    """Return two texts for an error: which regions the program leaves without a device, and what to do.

    Return None if all regions have a device, if none has one, or if a later directive may place them.
    """
    unplaced: dict[int, Chunk] = {}
    placed, readers = set[int](), dict[str, int]()  # placed regions; parameter -> a placed region
    for chunk in dag.of_type(Chunk):
        if chunk.devices:
            placed.add(chunk.region)
            readers |= {name: chunk.region for name in dag.interface(chunk).params if name not in readers}
        else:
            unplaced.setdefault(chunk.region, chunk)
    index, ops = dag.program.index, dag.program.ops
    if not unplaced or not placed or (index is not None and PLACE in ops[index + 1 :]):
        return None
    if (partly := next((region for region in unplaced if region in placed), None)) is not None:
        return _partly_placed(dag, partly)
    chunks = list(unplaced.values())[:SHOWN]
    found = f"the program places some regions but leaves {len(unplaced)} without a device: "
    found += "; ".join(f"{dag.regions[chunk.region].label} ({_shown(dag, chunk)})" for chunk in chunks)
    place = f"add a place with the filter {selecting(dag, unplaced.keys())}"
    stages = [stage for chunk in chunks if (stage := _stage_for(dag, chunk, placed, readers)) is not None]
    if len(stages) < len(chunks) or (len(chunks) > 1 and dag.program.degrees is None):
        return found, f"{place} [PIPER-D009]"
    between = _between(dag, chunks[0], placed) if len(chunks) == 1 else ""
    if dag.program.degrees is None:
        return f"{found}{between}", f"annotate this code as {stages[0]}, or {place} [PIPER-D009]"
    found = f"no stage runs the code at {'; '.join(_shown(dag, chunk) for chunk in chunks)}{between}"
    if len(chunks) == 1:
        return found, f"annotate this code as {stages[0]} [PIPER-D009]"
    code = (dag.regions[chunk.region].source for chunk in chunks)
    each = "; ".join(f"{source} as {stage}" for source, stage in zip(code, stages, strict=True))
    return found, f"annotate the code at {each} [PIPER-D009]"


def _partly_placed(dag: TrainingDAG, region: int) -> tuple[str, str]:
    """Return two texts for an error: which passes of a region the program leaves without a device, and what to do."""
    chunks = [chunk for chunk in dag.of_type(Chunk) if chunk.region == region]
    left = [chunk for chunk in chunks if not chunk.devices]
    beside = next((chunk for chunk in chunks if chunk.devices and chunk.slice == left[0].slice), None)
    if beside is not None:
        found = (
            f"directive {beside.placed_by} (place) places {beside.label}, but {left[0].label} has no device"
        )
        return found, "leave PASS out of the filter of this place [PIPER-D009]"
    tags = dag.regions[region].tags
    parts = sorted({item for chunk in left for item in chunk.tags.items() if item[0] not in {*tags, "PASS"}})
    condition = json.dumps({**tags, parts[0][0]: [number for tag, number in parts if tag == parts[0][0]]})
    found = f"the program places some microbatches of {dag.regions[region].label}, but {left[0].label} has no device"
    return found, f"add a place with the filter {condition} [PIPER-D009]"


def _stage_for(dag: TrainingDAG, chunk: Chunk, placed: set[int], readers: Mapping[str, int]) -> str | None:
    """Return the stage for the code of a chunk, as text with its annotation: the stage that has one of the code's
    parameters, or else a stage next to it. Return None if the code has an annotation, or if no such stage is known.

    Args:
        dag: The DAG.
        chunk: A chunk without a device.
        placed: The regions with a device.
        readers: Maps a parameter to one of these regions that reads it.
    """
    region = dag.regions[chunk.region]
    reads = next((name for name in dag.interface(chunk).params if name in readers), None)
    before, after = _around(dag, region, placed)
    neighbor = before or after if reads is None else dag.regions[readers[reads]]
    if region.tags or neighbor is None or not neighbor.tags:
        return None
    tag, number = next(iter(neighbor.tags.items()))
    stage = "a stage next to it" if reads is None else f"the stage that has {reads}"
    return f"a part of {stage}: with piper.annotate({tag!r}, {number})"


def _around(dag: TrainingDAG, region: Region, placed: set[int]) -> tuple[Region | None, Region | None]:
    """Return the last region with a device before a region, and the first one after it."""
    before = next((r for r in reversed(dag.regions[: region.index]) if r.index in placed), None)
    after = next((r for r in dag.regions[region.index + 1 :] if r.index in placed), None)
    return before, after


def _between(dag: TrainingDAG, chunk: Chunk, placed: set[int]) -> str:
    before, after = _around(dag, dag.regions[chunk.region], placed)
    if before is not None and after is not None:
        return f", between {before.label} and {after.label}"
    if before is not None:
        return f", after {before.label}"
    return "" if after is None else f", before {after.label}"


def _shown(dag: TrainingDAG, chunk: Chunk) -> str:
    """Return the line where a region begins, and some parameters that identify it."""
    region, params = dag.regions[chunk.region], dag.interface(chunk).params
    uses = f", with {', '.join(params[:3])}{', ...' if len(params) > 3 else ''}" if params else ""
    return f"{region.source}{uses}"
