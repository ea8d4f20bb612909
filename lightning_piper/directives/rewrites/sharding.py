"""Buckets of gradients and parameters: the nodes that sum them over replicas, shard them and gather them.

In terms of the training DAG, the ZeRO stages (Rajbhandari et al., 2020) are::

    nothing sharded     pack each -> accumulate -> all-reduce -> update
    optimizer           pack each -> accumulate -> reduce-scatter -> update of the shard;  one gather of the parameters a step
    gradients           pack each -> reduce-scatter each -> accumulate shards -> update of the shard;  one gather a step
    parameters          as gradients, but with a gather for every chunk that reads them

If each of several groups of replicas has all shards (HSDP), reduce-scatters and gathers are within a group. An
all-reduce then sums each shard over the groups, before the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

import torch

from lightning_piper.directives.rewrites.transfers import disconnect
from lightning_piper.ir.buckets import Bucket, buckets_of
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, GROUPS, Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.owners import Owners
from lightning_piper.ir.policies import ShardingPolicy
from lightning_piper.ir.values import Kind, Partial, Replicated, Sharded, Value
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.reduce import AllReduce, AllReduceShards, ReduceScatter
from lightning_piper.ops.update import Accumulate, Update

Group = tuple[int, ...]


class Conflict(Exception):
    """Two directives treat one parameter differently. The message says what is wrong.

    Attributes:
        advice: A way to resolve the conflict. If it is empty, the caller gives its own advice.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


def reduce_gradients(dag: TrainingDAG, regions: set[int], policy: ShardingPolicy) -> list[Node]:
    """Sum the gradients of `regions` over the replicas.

    If replicas shard nothing, they use an all-reduce. If they shard the optimizer state, they use a
    reduce-scatter of the sum over microbatches. If they shard gradients, they use a reduce-scatter for each
    microbatch.

    Returns:
        The nodes that may now read values of other devices.

    Raises:
        Conflict: The gradients are summed over replicas already, or another directive sums or shards them
            differently.
    """
    touched = _bucket(dag, regions, policy)
    totals = [
        total
        for total in dag.of_type(Accumulate)
        if _region_of(dag, total) in regions and _is_to_sum(dag, total)
    ]
    touched += disconnect(dag, totals)
    for total in totals:
        value = dag.value((total.id, 0))
        readers = dag.readers((total.id, 0))
        if not isinstance(value.placement, Partial) or any(r.sums for r in readers):
            raise Conflict(
                f"an earlier directive already sums the gradients of {', '.join(value.names[:3])} over replicas",
                "replicate each region only once",
            )
        assert value.bucket is not None
        if value.bucket.dtype != (wanted := policy.dtype or value.bucket.tensors[0].dtype):
            shown = f"the gradient of {', '.join(value.names[:3])}, used in several regions"
            raise Conflict(
                f"another directive sums {shown}, in {value.bucket.dtype}, but this one would sum it in "
                f"{wanted}"
            )
        if value.bucket.mesh != sharding_mesh(dag, value.names[0], policy):
            raise Conflict(
                f"another directive shards the gradient of {', '.join(value.names[:3])}, used in several regions, "
                "over other groups of replicas"
            )
        reduced: Node = total
        # With sharded gradients, replicas sum each term, and accumulate shards of these sums.
        if policy.gradients and _shardable(dag, value.bucket):
            shards = tuple((scatter(dag, total, policy, ref).id, 0) for ref in total.inputs)
            dag.rewire(total, inputs=shards)
            dag.change(total, outputs=(dag.value(shards[0]),))
        else:
            sharded = policy.optimizer and _shardable(dag, value.bucket)
            reduced = scatter(dag, total, policy) if sharded else _all_reduce(dag, total, policy)
        reduced = sum_over_groups(dag, reduced, policy)
        if reduced is not total:
            for reader in readers:
                dag.substitute(reader, (total.id, 0), (reduced.id, 0))
    # An update can only add values with the same placement.
    for update in dag.of_type(Update):
        found = {
            type(placement)
            for ref in update.inputs
            if not isinstance(placement := dag.value(ref).placement, Partial)
        }
        if len(found) > 1:
            names = ", ".join(dag.value(update.inputs[0]).names[:3])
            raise Conflict(
                f"the gradient of {names}, used in several regions, would be sharded in one region and whole in "
                "another"
            )
    return touched


