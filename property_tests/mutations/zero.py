"""Bugs of `replicate` and of the compiler where replicas, shards and buckets are concerned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from lightning_piper.directives import replicate, split
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Partial, Replicated, Sharded
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.reduce import AllReduce, AllReduceShards, ReduceScatter
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import completion, elimination
from lightning_piper.plan import device as device_plan
from lightning_piper.plan import instructions as ins
from lightning_piper.plan import order
from lightning_piper.plan.instructions import Instruction
from property_tests.mutations.plans import _drop, _every, _exchange, _places, _plan_bug
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

# The rewrite

REDUCE = (replicate, "reduce_gradients")
GATHER = (replicate, "gather_parameters")
DIVIDE = (replicate, "shard_batch")


def _afterwards(change: Callable[[TrainingDAG], Iterable[object]]) -> Wrap:
    """The DAG after a part of `replicate`, changed; how often is told by what the change gives."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def rewrite(*args: Any) -> Any:
            result = original(*args)
            dag = next(x for x in args if isinstance(x, TrainingDAG))
            seeded.hits += len(list(change(dag)))
            return result

        return rewrite

    return wrap


def _gradients(dag: TrainingDAG, kind: type[Node]) -> list[Any]:
    return [node for node in dag.of_type(kind) if node.outputs and node.outputs[0].kind == "grad"]


def _bypass(dag: TrainingDAG, nodes: list[Any]) -> list[Any]:
    for node in nodes:
        for reader in dag.users(node):
            dag.substitute(reader, (node.id, 0), node.inputs[0])
        dag.remove([node])
    return nodes


def _share_of_the_replica(dag: TrainingDAG) -> Iterable[object]:
    """The loss of each replica is the mean over its own samples, and gradients are summed all the same."""
    dag.size //= dag.replicas
    return [dag]


def _metrics_alone(dag: TrainingDAG) -> Iterable[object]:
    total = next(node for node in dag.of_type(AllReduce) if dag.value(node.inputs[0]).kind == "metrics")
    dag.rewire(next(dag.of_type(StepReport)), inputs=total.inputs)
    dag.remove([total])
    return [total]


def _metrics_said_to_be_whole(dag: TrainingDAG) -> Iterable[object]:
    for node in dag.of_type(Metrics):
        dag.change(node, outputs=(dataclasses.replace(node.outputs[0], placement=Replicated()),))
        yield node


def _said_to_be_whole(dag: TrainingDAG) -> Iterable[object]:
    for chunk in dag.of_type(Chunk):
        held = [
            dataclasses.replace(v, placement=Replicated()) if isinstance(v.placement, Partial) else v
            for v in chunk.outputs
        ]
        if tuple(held) != chunk.outputs:
            dag.change(chunk, outputs=tuple(held))
            yield chunk


def _own_copy_in_backward(dag: TrainingDAG) -> Iterable[object]:
    for chunk in dag.of_type(Chunk):
        if chunk.kind == "B" and any(chunk.params):
            dag.rewire(chunk, params=())
            yield chunk


def _frozen_not_gathered(dag: TrainingDAG) -> Iterable[object]:
    for chunk in dag.of_type(Chunk):
        frozen = [not dag.step.params[name].requires_grad for name in dag.interface(chunk).params]
        if any(frozen) and chunk.params:
            dag.rewire(
                chunk, params=tuple(None if f else ref for f, ref in zip(frozen, chunk.params, strict=True))
            )
            yield chunk


def _summed_twice(dag: TrainingDAG) -> Iterable[object]:
    for node in _gradients(dag, AllReduce) + _gradients(dag, ReduceScatter):
        if isinstance(dag.value(node.inputs[0]).placement, Partial):
            whole = dataclasses.replace(dag.value(node.inputs[0]), placement=Replicated())
            again = AllReduce(
                inputs=node.inputs, outputs=(whole,), tags=node.tags, devices=node.devices, stream=node.stream
            )
            dag.rewire(node, inputs=((dag.add(again).id, 0),))
            yield again


