"""Divided experts: does every token reach the owner of its expert, and come back, and is every expert owned exactly once?

Together with what is checked of gradients (`static`, `sharding`) this says that the contribution of every token enters the gradient
of its experts once: each replica sends its rows to one group, whose members own every expert once; and gradients are summed over
the replicas at the same place of all groups, which together have the tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_piper.experts import COMBINE, COUNTS, DISPATCH
from lightning_piper.ir.nodes import AllToAll, Chunk, Ref
from lightning_piper.verify.facts import Facts


def division(facts: Facts) -> Iterable[str]:
    """Groups have one size, and every replica a place in one of them."""
    dag = facts.dag
    for region, groups in dag.owners.items():
        label, experts = dag.regions[region].label, dag.code.experts[region]
        places = sorted(replica for group in groups for replica in group)
        if places != list(range(dag.replicas)) or len({len(group) for group in groups}) != 1:
            yield f"the experts of {label} are owned by replicas {groups}: each of {dag.replicas} replicas needs one place"
        elif experts.count % len(groups[0]):
            yield f"the {experts.count} experts of {label} cannot be owned in equal parts by {len(groups[0])} replicas"


def all_to_all(facts: Facts, node: AllToAll) -> Iterable[str]:
    """Rows go to their experts by the counts with which the region is told of them, and come back by the same."""
    dag = facts.dag
    facts.forward(node)
    experts = dag.code.experts.get(node.region)
    if experts is None or dag.owners.get(node.region) != node.owners:
        yield f"{facts.at(node)} moves rows between replicas {node.owners}, which do not own the experts of its region"
        return
    wanted = 1 if node.way == COUNTS or experts.even else 3
    if len(node.inputs) != wanted:
        yield f"{facts.at(node)} has {len(node.inputs)} inputs; it needs {wanted}"
        return
    value, made = dag.value(node.inputs[0]), node.outputs[0]
    if value.owned != (node.way == COMBINE) or made.owned == value.owned:
        held = "at the experts" if value.owned else "at home"
        yield f"{facts.at(node)} takes {facts.named(node.inputs[0])}, whose rows are {held}"
    if (made.kind, made.names, made.placement, made.bucket) != (value.kind, value.names, value.placement, value.bucket):
        yield f"{facts.at(node)} hands on {facts.named(node.inputs[0])} as something else than it is"
    yield from _shape(facts, node)
    if wanted == 1:
        return
    counts, arrived = node.inputs[1:]
    sender = dag.nodes[arrived[0]]
    if not isinstance(sender, AllToAll) or sender.way != COUNTS or sender.region != node.region or sender.inputs != (counts,):
        yield f"{facts.at(node)} moves rows by counts that were not sent to the owners of its region's experts"
    if facts.parts.get(counts, {}).keys() != facts.parts.get(node.inputs[0], {}).keys():
        yield f"{facts.at(node)} moves rows of other samples than those of its counts"
    yield from _told(facts, node, counts)


def _told(facts: Facts, node: AllToAll, counts: Ref) -> Iterable[str]:
    """The counts are those that the region's forward pass reads."""
    interface = facts.dag.code.interface_of((node.region, "F"))
    told = [ref for ref, way in zip(interface.inputs, interface.arrives, strict=True) if way == COUNTS]
    if facts.origins.get(counts) not in told:
        yield f"{facts.at(node)} moves rows by {facts.named(counts)}, which are not the counts of its region"


def _shape(facts: Facts, node: AllToAll) -> Iterable[str]:
    """What arrives has the shape that the number of owners gives it; open numbers of rows are as at home."""
    dag, experts, degree = facts.dag, facts.dag.code.experts[node.region], len(node.owners[0])
    (spec,), (made,) = dag.value(node.inputs[0]).tensors, node.outputs[0].tensors
    shape = spec.shape
    if node.way == COUNTS:
        shape = (degree, experts.count // degree)
    elif experts.even and node.way == DISPATCH:
        shape = (shape[0] // degree, shape[1] * degree, *shape[2:])
    elif experts.even:
        shape = (shape[0] * degree, shape[1] // degree, *shape[2:])
    if made.shape != shape or made.dtype != spec.dtype:
        yield f"{facts.at(node)} makes {made} of {spec}: it has shape {list(shape)} where it arrives"


def exchanged(facts: Facts, node: Chunk) -> Iterable[str]:
    """What a pass of divided experts reads from elsewhere has come by an exchange; no other pass reads rows at their experts."""
    dag = facts.dag
    interface = dag.interface(node)
    divided = node.region in dag.owners
    for i, ref in enumerate(node.inputs):
        way = interface.arrives[i] if divided and i < len(interface.arrives) else ""
        source, value = dag.nodes[ref[0]], dag.value(ref)
        if way:
            if not isinstance(source, AllToAll) or (source.way, source.region) != (way, node.region):
                yield f"{facts.at(node)} reads {facts.named(ref)} as it is at home: its experts are on several devices"
        elif value.owned != divided:
            yield f"{facts.at(node)} reads {facts.named(ref)}, whose rows are at experts; bring them home first"