def gather_parameters(dag: TrainingDAG, regions: set[int], policy: ShardingPolicy) -> None:
    """Make every chunk read the sharded parameters of `regions` from a gather.

    Raises:
        Conflict: One directive keeps a parameter whole, and another directive shards it.
    """
    readers = readers_of(dag)
    sharded = _sharded(dag, regions)
    # Include regions that read a sharded parameter but do not train it. For a region that trains the
    # parameter, the region's own directive decides.
    trained = _trained(dag)
    reading = regions | {
        region
        for bucket in sharded
        for name in bucket.names
        for region in readers.get(name, frozenset()) - trained.get(name, set())
    }
    device_groups: dict[Group, list[Chunk]] = {}
    for chunk in dag.of_type(Chunk):
        device_groups.setdefault(chunk.devices, []).append(chunk)
    placed = parameters_in(dag)
    for devices in dict.fromkeys(chunk.devices for chunk in dag.of_type(Chunk) if chunk.region in reading):
        chunks = device_groups[devices]
        here = {chunk.region for chunk in chunks} & reading
        buckets = [
            bucket
            for bucket in sharded
            if any(readers.get(name, frozenset()) & here for name in bucket.names)
        ]
        if policy.parameters or dag.earlier_buckets:
            # In a bucket of an earlier program, this step may train some parameters and only read others.
            untrained = _untrained_buckets(dag, devices, here & regions, policy)
            buckets += [bucket for bucket in untrained if bucket not in buckets]
        gather_at(dag, devices, buckets, policy, chunks, placed)


def gather_as_in_training(dag: TrainingDAG, training: TrainingDAG) -> None:
    """Make the chunks of a forward-only step read parameters from the shards that `training` keeps."""
    for shards in training.of_type(Parameters):
        bucket = shards.outputs[0].bucket
        assert bucket is not None
        if not bucket.is_summed_along(dag.mesh_of(bucket.names[0])):
            continue  # A `shard_experts` that is applied later divides these parameters and gathers them.
        stream = next((gather.stream for gather in training.users(shards)), shards.stream)
        rounded = next((gather.outputs[0].rounded for gather in training.users(shards)), None)
        policy = ShardingPolicy(
            optimizer=True,
            gradients=shards.per_use,
            parameters=shards.per_use,
            gather_stream=stream,
            gather_dtype=rounded,
        )
        chunks = [chunk for chunk in dag.of_type(Chunk) if chunk.devices == shards.devices]
        if any(set(dag.interface(chunk).params) & set(bucket.names) for chunk in chunks):
            gather_at(dag, shards.devices, [bucket], policy, chunks, parameters_in(dag))


@dataclasses.dataclass(frozen=True)
class Placed:
    """The sharded parameters of a DAG.

    Attributes:
        nodes: Devices -> parameter -> the node that holds its shards there.
        dtypes: The first parameter of a gathered bucket -> `Value.rounded` of its gathers.
    """

    nodes: dict[Group, dict[str, Parameters]]
    dtypes: dict[str, torch.dtype | None]


def parameters_in(dag: TrainingDAG) -> Placed:
    """Return the sharded parameters of a DAG."""
    nodes: dict[Group, dict[str, Parameters]] = {}
    for node in dag.of_type(Parameters):
        nodes.setdefault(node.devices, {}).update(dict.fromkeys(node.outputs[0].names, node))
    return Placed(nodes, {g.outputs[0].names[0]: g.outputs[0].rounded for g in dag.of_type(AllGather)})