def _rebucketed(change: Callable[[Any], Any]) -> Callable[[TrainingDAG], Iterable[object]]:
    """Parameters lie in other buckets than their gradients."""

    def rewrite(dag: TrainingDAG) -> Iterable[object]:
        for node in [*dag.of_type(Parameters), *dag.of_type(AllGather)]:
            value = node.outputs[0]
            bucket = change(value.bucket)
            made = bucket.part if isinstance(value.placement, Sharded) else bucket.whole
            dag.change(
                node,
                outputs=(dataclasses.replace(value, bucket=bucket, names=bucket.names, tensors=(made,)),),
            )
            if bucket != value.bucket:
                yield node

    return rewrite


def _turned(bucket: Any) -> Any:
    return dataclasses.replace(bucket, names=bucket.names[::-1], tensors=bucket.tensors[::-1])


def _of_other_owners(bucket: Any) -> Any:
    return dataclasses.replace(bucket, owners=tuple(bucket.members - 1 - owner for owner in bucket.owners))


def _as_rows(bucket: Any) -> Any:
    return dataclasses.replace(
        bucket, tensors=tuple(dataclasses.replace(s, shape=(s.numel,), stride=(1,)) for s in bucket.tensors)
    )


def _two_copies_of_shards(dag: TrainingDAG) -> Iterable[object]:
    """The backward passes gather from shards of their own, which no optimizer updates."""
    copies: dict[int, Parameters] = {}
    for gather in list(dag.of_type(AllGather)):
        if any(isinstance(user, Chunk) and user.kind == "B" for user in dag.users(gather)):
            source = dag.nodes[gather.inputs[0][0]]
            copy = copies.setdefault(source.id, dag.add(dataclasses.replace(source, id=-1)))  # type: ignore[arg-type]
            dag.rewire(gather, inputs=((copy.id, 0),))
            yield gather


def _rewrite_bug(
    name: str,
    what: str,
    target: tuple[Any, str],
    change: Callable[[TrainingDAG], Iterable[object]],
    scenario: str,
) -> None:
    mutation(name, what, "rewrite", target, scenario=scenario)(_afterwards(change))


for _name, _what, _target, _change, _scenario in (
    (
        "wrong divisor over replicas",
        "each replica's loss is a mean over its own share",
        DIVIDE,
        _share_of_the_replica,
        "replicas",
    ),
    (
        "sum over replicas forgotten",
        "every replica steps with its own gradient",
        REDUCE,
        lambda dag: _bypass(dag, _gradients(dag, AllReduce)),
        "replicas",
    ),
    (
        "gradients said to be whole",
        "chunks say that each replica has the whole gradient",
        DIVIDE,
        _said_to_be_whole,
        "replicas",
    ),
    (
        "gradients summed twice over replicas",
        "a sum over replicas is summed over them again",
        REDUCE,
        _summed_twice,
        "replicas",
    ),
    (
        "metrics of one replica",
        "every replica reports its own part of the loss",
        DIVIDE,
        _metrics_alone,
        "replicas",
    ),
    (
        "metrics said to be whole",
        "metrics are summed over devices that say they have the whole",
        DIVIDE,
        _metrics_said_to_be_whole,
        "replicas",
    ),
    (
        "reduce-scatter forgotten",
        "the optimizer's shard is of the replica's own gradient",
        REDUCE,
        lambda dag: _bypass(dag, _gradients(dag, ReduceScatter)),
        "sharded optimizer",
    ),
    (
        "one reduce-scatter forgotten",
        "one region is not summed over the replicas",
        REDUCE,
        lambda dag: _bypass(dag, _gradients(dag, ReduceScatter)[:1]),
        "sharded gradients",
    ),
    (
        "shards summed twice",
        "what is scattered was summed before",
        REDUCE,
        _summed_twice,
        "sharded gradients",
    ),
    (
        "backward reads its own copy",
        "the backward passes do not gather",
        GATHER,
        _own_copy_in_backward,
        "sharded parameters",
    ),
    (
        "frozen parameter not gathered",
        "a frozen parameter is sharded, and read as if it were whole",
        GATHER,
        _frozen_not_gathered,
        "sharded parameters",
    ),
    (
        "bucket in another order",
        "parameters lie in another order than their gradients",
        GATHER,
        _rebucketed(_turned),
        "sharded optimizer",
    ),
    (
        "parameters of other owners",
        "an owner updates its parameters with the gradients of other parameters",
        GATHER,
        _rebucketed(_of_other_owners),
        "whole parameters",
    ),
    (
        "shards off by one",
        "parameters are in one shard more than there are replicas",
        GATHER,
        _rebucketed(lambda b: dataclasses.replace(b, mesh=Mesh.flat(b.members + 1))),
        "sharded parameters",
    ),
    (
        "shapes forgotten in a bucket",
        "parameters come back in one dimension",
        GATHER,
        _rebucketed(_as_rows),
        "sharded parameters",
    ),
    (
        "shards in two copies",
        "backward passes gather shards that the optimizer does not change",
        GATHER,
        _two_copies_of_shards,
        "sharded chain",
    ),
):
    _rewrite_bug(_name, _what, _target, _change, _scenario)


