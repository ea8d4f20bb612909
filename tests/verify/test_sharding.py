"""The static check of buckets and shards: what it reports for the results of a wrong rewrite.

Every graph with a fault that can still be executed is executed as well, to show that the check refuses graphs
that give other numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.values import Partial, Replicated, Sharded
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.p2p import Send
from lightning_piper.ops.communication.reduce import AllReduce, ReduceScatter
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import eliminate
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static_check import check
from tests.dags import chunk, run, split
from tests.models import captured
from tests.plan.programs import dag_of

LEVELS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"shard_optimizer": True},
    2: {"shard_grads": True},
    3: {"shard_params": True},
}
GROUPS = [[0, 2], [1, 3]]


def sharded(level: int, model: str = "mlp", **fields: Any) -> TrainingDAG:
    """Two stages on two replicas each, with two microbatches."""
    stages = [{"op": "place", "filter": {"PP": i}, "devices": group} for i, group in enumerate(GROUPS)]
    replicate = {"op": "replicate", "filter": {}, "devices": GROUPS, **LEVELS[level], **fields}
    return dag_of(captured(model).step, [*stages, split(2), replicate])


def grads(dag: TrainingDAG, kind: type[Node], parameter: str = "first.weight") -> list[Any]:
    """The nodes of a type that make or read the gradient of a parameter."""
    return [
        n
        for n in dag.of_type(kind)
        if (values := [*n.outputs, *map(dag.value, n.reads)])
        and values[0].kind == "grad"
        and parameter in values[0].names
    ]


def bypass(dag: TrainingDAG, node: Node) -> None:
    """Remove a node, and let its readers read its input instead."""
    for reader in dag.users(node):
        dag.substitute(reader, (node.id, 0), node.inputs[0])
    dag.remove([node])


def change(dag: TrainingDAG, node: Node, **fields: Any) -> None:
    dag.change(node, outputs=(dataclasses.replace(node.outputs[0], **fields),))


def unsummed(dag: TrainingDAG) -> None:
    (scatter,) = grads(dag, ReduceScatter)
    bypass(dag, scatter)


def unsummed_though_it_says_so(dag: TrainingDAG) -> None:
    """Each replica keeps its shard of its own gradient, though the value says that it is the sum."""
    for scatter in grads(dag, ReduceScatter):
        total = dag.nodes[scatter.inputs[0][0]]
        dag.change(total, outputs=scatter.outputs)
        bypass(dag, scatter)


def one_microbatch_unsummed(dag: TrainingDAG) -> None:
    bypass(dag, grads(dag, ReduceScatter)[0])


def summed_twice(dag: TrainingDAG) -> None:
    (scatter,) = grads(dag, ReduceScatter)
    again = dag.add(
        AllReduce(
            inputs=scatter.inputs,
            outputs=(dataclasses.replace(dag.value(scatter.inputs[0]), placement=Replicated()),),
            devices=scatter.devices,
            stream="reduce",
        )
    )
    dag.rewire(scatter, inputs=((again.id, 0),))


def shard_summed_again(dag: TrainingDAG) -> None:
    (scatter,) = grads(dag, ReduceScatter)
    readers = dag.users(scatter)
    again = dag.add(dataclasses.replace(scatter, id=-1, inputs=((scatter.id, 0),)))
    for reader in readers:
        dag.substitute(reader, (scatter.id, 0), (again.id, 0))


def gather_missing(dag: TrainingDAG) -> None:
    reader = chunk(dag, "B[PP=1,MB=1]")
    dag.rewire(reader, params=(None,) * len(reader.params))


def gathers_missing(dag: TrainingDAG) -> None:
    """The parameters are updated in shards, and no chunk gathers them."""
    for reader in dag.of_type(Chunk):
        dag.rewire(reader, params=())
    dag.remove([*dag.of_type(AllGather), *dag.of_type(Parameters)])


def frozen_parameter_not_gathered(dag: TrainingDAG) -> None:
    reader = chunk(dag, "F[PP=0,MB=0]")
    names = dag.interface(reader).params
    dag.rewire(
        reader,
        params=tuple(None if n == "mixing" else ref for n, ref in zip(names, reader.params, strict=True)),
    )


def shard_read(dag: TrainingDAG) -> None:
    reader = chunk(dag, "F[PP=0,MB=0]")
    dag.rewire(reader, params=tuple(ref and dag.nodes[ref[0]].inputs[0] for ref in reader.params))


def gather_of_the_other_stage(dag: TrainingDAG) -> None:
    reader, other = chunk(dag, "F[PP=0,MB=0]"), chunk(dag, "F[PP=1,MB=0]")
    dag.rewire(reader, params=other.params)


def other_bucket(dag: TrainingDAG) -> None:
    """The chunk reads the bucket of the weight as that of the bias, and the other way round."""
    reader = chunk(dag, "F[PP=0,MB=0]")
    assert len(set(reader.params)) == 2
    dag.rewire(reader, params=reader.params[::-1])


def gradient_as_parameter(dag: TrainingDAG) -> None:
    """The gather brings the gradient of the last microbatch instead of the parameter."""
    gather, scatter = dag.nodes[chunk(dag, "F[PP=0,MB=1]").params[0][0]], grads(dag, ReduceScatter)[0]  # type: ignore[index]
    dag.rewire(gather, inputs=((scatter.id, 0),))


def other_order_in_the_bucket(dag: TrainingDAG) -> None:
    """Parameters lie in another order than their gradients, so that a shard's update changes the wrong
    elements.
    """
    for node in [*dag.of_type(Parameters), *dag.of_type(AllGather)]:
        bucket = node.outputs[0].bucket
        assert bucket is not None
        turned = dataclasses.replace(bucket, names=bucket.names[::-1], tensors=bucket.tensors[::-1])
        change(dag, node, bucket=turned, names=turned.names)


def other_memory_in_the_bucket(dag: TrainingDAG) -> None:
    """The names agree, but the elements of the weight lie in another order."""
    for node in [*dag.of_type(Parameters), *dag.of_type(AllGather)]:
        bucket = node.outputs[0].bucket
        assert bucket is not None
        specs = tuple(dataclasses.replace(s, stride=s.stride[::-1]) for s in bucket.tensors)
        change(dag, node, bucket=dataclasses.replace(bucket, tensors=specs))


def other_dtype(dag: TrainingDAG) -> None:
    for node in [*dag.of_type(Parameters), *dag.of_type(AllGather)]:
        bucket = node.outputs[0].bucket
        assert bucket is not None
        low = bucket.in_dtype(torch.bfloat16)
        change(dag, node, bucket=low, tensors=(low.part if isinstance(node, Parameters) else low.whole,))


def too_many_shards(dag: TrainingDAG) -> None:
    for node in list(dag.nodes.values()):
        for value in node.outputs:
            if value.bucket is not None:
                more = dataclasses.replace(value.bucket, mesh=Mesh.flat(4))
                change(
                    dag,
                    node,
                    bucket=more,
                    tensors=(more.part if isinstance(value.placement, Sharded) else more.whole,),
                )


def shards_twice(dag: TrainingDAG) -> None:
    """Two chunks gather from different copies of the shards, of which the optimizer updates only one."""
    reader = chunk(dag, "F[PP=0,MB=0]")
    gather = dag.nodes[reader.params[0][0]]  # type: ignore[index]
    copy = dag.add(dataclasses.replace(dag.nodes[gather.inputs[0][0]], id=-1))
    own = dag.add(dataclasses.replace(gather, id=-1, inputs=((copy.id, 0),)))
    dag.rewire(reader, params=((own.id, 0),) * len(reader.params))


def optimizer_has_the_whole(dag: TrainingDAG) -> None:
    """Gradients are all-reduced although parameters are gathered, so that nothing tells whose update counts."""
    for scatter in list(dag.of_type(ReduceScatter)):
        whole = dataclasses.replace(dag.value(scatter.inputs[0]), placement=Replicated())
        total = dag.add(
            AllReduce(inputs=scatter.inputs, outputs=(whole,), devices=scatter.devices, stream="reduce")
        )
        for reader in dag.users(scatter):
            dag.substitute(reader, (scatter.id, 0), (total.id, 0))
        dag.remove([scatter])


def microbatch_dropped(dag: TrainingDAG) -> None:
    (total,) = grads(dag, Accumulate)
    dag.rewire(total, inputs=total.inputs[1:])


def microbatch_twice(dag: TrainingDAG) -> None:
    (total,) = grads(dag, Accumulate)
    dag.rewire(total, inputs=(*total.inputs, total.inputs[0]))


def microbatch_for_another(dag: TrainingDAG) -> None:
    first, second = grads(dag, Pack)
    dag.rewire(second, inputs=first.inputs)


def joined_and_alone(dag: TrainingDAG) -> None:
    """A microbatch is summed over replicas together with the next one, and a second time alone."""
    eliminate(dag)
    scatter = grads(dag, ReduceScatter)[-1]
    both = dag.nodes[scatter.inputs[0][0]]
    assert isinstance(both, Accumulate) and len(both.inputs) == 2
    total = next(n for n in dag.users(scatter) if isinstance(n, Accumulate))
    alone = dag.add(dataclasses.replace(scatter, id=-1, inputs=both.inputs[:1]))
    dag.rewire(total, inputs=(*total.inputs, (alone.id, 0)))


def joined_without_the_first(dag: TrainingDAG) -> None:
    eliminate(dag)
    both = dag.nodes[grads(dag, ReduceScatter)[-1].inputs[0][0]]
    assert isinstance(both, Accumulate) and len(both.inputs) == 2
    dag.rewire(both, inputs=both.inputs[1:])


def packed_elsewhere(dag: TrainingDAG) -> None:
    """The gradients of the other stage are packed in place of these."""
    first, other = grads(dag, Pack)[0], grads(dag, Pack, "second.weight")[0]
    dag.rewire(first, inputs=other.inputs)


def updated_twice(dag: TrainingDAG) -> None:
    dag.add(dataclasses.replace(grads(dag, Update)[0], id=-1))


def shard_and_partial(dag: TrainingDAG) -> None:
    total = next(n for n in grads(dag, Accumulate) if isinstance(n.outputs[0].placement, Sharded))
    dag.rewire(total, inputs=(dag.nodes[total.inputs[0][0]].inputs[0], *total.inputs[1:]))


def shard_and_whole(dag: TrainingDAG) -> None:
    """A tied parameter is summed in shards in one region, and whole in the other."""
    update = next(u for u in grads(dag, Update, "a.weight") if len(u.inputs) == 2)
    other = dataclasses.replace(dag.value(update.inputs[0]), placement=Replicated())
    source = dag.nodes[update.inputs[0][0]]
    whole = dag.add(AllReduce(inputs=source.inputs, outputs=(other,), devices=source.devices))
    change(dag, whole, tensors=dag.value(source.inputs[0]).tensors)
    dag.rewire(update, inputs=((whole.id, 0), update.inputs[1]))


def names_turned(dag: TrainingDAG) -> None:
    """Every shard of the weight is taken for one of the bias."""
    for node in dag.nodes.values():
        for value in node.outputs:
            if value.kind == "grad" and value.bucket is not None:
                change(dag, node, names=value.names[::-1])


def shard_without_bucket(dag: TrainingDAG) -> None:
    change(dag, grads(dag, ReduceScatter)[0], bucket=None)


def gradients_said_to_be_whole(dag: TrainingDAG) -> None:
    for reduction in grads(dag, AllReduce) + grads(dag, AllReduce, "second.weight"):
        bypass(dag, reduction)
    for node in dag.nodes.values():
        outputs = (
            dataclasses.replace(v, placement=Replicated()) if v.kind == "grad" else v for v in node.outputs
        )
        dag.change(node, outputs=tuple(outputs))


def metrics_unsummed(dag: TrainingDAG) -> None:
    reduction = next(n for n in dag.of_type(AllReduce) if dag.value(n.inputs[0]).kind == "metrics")
    dag.rewire(next(dag.of_type(StepReport)), inputs=reduction.inputs)
    dag.remove([reduction])


def metrics_said_to_be_whole(dag: TrainingDAG) -> None:
    metrics_unsummed(dag)
    for node in dag.of_type(Metrics):
        change(dag, node, placement=Replicated())


def replicas_turned(dag: TrainingDAG) -> None:
    """All sums and shards of a stage have its devices in another order than its chunks."""
    for node in dag.nodes.values():
        if node.devices == (0, 2) and not isinstance(node, Chunk | Send):
            dag.change(node, devices=(2, 0))
    for reader in dag.of_type(Chunk):
        if reader.devices == (2, 0):
            dag.change(reader, devices=(0, 2))


@dataclass(frozen=True)
class Fault:
    """A fault, and what the check says of it. If `runs`, the graph can still be executed and gives other
    numbers; faults of shards show in the next step at the earliest.
    """

    apply: Callable[[TrainingDAG], None]
    level: int
    says: str
    runs: bool = False
    model: str = "mlp"
    bucket_size: float = 25.0


OF_FIRST = r"gradient of first.weight, first.bias"
FAULTS = [
    Fault(unsummed, 1, r"no directive sums the " + OF_FIRST + r" over devices \[0, 2\]"),
    Fault(unsummed_though_it_says_so, 1, r"accumulate .* describes its sum differently from its "
                                         r"terms", runs=True),
    Fault(one_microbatch_unsummed, 2, r"adds grad first.weight, first.bias of B\[PP=0\] with the placement S\(0\) to a "
                                      r"value with the placement P\(sum\)"),
    Fault(summed_twice, 1, r"reducescatter .* sums grad .* over devices that each hold the whole "
                           r"value", runs=True),
    Fault(shard_summed_again, 1, r"reducescatter .* sums grad .* over devices that each hold a shard of this value"),
    Fault(gather_missing, 3, r"B\[PP=1,MB=1\] .* reads the whole of second.weight, but this device "
                             r"has only a shard of it"),
    Fault(gathers_missing, 1, r"F\[PP=0,MB=0\] .* reads the whole of first.weight, but this device "
                              r"has only a shard of it"),
    Fault(frozen_parameter_not_gathered, 3, r"F\[PP=0,MB=0\] .* reads the whole of mixing, but this "
                                            r"device has only a shard of it",
          model="frozen"),
    Fault(shard_read, 3, r"F\[PP=0,MB=0\] .* reads parameter first.weight from a shard: gather it first"),
    Fault(gather_of_the_other_stage, 3, r"reads parameter first.weight from param:second.weight.*, which "
                                        r"does not hold first.weight"),
    Fault(other_bucket, 3, r"reads parameter first.weight from param:first.bias .*, which does not hold "
                           r"first.weight", bucket_size=1e-6),
    Fault(gradient_as_parameter, 3, r"allgather .* describes its output differently from its input "
                                    r"grad:first.weight,first.bias"),
    Fault(other_order_in_the_bucket, 3, r"gathers first.weight from shards that the optimizer does not update"),
    Fault(other_memory_in_the_bucket, 3, r"in a bucket that holds first.weight as .*, but this parameter "
                                         r"is"),
    Fault(other_dtype, 3, r"keeps parameters in torch.bfloat16, but some of them have another dtype"),
    Fault(too_many_shards, 3, r"in a bucket of 4 shards, but 2 replicas"),
    Fault(shards_twice, 3, r"first.weight has shards twice on the same devices, in parameters .* and "
                           r"parameters .*"),
    Fault(optimizer_has_the_whole, 1, r"gathers first.weight from shards, but the optimizer updates the "
                                      r"whole of it"),
    Fault(microbatch_dropped, 1, OF_FIRST + r" \(update .*\): of .*, samples 0:1 are missing", runs=True),
    Fault(microbatch_dropped, 2, OF_FIRST + r" \(update .*\): of .*, samples 0:1 are missing", runs=True),
    Fault(microbatch_twice, 1, OF_FIRST + r" \(update .*\): of .*, samples 0:1 count 2 times", runs=True),
    Fault(microbatch_twice, 2, OF_FIRST + r" \(accumulate .*\): samples 0:1 count 2 times", runs=True),
    Fault(microbatch_for_another, 2, OF_FIRST + r".*: samples 0:1 count 2 times", runs=True),
    Fault(joined_and_alone, 2, OF_FIRST + r" \(accumulate .*\): samples 0:1 count more than once", runs=True),
    Fault(joined_without_the_first, 2, OF_FIRST + r" \(update .*\): of .*, samples 0:1 are "
                                                  r"missing", runs=True),
    Fault(packed_elsewhere, 2, r"pack .* packs first.weight, first.bias, which grad second.weight.* does "
                               r"not hold"),
    Fault(updated_twice, 3, r"first.weight is updated twice on the same devices, by update .* and update"),
    Fault(shard_and_partial, 2, r"with the placement S\(0\) to a value with the placement P\(sum\)"),
    Fault(shard_and_whole, 3, r"gradient of a.weight \(update .*\): adds R and S\(0\)", model="used_twice"),
    Fault(names_turned, 2, r"differently from the tensor of the bucket of first.weight, first.bias"),
    Fault(shard_without_bucket, 2, r"reducescatter .* makes grad:first.weight,first.bias in shards, but "
                                   r"does not put it into a bucket"),
    Fault(gradients_said_to_be_whole, 0, r"declares grad:first.weight,first.bias as R, but its code makes "
                                         r"grad:first.weight, first.bias P\(sum\)"),
    Fault(metrics_unsummed, 3, r"report .* reads metrics:returned loss,train_loss of metrics"),
    Fault(replicas_turned, 3, r"has device [02] as replica [01], but in another node this device is replica [01]"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.apply.__name__}-{fault.level}")
def test_a_fault_is_refused(fault: Fault) -> None:
    dag = sharded(fault.level, fault.model, bucket_size=fault.bucket_size)
    check(dag, final=True)
    clean = run(fault.model, dag)
    fault.apply(dag)
    with pytest.raises(VerificationError, match=fault.says):
        check(dag, final=True)
    if fault.runs:
        assert compare(clean, run(fault.model, dag), {}).verdict == "differs"


@pytest.mark.parametrize("fault, says", [
    (metrics_unsummed, r"report .* reads metrics.* of one device only: sum it over the devices"),
    (metrics_said_to_be_whole, r"metrics .* makes a value with the placement R, but the step has 2 devices"),
])  # fmt: skip
def test_metrics_of_replicas_alone_are_refused(fault: Callable[[TrainingDAG], None], says: str) -> None:
    """One stage: every device has the value that the report reads, though only its own replica's part of
    it.
    """
    place = {"op": "place", "filter": {}, "devices": [0, 1]}
    dag = dag_of(captured("mlp").step, [place, {"op": "replicate", "filter": {}, "devices": [0, 1]}])
    check(dag, final=True)
    clean = run("mlp", dag)
    fault(dag)
    with pytest.raises(VerificationError, match=says):
        check(dag, final=True)
    assert compare(clean, run("mlp", dag), {}).verdict == "differs"


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("kept", [[0, 1], [1, 2], [2, 3], [0, 1, 2], [1, 2, 3]])
def test_any_part_of_a_sum_may_be_summed_over_replicas_at_once(level: int, kept: list[int]) -> None:
    """Also one that does not begin with the first microbatch, as 1F1B has it."""
    group = [0, 1]
    dag = dag_of(
        captured("mlp", 8).step,
        [
            {"op": "place", "filter": {}, "devices": group},
            split(4),
            {"op": "replicate", "filter": {}, "devices": group, **LEVELS[level]},
        ],
    )
    (total,) = (n for n in grads(dag, Accumulate) if isinstance(n.outputs[0].placement, Sharded))
    parts = [dag.nodes[total.inputs[i][0]] for i in kept]
    sums = dag.nodes[parts[0].inputs[0][0]]
    both = dag.add(
        Accumulate(inputs=tuple(part.inputs[0] for part in parts), outputs=sums.outputs, devices=(0, 1))
    )
    dag.rewire(parts[0], inputs=((both.id, 0),))
    left = tuple(ref for i, ref in enumerate(total.inputs) if i not in kept[1:])
    dag.rewire(total, inputs=left)
    check(dag, final=True)
    assert isinstance(both.outputs[0].placement, Partial)
    dag.rewire(total, inputs=left[:-1])
    with pytest.raises(VerificationError, match=r"samples \d:\d are missing"):
        check(dag, final=True)