def gather_at(
    dag: TrainingDAG,
    devices: Group,
    buckets: Iterable[Bucket],
    policy: ShardingPolicy,
    chunks: Iterable[Chunk],
    placed: Placed,
) -> None:
    """Make `chunks`, which are on these devices, read the parameters in `buckets` from a gather: one gather for
    each chunk if `policy.parameters`, otherwise one gather for all chunks. `placed` is `parameters_in(dag)`. The
    function adds to it what it makes.

    Raises:
        Conflict: Another directive already shards some parameters of a bucket on these devices, but not all
            of them in one bucket, or keeps them whole between their uses while `policy` does not (or the
            reverse). Or another directive gathers them in another dtype, on any devices.
    """
    here = placed.nodes.setdefault(devices, {})
    sources: dict[str, Parameters] = {}  # parameter -> the node with the shard of its bucket
    for bucket in buckets:
        found = here.get(bucket.names[0])
        same = all(here.get(name) is found for name in bucket.names)
        if not same or (found is not None and found.per_use is not policy.parameters):
            other = "whole" if policy.parameters else "only as shards"
            raise Conflict(
                f"another directive keeps the parameters {', '.join(bucket.names[:3])} {other} between "
                "their uses"
            )
        rounded = policy.rounds(bucket.dtype)
        if placed.dtypes.get(bucket.names[0], rounded) != rounded:
            raise Conflict(
                f"another directive gathers the parameters {', '.join(bucket.names[:3])} in "
                f"{placed.dtypes[bucket.names[0]] or bucket.dtype}, but this one would gather them in {rounded or bucket.dtype}"
            )
        if found is None:
            value = Value(Kind.PARAM, bucket.names, (bucket.part,), Sharded(0), bucket, others=bucket.others)
            found = dag.add(
                Parameters(
                    outputs=(value,),
                    devices=devices,
                    placed_by=dag.origin,
                    # The memory of a kept bucket has the optimizer's own shard, which must not be rounded.
                    kept=not policy.parameters and rounded is None,
                    gathered_per_use=policy.parameters,
                )
            )
        sources |= dict.fromkeys(bucket.names, found)
        here |= sources
    shared: dict[int, AllGather] = {}  # id of a node with shards -> the gather that all chunks share
    for chunk in chunks:
        names = dag.interface(chunk).params
        own: dict[int, AllGather] = {} if policy.parameters else shared
        refs = list(chunk.params or (None,) * len(names))
        for i, name in enumerate(names):
            if name in sources and refs[i] is None:
                source = sources[name]
                if source.id not in own:
                    own[source.id] = gather = _all_gather(dag, source, chunk, policy)
                    placed.dtypes[gather.outputs[0].names[0]] = gather.outputs[0].rounded
                refs[i] = (own[source.id].id, 0)
        if any(ref is not None for ref in refs):
            dag.rewire(chunk, params=tuple(refs))


def _sharded(dag: TrainingDAG, regions: set[int]) -> list[Bucket]:
    """Return the buckets of the trained parameters of `regions` that this program may shard, in the
    parameters' dtype. Buckets of divided parameters are left out.
    """
    found: dict[Bucket, None] = {}
    for total in dag.of_type(Accumulate):
        bucket = total.outputs[0].bucket
        if (
            bucket is not None
            and bucket.degree == 1
            and _shardable(dag, bucket)
            and _region_of(dag, total) in regions
        ):
            found[bucket.in_dtype(bucket.tensors[0].dtype)] = None
    return list(found)


def _untrained_buckets(
    dag: TrainingDAG, devices: Group, regions: set[int], policy: ShardingPolicy
) -> list[Bucket]:
    """Return buckets, which this program may shard, of the parameters that `regions` read and no region
    trains.

    Leave out divided parameters, and parameters that `devices` already gather.
    """
    placed = {n for node in dag.of_type(Parameters) if node.devices == devices for n in node.outputs[0].names}
    trained = _trained(dag).keys() | placed | dag.divided.keys()
    readers = readers_of(dag)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in dag.step.params:
        elsewhere = dag.earlier_buckets is not None and devices not in dag.earlier_buckets.get(name, {})
        if name not in trained and not elsewhere and readers.get(name, frozenset()) & regions:
            groups.setdefault(tuple(sorted(readers[name])), []).append(name)
    found: dict[Bucket, None] = {}
    owners = partial(_owners_in(dag), devices) if policy.by_parameter else None
    for names in groups.values():
        found |= dict.fromkeys(
            bucket for bucket, _ in _buckets(dag, names, policy, None, owners) if _shardable(dag, bucket)
        )
    return list(found)


