"""Replicas, buckets and shards: is each sum over replicas taken once, and do gradients and parameters lie in the same shards?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import (
    AllGather,
    AllReduce,
    Barrier,
    Chunk,
    Node,
    Pack,
    Parameters,
    ReduceScatter,
    Report,
    Update,
)
from lightning_piper.ir.values import Partial, Replicate, Shard, Value
from lightning_piper.verify.facts import Facts, names_of

Updates = Mapping[str, Mapping[tuple[int, ...], Update]]  # name -> devices -> update


# Single nodes


def flat_values(facts: Facts, node: Node) -> Iterable[str]:
    """A value in a bucket is its flat tensor, or a shard of it; nothing else is sharded."""
    for value in node.outputs:
        bucket = value.bucket
        if bucket is None:
            if isinstance(value.placement, Shard):
                yield f"{facts.at(node)} makes {value.label} in shards, but lays it in no bucket"
            continue
        if value.owned != bool(bucket.owners):
            yield f"{facts.at(node)} names {value.label} {'parts' if value.owned else 'whole'}, and its bucket says otherwise"
        sharded = isinstance(value.placement, Shard)
        made = bucket.part if sharded else bucket.whole
        if value.names != bucket.names or value.tensors != (made,) or value.placement not in (Shard(0), Partial(), Replicate()):
            yield f"{facts.at(node)} names {value.label} what is no flat tensor of the bucket of {names_of(bucket.names)}"
        if bucket not in facts.buckets:
            facts.buckets[bucket] = _misfit(facts.dag, bucket)
        if problem := facts.buckets[bucket]:
            yield f"{facts.at(node)} makes {value.label} in a bucket {problem}"


def _misfit(dag: TrainingDAG, bucket: Bucket) -> str | None:
    """Why a bucket does not fit the step; None if it does."""
    sharers = len(bucket.owners) or dag.replicas
    if bucket.members != sharers:
        return f"of {bucket.members} shards, and there are {sharers} replicas that have the same parameters"
    for name, spec in zip(bucket.names, bucket.tensors, strict=True):
        if name not in dag.step.params:
            return f"that holds {name}, which is no parameter of the module"
        if bucket.owners != dag.owners_of(name):
            return f"that holds {name}, which other replicas own"
        if dag.spec_of(name) != spec:
            return f"that holds {name} as {spec}, not as the module does"
    if len(set(bucket.names)) < len(bucket.names):
        return "that holds a parameter twice"
    return None


def pack(facts: Facts, node: Pack) -> Iterable[str]:
    """Lays the gradients of a bucket's parameters, which the bundle has, one after another."""
    facts.forward(node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if made.bucket is None:
        yield f"{facts.at(node)} makes no flat tensor of a bucket"
    elif value.bucket is not None or value.kind != made.kind or not set(made.names) <= set(value.names):
        yield f"{facts.at(node)} packs {names_of(made.names)}, which {facts.named(node.inputs[0])} does not hold"
    # What no other replica owns is summed already, and its whole is its only shard.
    alone = made.bucket is not None and bool(made.bucket.owners) and made.bucket.members == 1
    held = Shard(0) if alone and isinstance(value.placement, Partial) else value.placement
    if made.placement != held:
        yield f"{facts.at(node)} hands on {held} as {made.placement}"


def reduce_scatter(facts: Facts, node: ReduceScatter) -> Iterable[str]:
    """Sums a bucket over the replicas, once, and leaves each with its shard."""
    yield from _summed_once(facts, node)
    facts.forward(node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if value.bucket is None or made.placement != Shard(0) or _carries(made) != _carries(value):
        yield f"{facts.at(node)} makes no shard of the bucket that it sums"


def all_reduce(facts: Facts, node: AllReduce) -> Iterable[str]:
    """Sums over replicas (metrics: over all devices), once."""
    yield from _summed_once(facts, node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if not isinstance(made.placement, Replicate):
        yield f"{facts.at(node)} hands out {made.placement} after its sum"
    if (*_carries(made), made.tensors) != (*_carries(value), value.tensors):
        yield f"{facts.at(node)} hands on {facts.named(node.inputs[0])} as something else than it is"
    facts.forward(node)


def _summed_once(facts: Facts, node: AllReduce | ReduceScatter) -> Iterable[str]:
    for ref in node.inputs:
        value, source = facts.dag.value(ref), facts.dag.nodes[ref[0]]
        if not isinstance(value.placement, Partial):
            held = "a shard of it" if isinstance(value.placement, Shard) else "the whole of it"
            yield f"{facts.at(node)} sums {facts.named(ref)} over devices that all hold {held}"
        if value.kind != "metrics" and (len(node.inputs) != 1 or source.devices != node.devices):
            yield f"{facts.at(node)} sums {facts.named(ref)}, which lies on devices {list(source.devices)}"


def parameters(facts: Facts, node: Parameters) -> Iterable[str]:
    value = node.outputs[0]
    if value.bucket is None or value.kind != "param" or value.placement != Shard(0):
        yield f"{facts.at(node)} makes no shard of a bucket of parameters"
    elif any(spec.dtype != value.bucket.dtype for spec in value.bucket.tensors):
        yield f"{facts.at(node)} keeps parameters in {value.bucket.dtype}, which is not the dtype of all of them"


def all_gather(facts: Facts, node: AllGather) -> Iterable[str]:
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    source = facts.dag.nodes[node.inputs[0][0]]
    if value.placement != Shard(0) or made.placement != Replicate():
        yield f"{facts.at(node)} gathers {value.label} as {made.placement} from {value.placement}: it makes R from S(0)"
    if value.bucket is None or _carries(made) != _carries(value):
        yield f"{facts.at(node)} hands on {value.label} as something else than it is"
    if node.devices != source.devices:
        yield f"{facts.at(node)} gathers shards that lie on devices {list(source.devices)}"


def _carries(value: Value) -> tuple[object, ...]:
    return value.kind, value.names, value.bucket, value.owned


def read_params(facts: Facts, node: Chunk) -> Iterable[str]:
    """Parameters come whole, from a gather of the bucket that they lie in."""
    names = facts.dag.interface(node).params
    if len(node.params) not in (0, len(names)):
        yield f"{facts.at(node)} has {len(node.params)} sources of parameters; its region reads {len(names)}"
        return
    for name, ref in zip(names, node.params, strict=False):
        if ref is None:
            continue
        value = facts.dag.value(ref)
        if value.kind != "param" or value.bucket is None or name not in value.names:
            yield f"{facts.at(node)} reads parameter {name} from {facts.named(ref)}, which does not hold it"
        elif not isinstance(value.placement, Replicate):
            yield f"{facts.at(node)} reads parameter {name} from a shard: gather it first"


# The whole step


def unsummed(facts: Facts) -> Iterable[str]:
    """No optimizer meets a gradient that its replicas have not summed."""
    for update in facts.dag.of_type(Update):
        value = facts.dag.value(update.inputs[0])
        if any(isinstance(facts.dag.value(ref).placement, Partial) for ref in update.inputs):
            yield (
                f"gradient of {names_of(value.names)} reaches the optimizer as Partial(sum) over devices {list(update.devices)}: "
                f"every replica would step with its own gradient. Add a replicate whose filter selects region {dict(update.tags)}"
            )


def shards(facts: Facts, updated: Updates) -> Iterable[str]:
    """What the optimizer has in shards is gathered for every use, in the same shards; what it has whole is not sharded."""
    dag = facts.dag
    for update in dag.of_type(Update):
        placements = {str(dag.value(ref).placement) for ref in update.inputs}
        if len(placements) > 1:
            shown = names_of(dag.value(update.inputs[0]).names)
            yield f"gradient of {shown} ({facts.at(update)}): adds {' and '.join(sorted(placements))}"
    kept: dict[tuple[int, ...], dict[str, Parameters]] = {}
    for node in dag.of_type(Parameters):
        for name in node.outputs[0].names:
            first = kept.setdefault(node.devices, {}).setdefault(name, node)
            if first is not node:
                yield f"{name} has shards twice on the same devices, in {facts.at(first)} and {facts.at(node)}: one would go stale"
    fitting: dict[tuple[Bucket, Bucket], bool] = {}
    for chunk in dag.of_type(Chunk):
        names, here = dag.interface(chunk).params, kept.get(chunk.devices, {})
        for name, ref in zip(names, chunk.params or (None,) * len(names), strict=True):
            updates = updated.get(name, {})
            gradient = dag.value(updates[chunk.devices].inputs[0]) if chunk.devices in updates else None
            if ref is None:
                if name in here or (gradient is not None and isinstance(gradient.placement, Shard)):
                    yield f"{facts.at(chunk)} reads its own copy of {name}, of which this device has a shard alone: gather it"
                continue
            mine = dag.value(ref).bucket
            if gradient is None or mine is None:
                continue  # not trained; or told elsewhere
            if not isinstance(gradient.placement, Shard):
                yield f"{facts.at(chunk)} gathers {name} from shards, but the optimizer updates the whole of it"
            elif gradient.bucket is not None:
                both = (mine, gradient.bucket)
                if both not in fitting:
                    fitting[both] = gradient.bucket.in_dtype(mine.dtype) == mine
                if not fitting[both]:
                    yield f"{facts.at(chunk)} gathers {name} from other shards than the optimizer updates"


def places(facts: Facts) -> Iterable[str]:
    """Each device is the same replica in all groups that it is in: its share of the batch and its shards depend on it."""
    dag = facts.dag
    replica: dict[int, int] = {}
    for node in dag.nodes.values():
        if isinstance(node, Report | Barrier) or (isinstance(node, AllReduce) and dag.value(node.inputs[0]).kind == "metrics"):
            continue  # of all devices
        if len(node.devices) != dag.replicas:
            yield f"{facts.at(node)} has {len(node.devices)} devices, and there are {dag.replicas} replicas"
        for index, device in enumerate(node.devices):
            if replica.setdefault(device, index) != index:
                yield f"{facts.at(node)} has device {device} as replica {index}, which elsewhere is replica {replica[device]}"
