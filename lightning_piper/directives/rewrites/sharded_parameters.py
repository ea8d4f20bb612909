"""Parameters that are divided along an axis of the mesh. Each device holds, sums and updates its own part of
them.

Divided parameters have their own buckets. The gradient of a part covers the rows that all devices of its line
along the axis sent to it. The gradient is summed along the data axis, over the devices that hold the same
part. Each of these devices updates a shard of the bucket:

    pack -> accumulate -> (reduce-scatter over the holders of the same part) -> update;   one gather of the parameters a step

The rewrite depends only on `dag.meshes` and `dag.policies`, not on the order of the directives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from lightning_piper.directives.rewrites.sharding import (
    Conflict,
    Group,
    Placed,
    gather_at,
    parameters_in,
    readers_of,
    scatter,
    sharding_mesh,
    sum_over_groups,
)
from lightning_piper.ir.buckets import Bucket, buckets_of
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.policies import ShardingPolicy
from lightning_piper.ir.values import Kind, Partial, Sharded, Value
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.update import Accumulate, Update


def hold_parts(dag: TrainingDAG, regions: Iterable[int]) -> list[Node]:
    """Let devices hold, sum and update their parts of the divided parameters of `regions`, with the policies
    in `dag.policies`. First remove earlier sums, updates and gathers of these parameters.

    Returns:
        The updates, which may read values of other devices.

    Raises:
        Conflict: Regions that share parameters have different policies.
    """
    readers = _users_of(dag)
    # (regions that use the parameters, their mesh, axes along which they are divided) -> names of parameters
    families: dict[tuple[frozenset[int], Mesh, tuple[str, ...]], list[str]] = {}
    for region in sorted(set(regions)):
        for name in [name for name in dag.divided if region in readers[name]]:
            names = families.setdefault((readers[name], dag.mesh_of(name), dag.divided[name]), [])
            if name not in names:
                names.append(name)
    _undo(dag, {name for names in families.values() for name in names})
    chunks: dict[int, list[Chunk]] = {}
    for chunk in dag.of_type(Chunk):
        chunks.setdefault(chunk.region, []).append(chunk)
    placed = parameters_in(dag)
    updates: list[Node] = []
    for (family, *_), names in families.items():
        own = sorted((chunk for region in family for chunk in chunks.get(region, ())), key=lambda c: c.id)
        updates += _hold(dag, sorted(family), names, own, placed)
    return updates


def _users_of(dag: TrainingDAG) -> Mapping[str, frozenset[int]]:
    """Return parameter -> the regions that read it or make a gradient of it."""
    found = {name: set(regions) for name, regions in readers_of(dag).items()}
    for (region, _), interface in dag.code.interfaces.items():
        for name in (
            name for output in interface.outputs if output.kind == Kind.GRAD for name in output.names
        ):
            found.setdefault(name, set()).add(region)
    return {name: frozenset(regions) for name, regions in found.items()}


def _hold(
    dag: TrainingDAG, family: Sequence[int], names: Sequence[str], chunks: Sequence[Chunk], placed: Placed
) -> list[Node]:
    """Let devices hold, sum and update their parts of the parameters `names`, which the regions of `family`
    share. Return the updates. `chunks` are the chunks of these regions, in order of creation; see `gather_at`
    for `placed`."""
    policy = _policy(dag, family, names)
    mesh = sharding_mesh(dag, names[0], policy)
    if mesh.size(DATA) == 1:
        policy = dataclasses.replace(policy, gradients=False, parameters=False)
    # parameter -> the bundles of gradients that have its gradient
    bundles: dict[str, set[tuple[str, ...]]] = {}
    for bundle in {value.names for c in chunks for value in c.outputs if value.kind == Kind.GRAD}:
        for name in bundle:
            bundles.setdefault(name, set()).add(bundle)
    updates: list[Node] = []
    buckets: list[Bucket] = []
    # A `Pack` reads one bundle, so the trained parameters of a bucket have their gradients in the same bundles.
    together: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for name in sorted(names, key=lambda name: name not in bundles):  # trained parameters first
        together.setdefault(frozenset(bundles.get(name, ())), []).append(name)
    for some in together.values():
        params = [dataclasses.replace(dag.step.params[name], spec=dag.spec_of(name)) for name in some]
        buckets += buckets_of(params, policy.bucket_bytes, mesh, along=dag.divided[names[0]])
    for bucket in buckets:
        if bucket.names[0] in bundles:
            updates += _sum(
                dag, family, chunks, bucket if policy.dtype is None else bucket.in_dtype(policy.dtype), policy
            )
    groups: dict[Group, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.devices, []).append(chunk)
    for devices, readers in groups.items():
        gather_at(dag, devices, buckets, policy, readers, placed)
    return updates


def _policy(dag: TrainingDAG, family: Sequence[int], names: Sequence[str]) -> ShardingPolicy:
    """Return the policy of the regions in `dag.policies`, changed to shard the optimizer state. Raise `Conflict` if
    the regions have different policies."""
    found = {dag.policies[region] for region in family if region in dag.policies}
    if len(found) > 1:
        raise Conflict(
            f"regions with different replicate options use the sharded parameters {', '.join(names[:3])}"
        )
    return dataclasses.replace(next(iter(found), ShardingPolicy()), optimizer=True)


def _sum(
    dag: TrainingDAG, family: Sequence[int], chunks: Sequence[Chunk], bucket: Bucket, policy: ShardingPolicy
) -> list[Node]:
    """Add the sums of a bucket's gradients, one for each region and device group. Add an update on each group
    that reads all sums. Return the updates.
    """
    totals: list[Ref] = []
    for region in reversed(family):  # in the order of the backward pass
        terms: dict[Group, list[tuple[Chunk, int]]] = {}
        for chunk in sorted((c for c in chunks if c.region == region), key=lambda c: c.slice):
            for i, value in enumerate(chunk.outputs):
                if value.kind == Kind.GRAD and bucket.names[0] in value.names:
                    terms.setdefault(chunk.devices, []).append((chunk, i))
        totals += [_total(dag, made, bucket, policy) for made in terms.values()]
    tags = dag.nodes[totals[0][0]].tags if len(family) == 1 else {}
    return [
        dag.add(Update(inputs=tuple(totals), tags=tags, devices=devices, placed_by=dag.origin))
        for devices in dict.fromkeys(chunk.devices for chunk in chunks)
    ]


def _total(
    dag: TrainingDAG, terms: Sequence[tuple[Chunk, int]], bucket: Bucket, policy: ShardingPolicy
) -> Ref:
    """Add the sum of the bucket's gradients over `terms`, and over all devices that hold the same part. A
    term is (chunk, output index). All these chunks are on the same devices.

    A reduce-scatter sums each term if the policy shards gradients, otherwise the sum of the terms. If only
    one device holds each part, there is no reduce-scatter.
    """
    unshared = bucket.terms == 1
    value = Value(
        Kind.GRAD, bucket.names, (bucket.whole,), Sharded(0) if unshared else Partial(), bucket, bucket.others
    )
    first = terms[0][0]
    tags = {tag: index for tag, index in first.tags.items() if tag in dag.regions[first.region].tags}
    packs = []
    for chunk, i in terms:
        pack: Node = dag.add(
            Pack(
                inputs=((chunk.id, i),),
                outputs=(value,),
                tags=tags,
                devices=chunk.devices,
                placed_by=chunk.placed_by,
            )
        )
        if policy.gradients:
            pack = scatter(dag, pack, policy)
        packs.append((pack.id, 0))
    made = dag.value(packs[0])
    total: Node = dag.add(
        Accumulate(
            inputs=tuple(packs), outputs=(made,), tags=tags, devices=first.devices, placed_by=first.placed_by
        )
    )
    if not unshared and not policy.gradients:
        total = scatter(dag, total, policy)
    return (sum_over_groups(dag, total, policy).id, 0)


def _undo(dag: TrainingDAG, names: set[str]) -> None:
    """Remove the gradient sums, updates and gathers of the parameters `names`, so that chunks read the
    devices' own copies."""
    stack: list[Node] = []
    for chunk in list(dag.of_type(Chunk)):
        held = dag.interface(chunk).params
        if not names.isdisjoint(held) and chunk.params:
            left = tuple(None if name in names else ref for name, ref in zip(held, chunk.params, strict=True))
            dag.rewire(chunk, params=left if any(left) else ())
        for i, value in enumerate(chunk.outputs):
            if value.kind == Kind.GRAD and names.issuperset(value.names):
                stack += dag.readers((chunk.id, i))
    # Remove the nodes that hold or gather the parameters, and all nodes that follow from their gradients.
    made = [node for node in dag.nodes.values() if node.outputs and node.outputs[0].kind == Kind.PARAM]
    gathered = [node for node in made if names.issuperset(node.outputs[0].names)]
    removed: dict[int, Node] = {node.id: node for node in gathered}
    while stack:
        node = stack.pop()
        if node.id not in removed:
            removed[node.id] = node
            stack += dag.users(node)
    dag.remove(removed.values())