def buckets_between_steps(training: TrainingDAG) -> dict[str, dict[Group, Bucket]]:
    """Return, for each parameter and device group, the bucket in which the group keeps its shards between
    steps.

    Parameters that are not sharded, and parameters that are divided along axes other than `DATA`, are absent.
    """
    found: dict[str, dict[Group, Bucket]] = {}
    for node in training.of_type(Parameters):
        bucket = node.outputs[0].bucket
        assert bucket is not None
        if bucket.degree == 1:
            for name in bucket.names:
                found.setdefault(name, {})[node.devices] = bucket
    return found


def keeps_shards_of(dag: TrainingDAG, training: TrainingDAG) -> bool:
    """Return whether each chunk of `dag` reads each parameter from the bucket from which the same devices
    read it in `training`. Divided parameters are not compared."""
    kept, own = buckets_between_steps(training), buckets_between_steps(dag)
    return all(
        own.get(name, {}).get(chunk.devices) == kept.get(name, {}).get(chunk.devices)
        for chunk in dag.of_type(Chunk)
        for name in dag.interface(chunk).params
        if name not in dag.divided
    )


def _shardable(dag: TrainingDAG, bucket: Bucket) -> bool:
    """Return whether this program may shard a bucket: it is the first program, or an earlier one sharded the
    bucket.
    """
    return dag.earlier_buckets is None or bucket.names[0] in dag.earlier_buckets


def _bucket(dag: TrainingDAG, regions: set[int], policy: ShardingPolicy) -> list[Node]:
    """Replace the gradient sums of `regions` by sums of buckets, also in other regions that use the same
    parameters.

    Returns:
        The new updates, one for each bucket and device group.
    """
    owners = _owners_in(dag) if policy.by_parameter else None
    totals: dict[tuple[str, ...], list[Accumulate]] = {}
    for total in dag.of_type(Accumulate):
        if total.outputs[0].kind == Kind.GRAD and total.outputs[0].bucket is None and _is_to_sum(dag, total):
            totals.setdefault(total.outputs[0].names, []).append(total)
    made: list[Node] = []
    for names, sums in totals.items():
        if not any(_region_of(dag, total) in regions for total in sums):
            continue
        disconnect(dag, sums)
        updates = dict.fromkeys(user.id for total in sums for user in dag.users(total))
        buckets = _buckets(dag, names, policy, policy.dtype, owners and partial(owners, sums[0].devices))
        parts = {total.id: [_packed(dag, total, bucket, own) for bucket, own in buckets] for total in sums}
        for update in [dag.nodes[i] for i in updates]:
            for k in range(len(buckets)):
                inputs = tuple((parts[source][k].id, 0) for source, _ in update.inputs)
                made.append(dag.add(dataclasses.replace(update, id=-1, origin=None, inputs=inputs)))
            dag.remove([update])
        dag.remove(sums)
    return made


def _is_to_sum(dag: TrainingDAG, total: Accumulate) -> bool:
    """Return whether a sum adds a gradient that must also be summed over replicas, or over the ranks of an
    axis.

    The result is False for gradients of divided parameters.
    """
    value = total.outputs[0]
    divided = any(axis != GROUPS for axis, _ in value.others)
    final = bool(dag.member_axes) and dag.replicas == 1 and not isinstance(value.placement, Partial)
    return not divided and not final


def _packed(dag: TrainingDAG, total: Accumulate, bucket: Bucket, names: tuple[str, ...]) -> Accumulate:
    """Pack the gradients of `names` in each term of `total` into a flat tensor of `bucket`. Add the sum of
    these flat tensors, and return its node. `total` stays."""
    value = Value(Kind.GRAD, names, (bucket.whole,), Partial(), bucket)
    about = {"tags": total.tags, "devices": total.devices, "placed_by": total.placed_by, "outputs": (value,)}
    packs = tuple((dag.add(Pack(inputs=(ref,), stream=total.stream, **about)).id, 0) for ref in total.inputs)  # type: ignore[arg-type]
    return dag.add(Accumulate(inputs=packs, stream=total.stream, **about))  # type: ignore[arg-type]


