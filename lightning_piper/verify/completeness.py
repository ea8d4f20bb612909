"""Is everything there? What no single node can tell: every pass for every sample, every gradient at every home, every metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_piper.ir.nodes import AllReduce, Chunk, Metrics, Report, Update
from lightning_piper.ir.regions import HALVES, PassKey
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.values import Partial
from lightning_piper.verify import results, sharding
from lightning_piper.verify.facts import Contributions, Facts, names_of


def incomplete(facts: Facts, final: bool) -> Iterable[str]:
    """Every pass runs for every sample, every gradient reaches an update on each of its devices, every metric the report."""
    dag = facts.dag
    homes: dict[str, set[tuple[int, ...]]] = {}
    for chunk in dag.of_type(Chunk):
        for name in dag.interface(chunk).params + dag.interface(chunk).state:
            homes.setdefault(name, set()).add(chunk.devices)
    yield from _passes(facts)
    updated: dict[str, dict[tuple[int, ...], Update]] = {}
    for update in dag.of_type(Update):
        for name in dag.value(update.inputs[0]).names:
            if update.devices in updated.setdefault(name, {}):
                first = facts.at(updated[name][update.devices])
                yield f"{name} is updated twice on the same devices, by {first} and {facts.at(update)}"
            updated[name][update.devices] = update
    yield from _alike(facts, updated)
    trained = {n for i in dag.code.interfaces.values() for out in i.outputs if out.kind in ("grad", "buffer") for n in out.names}
    for name in sorted(trained):
        if () in updated.get(name, {}):
            continue  # not yet placed, for one of its regions is not
        for home in sorted(homes.get(name, set()) - set(updated.get(name, {})) - {()}):
            where = ",".join(map(str, home))
            yield f"{name} is used on device {where}, but no update reaches it there: its copy there would go stale"
    if final:
        yield from sharding.unsummed(facts)
        yield from sharding.shards(facts, updated)
        yield from sharding.places(facts)
    yield from _reported(facts)
    yield from results.unreturned(facts, final)
    yield from _seeds(facts)


def _alike(facts: Facts, updated: Mapping[str, Mapping[tuple[int, ...], Update]]) -> Iterable[str]:
    """All copies of a parameter are updated with the same summands in the same order: else they drift apart, bit by bit."""
    seen: set[int] = set()
    for copies in updated.values():
        first, *others = copies.values()
        for other in others:
            if other.id not in seen and [facts.dag.source(r) for r in first.inputs] != [facts.dag.source(r) for r in other.inputs]:
                names = names_of(facts.dag.value(other.inputs[0]).names)
                yield f"gradient of {names}: {facts.at(first)} and {facts.at(other)} add up different values, or in another order"
            seen.add(other.id)


def _passes(facts: Facts) -> Iterable[str]:
    """The backward of some samples may run whole, and of others in halves."""
    code = facts.dag.code
    slices: dict[PassKey, Contributions] = {}
    for region, kind in code.interfaces:
        slices |= {(region, part): {} for part in (code.halves_of(region) if kind == "B" else (kind,))}
    halved: set[int] = set()
    for chunk in facts.dag.of_type(Chunk):
        for part in code.halves_of(chunk.region) if chunk.kind == "B" else (chunk.kind,):
            # A pass may run twice on the same samples (recomputation); what enters a sum twice is found where it is summed.
            slices[chunk.region, part][chunk.slice] = facts.share(chunk.slice)
        if chunk.kind in HALVES:
            halved.add(chunk.region)
    found: dict[str, None] = {}
    for (region, kind), total in slices.items():
        if problem := facts.uncovered(facts.share, total):
            shown = "B" if kind in HALVES and region not in halved else kind
            found[f"{shown}[{facts.dag.regions[region].label}]: {problem}"] = None
    yield from found


def _seeds(facts: Facts) -> Iterable[str]:
    """Random numbers are drawn anew for every region and slice: no two share a seed."""
    drawn: dict[int, Chunk] = {}
    for chunk in facts.dag.of_type(Chunk):
        if facts.dag.interface(chunk).random:
            first = drawn.setdefault(chunk_seed(0, chunk), chunk)
            if (first.key, first.slice.start) != (chunk.key, chunk.slice.start):
                yield f"{facts.at(chunk)} draws the random numbers that {facts.at(first)} draws"


def _reported(facts: Facts) -> Iterable[str]:
    reports = list(facts.dag.of_type(Report))
    if len(reports) != 1:
        yield f"there are {len(reports)} reports of the loss; there must be one"
        return
    refs, devices = reports[0].inputs, facts.dag.devices()
    if reports[0].devices != devices:
        yield f"{facts.at(reports[0])} does not reach all devices, {list(devices)}"
    for metrics in facts.dag.of_type(Metrics):
        if isinstance(metrics.outputs[0].placement, Partial) != (len(devices) > 1):
            yield f"{facts.at(metrics)} makes {metrics.outputs[0].placement}, and there are {len(devices)} devices"
    for ref in refs:
        if isinstance(facts.dag.value(ref).placement, Partial):
            yield f"{facts.at(reports[0])} takes {facts.named(ref)} as one device has it: sum it over the devices"
    sums = [facts.dag.nodes[ref[0]] for ref in refs]
    if any(isinstance(s, AllReduce) for s in sums):
        refs = tuple(ref for s in sums for ref in s.inputs)
    made = {(m.id, 0) for m in facts.dag.of_type(Metrics)}
    found = {metric for m in facts.dag.of_type(Metrics) for metric in m.metrics}
    if sorted(refs) != sorted(made) or len(refs) != len(set(refs)):
        yield f"{facts.at(reports[0])} does not take every region's metrics exactly once"
    if made and len(found) != len(next(facts.dag.of_type(Metrics)).outputs[0].names):
        yield f"{facts.at(reports[0])}: some metrics are made by no region"