def _copies(change: Callable[[Any, Chunk, list[Node]], list[Node]]) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def repeat(self: Any, chunk: Chunk) -> list[Node]:
            found = original(self, chunk)
            kept = change(self, chunk, found)
            seeded.hits += bool(found)
            return kept

        return repeat

    return wrap


def _first_copy_for_all(self: Any, chunk: Chunk, found: list[Node]) -> list[Node]:
    for node in found:
        for copy in self.copies[node.id][1:]:
            self.dag.rewire(copy, inputs=self.copies[node.id][0].inputs)
    return found


def _last_copy_only(self: Any, chunk: Chunk, found: list[Node]) -> list[Node]:
    for node in found:
        self.copies[node.id] = self.copies[node.id][-1:]
    return found


mutation(
    "one microbatch's gradients for all",
    "after a split, what sums gradients over replicas reads the first microbatch",
    "rewrite",
    (split._Rewrite, "_repeat_reductions"),
    scenario="sharded gradients",
)(_copies(_first_copy_for_all))
mutation(
    "per-microbatch sum dropped",
    "after a split, the last microbatch alone is summed over the replicas",
    "rewrite",
    (split._Rewrite, "_repeat_reductions"),
    scenario="sharded gradients",
)(_copies(_last_copy_only))


@mutation("tied gradient of one group", "a tied parameter's shards get the gradient of one "
                                        "region", "rewrite", REDUCE,
          scenario="sharded, tied")  # fmt: skip
def _tied_gradient_of_one_group(original: Function, seeded: Seeded) -> Function:
    def reduce(dag: TrainingDAG, *args: Any) -> Any:
        touched = original(dag, *args)
        for node in list(dag.nodes.values()):
            if not node.outputs and len(node.inputs) > 1 and dag.value(node.inputs[0]).kind == "grad":
                dag.rewire(node, inputs=node.inputs[:1])
                seeded.hit()
        return touched

    return reduce


def _last_term_unsummed(dag: TrainingDAG) -> Iterable[object]:
    """The last microbatch is added after the sum over the replicas."""
    for total in dag.of_type(Accumulate):
        last = dag.nodes[total.inputs[-1][0]]
        if isinstance(last, ReduceScatter):
            dag.rewire(total, inputs=(*total.inputs[:-1], last.inputs[0]))
            yield total


for _name, _what, _change, _scenario in (
    (
        "last microbatch added after the sum",
        "of the last microbatch, each replica has its own gradient alone",
        _last_term_unsummed,
        "sharded gradients",
    ),
    (
        "sum over groups forgotten",
        "each group of replicas steps with the gradient of its own samples",
        lambda dag: _bypass(dag, list(dag.of_type(AllReduceShards))),
        "groups of shards",
    ),
):
    _rewrite_bug(_name, _what, (completion, "weigh"), _change, _scenario)

