"""The regions that a program leaves without a device."""

from __future__ import annotations

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
    chunks = list(unplaced.values())[:SHOWN]
    first = dag.regions[chunks[0].region]
    before = next((r for r in reversed(dag.regions[: first.index]) if r.index in placed), None)
    after = next((r for r in dag.regions[first.index + 1 :] if r.index in placed), None)
    reads = next((name for name in dag.interface(chunks[0]).params if name in readers), None)
    neighbor = before or after if reads is None else dag.regions[readers[reads]]
    found = f"the program places some regions but leaves {len(unplaced)} without a device: "
    found += "; ".join(f"{dag.regions[chunk.region].label} ({_shown(dag, chunk)})" for chunk in chunks)
    place = f"add a place with the filter {selecting(dag, unplaced.keys())}"
    if first.tags or neighbor is None or not neighbor.tags:
        return found, f"{place} [PIPER-D009]"
    tag, number = next(iter(neighbor.tags.items()))
    stage = "a stage next to it" if reads is None else f"the stage that has {reads}"
    advice = f"annotate this code as a part of {stage}: with piper.annotate({tag!r}, {number})"
    if dag.program.degrees is None:
        advice += f", or {place}"
    else:
        found = f"no stage runs the code at {'; '.join(_shown(dag, chunk) for chunk in chunks)}"
    return f"{found}{_between(before, after)}", f"{advice} [PIPER-D009]"


def _between(before: Region | None, after: Region | None) -> str:
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
