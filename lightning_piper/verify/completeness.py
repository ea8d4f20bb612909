"""Checks of the whole step that no single node allows: every pass for every sample, every gradient, every
metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import SPLIT_BACKWARD, PassKey
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.values import Kind
from lightning_piper.ops import arguments, metrics, results, weights
from lightning_piper.ops.facts import Contributions, Facts, names_of
from lightning_piper.ops.update import Update
from lightning_piper.verify import sharding


def incomplete(facts: Facts, final: bool) -> Iterable[str]:
    """Yield the problems of a step in which a pass does not run for every sample, or a gradient or metric
    does not reach its destination.

    A gradient must reach an update on each device that uses its parameter. A metric must reach the report. If
    the program is complete (`final`), also yield the problems of sums over replicas, shards and weights.
    """
    dag = facts.dag
    groups: dict[str, set[tuple[int, ...]]] = {}
    # One chunk for each pass and tuple of devices, which may be long. Chunks of other microbatches share both.
    for chunk in {(chunk.key, id(chunk.devices)): chunk for chunk in dag.of_type(Chunk)}.values():
        for name in dag.interface(chunk).params + dag.interface(chunk).state:
            groups.setdefault(name, set()).add(chunk.devices)
    yield from _passes(facts)
    updated: dict[str, dict[tuple[int, ...], Update]] = {}
    for update in dag.of_type(Update):
        for name in dag.value(update.inputs[0]).names:
            if update.devices in updated.setdefault(name, {}):
                first = facts.at(updated[name][update.devices])
                yield f"{name} is updated twice on the same devices, by {first} and {facts.at(update)}"
            updated[name][update.devices] = update
    yield from _alike(facts, updated)
    trained = {
        n
        for i in dag.code.interfaces.values()
        for out in i.outputs
        if out.kind in (Kind.GRAD, Kind.BUFFER)
        for n in out.names
    }
    for name in sorted(trained):
        if () in updated.get(name, {}):
            continue  # not yet placed, because a region that makes its gradient is not placed
        for devices in sorted(groups.get(name, set()) - set(updated.get(name, {})) - {()}):
            where = ",".join(map(str, devices))
            yield (
                f"{name} is used on device {where}, but no update changes it there: the copy on this device would keep "
                "old values"
            )
    if final:
        yield from sharding.unsummed(facts)
        yield from sharding.shards(facts, updated)
        yield from sharding.roundings(facts)
        yield from sharding.group_ranks(facts)
        yield from weights.unweighed(facts)
    yield from metrics.reported(facts)
    yield from results.unreturned(facts, final)
    yield from arguments.undelivered(facts)
    yield from _seeds(facts)


def _alike(facts: Facts, updated: Mapping[str, Mapping[tuple[int, ...], Update]]) -> Iterable[str]:
    """Yield a problem for each parameter whose copies are not all updated with the same terms in the same
    order. Such copies would not keep the same bits.
    """
    seen: set[int] = set()
    for copies in updated.values():
        first, *others = copies.values()
        for other in others:
            if other.id not in seen and [facts.dag.source(r) for r in first.inputs] != [
                facts.dag.source(r) for r in other.inputs
            ]:
                names = names_of(facts.dag.value(other.inputs[0]).names)
                yield (
                    f"gradient of {names}: {facts.at(first)} and {facts.at(other)} must add up the same "
                    "values in the same order, but do not"
                )
            seen.add(other.id)


def _passes(facts: Facts) -> Iterable[str]:
    """Yield a problem for each pass that does not cover all samples. Some samples may have a whole backward
    pass, and other samples a split backward pass.
    """
    code = facts.dag.code
    slices: dict[PassKey, Contributions] = {}
    for region, kind in code.interfaces:
        slices |= {
            (region, part): {} for part in (code.backward_passes_of(region) if kind == "B" else (kind,))
        }
    split: set[int] = set()
    for chunk in facts.dag.of_type(Chunk):
        for part in code.backward_passes_of(chunk.region) if chunk.kind == "B" else (chunk.kind,):
            # A pass may run twice on the same samples (recomputation). The rules of sums find values that
            # enter a sum twice.
            slices[chunk.region, part][chunk.slice] = facts.share(chunk.slice)
        if chunk.kind in SPLIT_BACKWARD:
            split.add(chunk.region)
    found: dict[str, None] = {}
    for (region, kind), total in slices.items():
        if problem := facts.uncovered(facts.share, total):
            shown = "B" if kind in SPLIT_BACKWARD and region not in split else kind
            found[f"{shown}[{facts.dag.regions[region].label}]: {problem}"] = None
    yield from found


def _seeds(facts: Facts) -> Iterable[str]:
    """Yield a problem for each region and slice that draws random numbers with the seed of another region or
    slice."""
    drawn: dict[int, Chunk] = {}
    for chunk in facts.dag.of_type(Chunk):
        if facts.dag.interface(chunk).random:
            first = drawn.setdefault(chunk_seed(0, chunk), chunk)
            if (first.key, first.slice.start) != (chunk.key, chunk.slice.start):
                yield f"{facts.at(chunk)} draws the same random numbers as {facts.at(first)}"