def _buckets(
    dag: TrainingDAG,
    names: Iterable[str],
    policy: ShardingPolicy,
    dtype: torch.dtype | None,
    owners: Callable[[Mesh], Owners] | None,
) -> list[tuple[Bucket, tuple[str, ...]]]:
    """Return the buckets that hold parameters, each with its parameters among `names`.

    Parameters that an earlier program sharded are in its buckets. The other parameters of one bucket have the
    same readers, so that a gather brings only parameters that its reader reads. Parameters that a `shard_experts` may
    divide have buckets of their own.

    Args:
        dtype: The dtype of the buckets; None: the parameters' dtype.
        owners: Returns the owners of whole parameters along a mesh. None: shards cut through parameters.

    Raises:
        Conflict: An earlier program shards a parameter over other devices.
    """
    readers, earlier = readers_of(dag), dag.earlier_buckets or {}
    apart = {name for routed in dag.code.routed.values() for name in routed.params}
    kept: dict[Bucket, set[str]] = {}
    together: dict[tuple[frozenset[int], bool, Mesh], list[str]] = {}
    for name in names:
        if name in earlier:
            bucket = next(iter(earlier[name].values()))
            if not bucket.is_summed_along(dag.mesh_of(name)):
                raise Conflict(
                    f"for this batch, the step uses {name} on devices over which it is not sharded: an earlier "
                    "batch with another layout (shapes, Python values) sharded it over other devices",
                    "let the step use parameters in the same regions for all batches, or give zero=0",
                )
            kept.setdefault(bucket, set()).add(name)
        else:
            mesh = sharding_mesh(dag, name, policy)
            together.setdefault((readers.get(name, frozenset()), name in apart, mesh), []).append(name)
    lists = [(mesh, [dag.step.params[name] for name in group]) for (*_, mesh), group in together.items()]
    found = [
        (
            bucket if dtype is None else bucket.in_dtype(dtype),
            tuple(name for name in bucket.names if name in own),
        )
        for bucket, own in kept.items()
    ]
    return found + [
        (bucket, bucket.names)
        for mesh, params in lists
        for bucket in buckets_of(params, policy.bucket_bytes, mesh, dtype, owners and owners(mesh))
    ]


def _owners_in(dag: TrainingDAG) -> Callable[[Group, Mesh], Owners]:
    """Return a function that returns the owners of whole parameters on a device group along a mesh.

    These are the owners in the buckets of `dag`, and the owners that the caller assigns later.
    """
    found: dict[tuple[Group, Mesh], Owners] = {}

    def owners(devices: Group, mesh: Mesh) -> Owners:
        return found.setdefault((devices, mesh), Owners(mesh.size(DATA)))

    buckets = dict.fromkeys((total.devices, total.outputs[0].bucket) for total in dag.of_type(Accumulate))
    for devices, bucket in buckets:
        if bucket is not None and bucket.owners is not None:
            owners(devices, bucket.mesh).add(bucket.tensors, bucket.owners)
    return owners


def readers_of(dag: TrainingDAG) -> Mapping[str, frozenset[int]]:
    """Return parameter -> the regions that read it."""
    found: dict[str, set[int]] = {}
    for (region, _), interface in dag.code.interfaces.items():
        for name in interface.params:
            found.setdefault(name, set()).add(region)
    return {name: frozenset(regions) for name, regions in found.items()}


def _trained(dag: TrainingDAG) -> dict[str, set[int]]:
    """Return trained parameter -> the regions that make a gradient of it."""
    found: dict[str, set[int]] = {}
    for (region, _), interface in dag.code.interfaces.items():
        for name in (name for out in interface.outputs if out.kind == Kind.GRAD for name in out.names):
            found.setdefault(name, set()).add(region)
    return found


def _region_of(dag: TrainingDAG, total: Accumulate) -> int | None:
    """Return the region whose gradients a sum adds; None if the sum does not add gradients."""
    if total.outputs[0].kind != Kind.GRAD:
        return None
    return dag.producer((total.id, 0)).region


def scatter(dag: TrainingDAG, total: Node, policy: ShardingPolicy, ref: Ref | None = None) -> ReduceScatter:
    """Add a reduce-scatter over replicas of the flat tensor that `total` makes, or of `ref`, one of the terms
    of `total`. Return the new node.
    """
    ref = ref or (total.id, 0)
    bucket = dag.value(ref).bucket
    assert bucket is not None
    value = Value(
        Kind.GRAD, dag.value(ref).names, (bucket.part,), Sharded(0), bucket, bucket.others_before_groups
    )
    return dag.add(
        ReduceScatter(
            inputs=(ref,),
            outputs=(value,),
            tags=total.tags,
            devices=total.devices,
            stream=policy.reduce_stream,
            placed_by=dag.origin,
        )
    )


