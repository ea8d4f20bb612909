"""Checks of replicas, buckets and shards: each sum over replicas occurs once, and gradients and parameters
have the same shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lightning_piper.common.units import counted
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, GROUPS, Mesh
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.values import Kind, Partial, Replicated, Sharded, Value
from lightning_piper.ops.communication.gather import Parameters
from lightning_piper.ops.facts import Facts, names_of
from lightning_piper.ops.update import Update

Updates = Mapping[str, Mapping[tuple[int, ...], Update]]  # name -> devices -> update


# Single nodes


def flat_values(facts: Facts, node: Node) -> Iterable[str]:
    """Yield a problem for each value in a bucket that is neither its flat tensor nor a shard of it, and for
    each other value that is sharded.
    """
    for value in node.outputs:
        bucket = value.bucket
        if bucket is None:
            if isinstance(value.placement, Sharded):
                yield f"{facts.at(node)} makes {value.label} in shards, but does not put it into a bucket"
            continue
        if id(value) in facts.flat:  # microbatches share values
            continue
        sharded = isinstance(value.placement, Sharded)
        partly_summed = sharded and value.kind == Kind.GRAD and value.others == bucket.others_before_groups
        placed = value.others == bucket.others or partly_summed
        if not placed:
            yield (
                f"{facts.at(node)} declares {value.label} as {'parts' if value.others else 'whole'} along other axes, but "
                f"its bucket is {'in parts' if bucket.others else 'whole'}"
            )
        made = bucket.part if sharded else bucket.whole
        fits = value.tensors == (made,) and value.placement in (Sharded(0), Partial(), Replicated())
        described = fits and _are_of(value, bucket)
        if not described:
            yield (
                f"{facts.at(node)} describes {value.label} differently from the tensor of the bucket of "
                f"{names_of(bucket.names)}"
            )
        if bucket not in facts.buckets:
            facts.buckets[bucket] = _misfit(facts.dag, bucket)
        if problem := facts.buckets[bucket]:
            yield f"{facts.at(node)} makes {value.label} in a bucket {problem}"
        elif described and placed:
            facts.flat.add(id(value))


def _are_of(value: Value, bucket: Bucket) -> bool:
    """Return whether a value has the names of a bucket, in the bucket's order. A value of gradients may leave
    out some names, but not all.
    """
    if value.kind != Kind.GRAD:
        return value.names == bucket.names
    own = frozenset(value.names)
    return bool(own) and value.names == tuple(name for name in bucket.names if name in own)


def _misfit(dag: TrainingDAG, bucket: Bucket) -> str | None:
    """Return why a bucket does not fit the step; None if it fits."""
    fitting: dict[Mesh, bool] = {}
    for name, spec in zip(bucket.names, bucket.tensors, strict=True):
        if name not in dag.step.params:
            return f"that holds {name}, which is not a parameter of the module"
        mesh = dag.mesh_of(name)
        if bucket.terms != (replicas := mesh.size(DATA)):
            shown = (
                f"{bucket.groups} groups of {bucket.members}" if bucket.groups > 1 else f"{bucket.members}"
            )
            return f"of {shown} shards, but {counted(replicas, 'replica')} share its parameters"
        if mesh not in fitting:
            fitting[mesh] = bucket.is_summed_along(mesh)
        if not fitting[mesh]:
            return f"that holds {name}, but other replicas hold these parts of it"
        if dag.spec_of(name) != spec:
            return f"that holds {name} as {spec}, but this parameter is {dag.spec_of(name)}"
    if len(set(bucket.names)) < len(bucket.names):
        return "that holds a parameter twice"
    return None


# The whole step


def unsummed(facts: Facts) -> Iterable[str]:
    """Yield a problem for each update that reads a gradient which is not summed over replicas."""
    for update in facts.dag.of_type(Update):
        value = facts.dag.value(update.inputs[0])
        if any(isinstance(facts.dag.value(ref).placement, Partial) for ref in update.inputs):
            yield (
                f"no directive sums the gradient of {names_of(value.names)} over devices {list(update.devices)}, so "
                "every replica would step with its own gradient. Add a replicate whose filter selects region "
                f"{dict(update.tags)}"
            )
        elif any((GROUPS, Partial()) in facts.dag.value(ref).others for ref in update.inputs):
            yield (
                f"gradient of {names_of(value.names)} reaches the optimizer as a sum over one group of replicas: every "
                f"group would step with its own gradient. Sum its shards over the groups of {list(update.devices)}"
            )


def shards(facts: Facts, updated: Updates) -> Iterable[str]:
    """Yield the problems of shards of parameters and gradients:

    - An update adds gradients with different placements.
    - Two nodes hold shards of one parameter on the same devices.
    - A chunk reads a device's own copy of a parameter, but the device has only a shard.
    - A chunk gathers a parameter that the optimizer updates whole, or that it updates in other shards.

    `updated` has the updates of each parameter or buffer, by name and devices.
    """
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
                yield (
                    f"{name} has shards twice on the same devices, in {facts.at(first)} and "
                    f"{facts.at(node)}: one of them would keep old values"
                )
    # (bucket that a chunk gathers, bucket of the gradient) -> whether both have the same shards
    fitting: dict[tuple[Bucket, Bucket], bool] = {}
    # `id` of a tuple of devices, and a parameter that chunks read there -> its gradient there, or None. To hash the
    # tuple for each chunk would cost more than the check.
    gradients: dict[tuple[int, str], Value | None] = {}
    for chunk in dag.of_type(Chunk):
        names, here = dag.interface(chunk).params, kept.get(chunk.devices, {})
        for name, ref in zip(names, chunk.params or (None,) * len(names), strict=True):
            if (at := (id(chunk.devices), name)) not in gradients:
                made = updated.get(name, {}).get(chunk.devices)
                gradients[at] = None if made is None else dag.value(made.inputs[0])
            gradient = gradients[at]
            if ref is None:
                if name in here or (gradient is not None and isinstance(gradient.placement, Sharded)):
                    yield (
                        f"{facts.at(chunk)} reads the whole of {name}, but this device has only a shard of it: gather it "
                        "first"
                    )
                continue
            mine = dag.value(ref).bucket
            if gradient is None or mine is None:
                continue  # not trained, or another rule reports it
            if not isinstance(gradient.placement, Sharded):
                yield (
                    f"{facts.at(chunk)} gathers {name} from shards, but the optimizer updates the whole of it"
                )
            elif gradient.bucket is not None:
                both = (mine, gradient.bucket)
                if both not in fitting:
                    fitting[both] = gradient.bucket.in_dtype(mine.dtype) == mine
                if not fitting[both]:
                    yield f"{facts.at(chunk)} gathers {name} from shards that the optimizer does not update"


def roundings(facts: Facts) -> Iterable[str]:
    """Yield a problem for each parameter that passes do not all read with the same rounding. One device could not
    compute with such parameters."""
    dag, first = facts.dag, dict[str, tuple[Chunk, torch.dtype | None]]()
    for chunk in dag.of_type(Chunk):
        names = dag.interface(chunk).params
        for name, ref in zip(names, chunk.params or (None,) * len(names), strict=True):
            rounded = None if ref is None else dag.value(ref).rounded
            other, before = first.setdefault(name, (chunk, rounded))
            if rounded != before:
                yield (
                    f"{facts.at(chunk)} reads {name} {_rounded(rounded)}, but {facts.at(other)} reads it "
                    f"{_rounded(before)}. Give the replicate directives of both regions the same gather_dtype"
                )


def _rounded(dtype: torch.dtype | None) -> str:
    return "unrounded" if dtype is None else f"rounded to {str(dtype).removeprefix('torch.')}"


def group_ranks(facts: Facts) -> Iterable[str]:
    """Yield a problem for each device that has different ranks in its groups, and for each node that has more
    or fewer devices than the mesh. The local batch and the shards of a device depend on its rank.
    """
    dag = facts.dag
    replica: dict[int, int] = {}
    seen: set[int] = set()  # `id` of each tuple of devices that was checked. Most nodes share a tuple.
    for node in dag.nodes.values():
        if node.everywhere or id(node.devices) in seen:
            continue
        seen.add(id(node.devices))
        if len(node.devices) != len(dag.mesh.group_ranks):
            members = (
                counted(dag.replicas, "replica")
                if not dag.member_axes
                else f"{len(dag.mesh.group_ranks)} group ranks ({dag.mesh})"
            )
            yield f"{facts.at(node)} has {counted(len(node.devices), 'device')}, but the program has {members}"
        for index, device in enumerate(node.devices):
            if replica.setdefault(device, index) != index:
                yield (
                    f"{facts.at(node)} has device {device} as replica {index}, but in another node this device is "
                    f"replica {replica[device]}"
                )