# The compiler


@mutation("gather dropped though another bucket was used", "a bucket is taken to be there as long as it "
                                                           "once was", "plan",
          (elimination, "_reuse"), scenario="sharded chain")  # fmt: skip
def _gather_dropped_though_another_bucket_was_used(original: Function, seeded: Seeded) -> Function:
    def reuse(dag: TrainingDAG, chunk: Chunk, held: dict[Any, Any]) -> None:
        before = dict(held.get(chunk.devices, {}))
        original(dag, chunk, held)
        seeded.hits += not before.keys() <= held[chunk.devices].keys()
        held[chunk.devices] = before | held[chunk.devices]

    return reuse


@mutation("gather of another bucket kept", "a chunk reads the bucket that the chunk before it read", "plan",
          (elimination, "_reuse"), scenario="sharded chain")  # fmt: skip
def _gather_of_another_bucket_kept(original: Function, seeded: Seeded) -> Function:
    def reuse(dag: TrainingDAG, chunk: Chunk, held: dict[Any, Any]) -> None:
        before = dict(held.get(chunk.devices, {}))
        original(dag, chunk, held)
        if before and chunk.params and next(iter(before.values())) not in chunk.params:
            dag.substitute(chunk, next(ref for ref in chunk.params if ref), next(iter(before.values())))
            seeded.hit()

    return reuse