def sum_over_groups(dag: TrainingDAG, total: Node, policy: ShardingPolicy) -> Node:
    """Add an all-reduce of the shards that `total` makes, over the groups that each have all shards. Return the new
    node, or `total` if nothing is to be summed over groups."""
    value = total.outputs[0]
    if (GROUPS, Partial()) not in value.others:
        return total
    assert value.bucket is not None
    return dag.add(
        AllReduceShards(
            inputs=((total.id, 0),),
            outputs=(dataclasses.replace(value, others=value.bucket.others),),
            tags=total.tags,
            devices=total.devices,
            stream=policy.reduce_stream,
            placed_by=dag.origin,
        )
    )


def sharding_mesh(dag: TrainingDAG, name: str, policy: ShardingPolicy) -> Mesh:
    """Return the mesh of the bucket of a parameter: the mesh along which its gradients are summed, divided into groups
    of replicas if the policy has a `shard_size`. A parameter that this program may not shard has no groups.

    Raises:
        Conflict: The members of an axis that hold the parameter cannot be divided into equal groups.
    """
    mesh = dag.mesh_of(name)
    shardable = dag.earlier_buckets is None or name in dag.earlier_buckets or name in dag.divided
    if policy.shard_size is None or not policy.optimizer or not shardable:
        return mesh
    try:
        return _grouped(mesh, dag.mesh, policy.shard_size)
    except ValueError:
        raise Conflict(
            f"the devices that hold the same part of {name} cannot be divided evenly over groups of "
            f"{policy.shard_size} replicas",
            f"give a shard_size of {' or '.join(map(str, _group_sizes(dag)))}",
        ) from None


def _group_sizes(dag: TrainingDAG) -> list[int]:
    """Return the numbers of replicas of a group that divide the devices along every axis evenly."""
    replicas, meshes = dag.mesh.size(DATA), {dag.mesh, *map(dag.mesh_of, dag.divided)}
    found = []
    for size in (n for n in range(2, replicas + 1) if replicas % n == 0):
        with contextlib.suppress(ValueError):
            for mesh in meshes:
                _grouped(mesh, dag.mesh, size)
            found.append(size)
    return found


@cache
def _grouped(mesh: Mesh, replicas: Mesh, shard_size: int) -> Mesh:
    """Return `mesh` divided into groups of `shard_size` replicas, which are along `DATA` of the mesh `replicas`."""
    replica_of = {group_rank: i for line in replicas.lines(DATA) for i, group_rank in enumerate(line)}
    return mesh.grouped({group_rank: replica // shard_size for group_rank, replica in replica_of.items()})


def _all_reduce(dag: TrainingDAG, total: Accumulate, policy: ShardingPolicy) -> AllReduce:
    """Add an all-reduce over replicas of a sum of gradients."""
    value = dataclasses.replace(total.outputs[0], placement=Replicated())
    return dag.add(
        AllReduce(
            inputs=((total.id, 0),),
            outputs=(value,),
            tags=total.tags,
            devices=total.devices,
            stream=policy.reduce_stream,
            placed_by=dag.origin,
        )
    )


def _all_gather(dag: TrainingDAG, source: Parameters, chunk: Chunk, policy: ShardingPolicy) -> AllGather:
    """Add the gather of a bucket's parameters for a chunk."""
    value, bucket = source.outputs[0], source.outputs[0].bucket
    assert bucket is not None
    whole = dataclasses.replace(
        value, tensors=(bucket.whole,), placement=Replicated(), rounded=policy.rounds(bucket.dtype)
    )
    # Only a gather that belongs to one chunk has the chunk's tags. Other gathers are shared by several chunks.
    tags = {tag: index for tag, index in chunk.tags.items() if tag != "PASS"} if policy.parameters else {}
    return dag.add(
        AllGather(
            inputs=((source.id, 0),),
            outputs=(whole,),
            tags=tags,
            devices=source.devices,
            stream=policy.gather_stream,
            placed_by=dag.origin,
        )
    )