def _joined(change: Callable[[list[ReduceScatter]], list[ReduceScatter]]) -> Wrap:
    """Which sums over replicas are taken together."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def together(dag: TrainingDAG, scatters: list[ReduceScatter]) -> list[Ref]:
            changed = change(scatters)
            seeded.hits += changed != scatters
            return original(dag, changed)

        return together

    return wrap


mutation("joined sum without its first term", "of microbatches summed over replicas together the first is "
                                              "left out", "plan",
         (elimination, "_together"), scenario="sharded parameters")(
    _joined(lambda scatters: scatters[1:] if len(scatters) > 1 else scatters))  # fmt: skip
mutation("joined sum with a term twice", "of microbatches summed over replicas together one counts "
                                         "twice", "plan",
         (elimination, "_together"), scenario="sharded parameters")(
    _joined(lambda scatters: [scatters[0], *scatters] if len(scatters) > 1 else scatters))  # fmt: skip


def _gathers_moved(move: Callable[[TrainingDAG, list[Node]], list[Node]]) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def with_gathers(dag: TrainingDAG, found: list[Node]) -> list[Node]:
            right = original(dag, found)
            wrong = move(dag, right)
            seeded.hits += wrong != right
            return wrong

        return with_gathers

    return wrap


def _all_first(dag: TrainingDAG, nodes: list[Node]) -> list[Node]:
    return sorted(
        nodes, key=lambda node: 0 if isinstance(node, Parameters) else 1 if isinstance(node, AllGather) else 2
    )


def _behind_the_reader(dag: TrainingDAG, nodes: list[Node]) -> list[Node]:
    gather = next((node for node in nodes if isinstance(node, AllGather)), None)
    if gather is None:
        return nodes
    rest = [node for node in nodes if node is not gather]
    reader = rest.index(dag.users(gather)[0])
    return [*rest[: reader + 1], gather, *rest[reader + 1 :]]


mutation("all gathers at the start", "every bucket is gathered before the first chunk "
                                     "runs", "plan", (order, "with_gathers"),
         scenario="sharded chain")(_gathers_moved(_all_first))  # fmt: skip
mutation("gather behind its reader", "a chunk waits for a gather that is issued after "
                                     "it", "plan", (order, "with_gathers"),
         scenario="sharded chain")(_gathers_moved(_behind_the_reader))  # fmt: skip


@mutation("all devices are replica 0", "every device works on the first share, and has the first "
                                       "shard", "plan",
          (device_plan.DevicePlan, "__init__"), scenario="sharded optimizer")  # fmt: skip
def _all_devices_are_replica_0(original: Function, seeded: Seeded) -> Function:
    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        seeded.hits += self.replica > 0
        self.replica = 0

    return init


# Plans


def _freed_after_first_use(device: int, instructions: list[Instruction]) -> list[Instruction]:
    """Of what is gathered."""
    gathered = {x.into for x in instructions if isinstance(x, ins.AllGatherInstruction)}
    for i, x in enumerate(instructions):
        mine = {read.slot for read in x.reads} & gathered
        if isinstance(x, ins.Run) and any(read.slot in mine and not read.last for read in x.reads):
            reads = tuple(dataclasses.replace(r, last=r.last or r.slot in mine) for r in x.reads)
            instructions[i] = dataclasses.replace(x, reads=reads)
            break
    return instructions


def _waited_before_issued(device: int, instructions: list[Instruction]) -> list[Instruction]:
    where = _places(instructions, ins.AllGatherInstruction)
    if where:
        gather = instructions[where[-1]]
        wait = next(
            i for i, x in enumerate(instructions) if isinstance(x, ins.WaitWork) and x.node == gather.node
        )
        instructions.insert(where[-1], instructions.pop(wait))
    return instructions


def _other_order_on_device_1(device: int, instructions: list[Instruction]) -> list[Instruction]:
    """Two gathers that are issued one after the other on the same group."""
    where = _places(instructions, ins.AllGatherInstruction)
    if device == 1 and len(where) > 1:
        a, b = where[:2]
        instructions[a], instructions[b] = instructions[b], instructions[a]
    return instructions


def _params_in_reverse(x: ins.Run) -> dict[str, Any]:
    return {"params": x.params[::-1]} if any(x.params) else {}


for _kind in (ins.AllGatherInstruction, ins.ReduceScatterInstruction, ins.PackInstruction):
    _plan_bug(f"{_kind.op} dropped", f"the plan lacks its last {_kind.op}", _drop(_kind),
              scenario="sharded, tied" if _kind is ins.PackInstruction else "sharded parameters")  # fmt: skip
for _name, _what, _edit, _scenario in (
    (
        "gathered bucket freed early",
        "a bucket is let go after its first use",
        _freed_after_first_use,
        "sharded parameters",
    ),
    (
        "waited before issued",
        "a gather is waited for before it is issued",
        _waited_before_issued,
        "sharded chain",
    ),
    (
        "gathers in another order on one device",
        "members of a group issue their gathers in different orders",
        _other_order_on_device_1,
        "sharded chain",
    ),
    (
        "gathers of each other's bucket",
        "two gathers exchange their buckets",
        _exchange(ins.AllGatherInstruction, "bucket"),
        "sharded chain",
    ),
    (
        "parameters exchanged in a chunk",
        "a chunk takes gathered parameters for one another",
        _every(ins.Run, _params_in_reverse),
        "sharded optimizer",
    ),
    (
        "gathered parameters ignored",
        "chunks read the device's own copies, which nobody updates",
        _every(ins.Run, lambda x: {"params": ()}),
        "sharded optimizer",
    ),
    (
        "shard of the neighbor delivered",
        "the optimizer takes its shard for that of another replica",
        _every(ins.Deliver, lambda x: {} if x.shard is None else {"shard": 1 - x.shard}),
        "sharded optimizer",
    ),
    (
        "packed in another order",
        "gradients lie in a bucket under each other's names",
        _every(ins.PackInstruction, lambda x: {"take": x.take[::-1]}),
        "sharded, tied",
    ),
    (
        "summed in a bucket in another order",
        "gradients are added up under each other's names",
        _every(ins.Add, lambda x: {"take": x.take[::-1]}),
        "sharded optimizer",
    ),
    (
        "gather into what is not kept",
        "a gather takes a bucket for one that is kept whole",
        _every(ins.AllGatherInstruction, lambda x: {"kept": not x.kept}),
        "sharded parameters",
    ),
):
    _plan_bug(_name, _what, _edit, scenario=_scenario)
