"""`replicate(shard_size=...)`: groups of replicas that each have all shards (HSDP). The rewritten program, what
it communicates and holds, its errors, and what the checks find in programs with a bug.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

import lightning_piper as piper
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, GROUPS, Mesh
from lightning_piper.ir.values import Kind, Replicated
from lightning_piper.ops.base import OPERATIONS
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.reduce import AllReduce, AllReduceShards, ReduceScatter
from lightning_piper.ops.reference import Made, Reference
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.plan import compile_plans
from lightning_piper.plan.instructions import Collective
from lightning_piper.simulate import Link, Network, simulate
from lightning_piper.testing import case
from lightning_piper.testing.models import Spec
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.models import captured
from tests.plan.programs import dag_of, split


def program(zero: int = 3, shard_size: int | None = 2, **fields: Any) -> list[dict[str, Any]]:
    replicate = {"op": "replicate", "zero": zero, **fields}
    if shard_size is not None:
        replicate["shard_size"] = shard_size
    return [{"op": "place", "filter": {}, "devices": [0, 1, 2, 3]}, replicate]


def mlp(zero: int = 3, **fields: Any) -> TrainingDAG:
    return dag_of(captured("mlp").step, program(zero, **fields))


def test_the_rewritten_program() -> None:
    """Gradients of ZeRO-2: a reduce-scatter within a group, and an all-reduce of the shard over the groups."""
    lines = [line for line in str(mlp(2)).splitlines() if "grad:first" in line and "#1" in line]
    assert lines == [
        "%14 pack [PP=0] @0,1,2,3 (%3.0) -> grad:first.weight,first.bias float32[128] P(sum) #1",
        "%19 reducescatter [PP=0] @0,1,2,3 stream=reduce (%14.0) -> grad:first.weight,first.bias float32[64] "
        "S(0) groups=P(sum) #1",
        "%15 accumulate [PP=0] @0,1,2,3 (%19.0) -> grad:first.weight,first.bias float32[64] S(0) "
        "groups=P(sum) #1",
        "%20 allreduce.groups [PP=0] @0,1,2,3 stream=reduce (%15.0) -> grad:first.weight,first.bias "
        "float32[64] S(0) #1",
    ]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "losses"])
def test_equals_one_device(name: str, zero: int) -> None:
    model = captured(name)
    dag = dag_of(model.step, program(zero))
    check(dag, final=True)
    alone, found = (interpret(d, model.tensors, model.leaves) for d in (dag_of(model.step, []), dag))
    for grad, expected in ((found.grads[n], x) for n, x in alone.grads.items()):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    no_sum_over_groups(dag)  # negative control
    with pytest.raises(VerificationError, match="differs between the devices"):
        interpret(dag, model.tensors, model.leaves)


def test_communication_is_within_groups_and_across_shards() -> None:
    plans = compile_plans(dag_of(captured("mlp").step, [*program()]))
    found: dict[str, set[tuple[int, ...]]] = {}
    for device in range(4):
        for each in plans[device].instructions:
            if isinstance(each, Collective) and getattr(each, "bucket", None) is not None:
                found.setdefault(each.op, set()).add(each.members)
    within, across = {(0, 1), (2, 3)}, {(0, 2), (1, 3)}
    assert found == {"all_gather": within, "reduce_scatter": within, "reduce_groups": across}


def test_a_device_holds_a_shard_of_its_group() -> None:
    """Half of everything, and a quarter without groups. Shards are padded to 64 elements."""
    held = {
        size: sum(bucket.shard for bucket in compile_plans(mlp(3, shard_size=size))[0].shards)
        for size in (2, None)
    }
    params = sum(info.spec.numel for info in captured("mlp").step.params.values())
    assert params == 44 and held == {2: 128, None: 128}  # two buckets, each padded
    wide = piper.compile(Wide(), torch.randn(8, 64), piper.parallel(dp=(2, 2), zero=3)).plans[0]
    flat = piper.compile(Wide(), torch.randn(8, 64), piper.parallel(dp=4, zero=3)).plans[0]
    assert [sum(b.shard for b in plan.shards) for plan in (wide, flat)] == [64 * 64 // 2, 64 * 64 // 4]


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()


def test_the_simulator_knows_the_groups() -> None:
    """With links that are fast within a group, gathers take no longer than those of two replicas."""
    dag = mlp(3)
    plans = compile_plans(dag)
    groups = {
        (0, 1): Link(latency=1),
        (2, 3): Link(latency=1),
        (0, 2): Link(latency=50),
        (1, 3): Link(latency=50),
    }
    network = Network(Link(latency=0), groups=groups)
    found = simulate(dag, plans, {"F": 1, "B": 2}, network)
    flat = mlp(3, shard_size=None)
    everyone = Network(Link(latency=0), groups={(0, 1, 2, 3): Link(latency=50)})
    assert found.step_time < simulate(flat, compile_plans(flat), {"F": 1, "B": 2}, everyone).step_time


@pytest.mark.parametrize("fields, message", [
    ({"shard_size": 3}, "4 replicas cannot be divided into groups of 3. Give 2 or 4"),
    ({"shard_size": 1}, "Give an integer >= 2"),
    ({"shard_size": 2.5}, "Give an integer >= 2"),
    ({"shard_size": 2, "zero": 0}, "the directive shards nothing. Give zero=1, 2 or 3"),
])  # fmt: skip
def test_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        mlp(**fields)


def test_regions_that_share_a_parameter_need_the_same_groups() -> None:
    step = captured("tied").step
    stages = [
        {"op": "replicate", "filter": {"PP": [0, 1]}, "zero": 3, "shard_size": 2},
        {"op": "replicate", "filter": {"PP": 2}, "zero": 3},
    ]
    place = {"op": "place", "filter": {}, "devices": [0, 1, 2, 3]}
    with pytest.raises(DirectiveError, match="over other groups of replicas"):
        dag_of(step, [place, *stages])
    dag_of(step, [place, *({**stage, "shard_size": 2} for stage in stages)])


def test_a_group_of_all_replicas_is_no_group() -> None:
    assert str(mlp(3, shard_size=4)) == str(mlp(3, shard_size=None))


# Meshes


def test_a_mesh_is_divided_along_its_lines() -> None:
    groups = {0: 0, 1: 0, 2: 1, 3: 1}
    mesh = Mesh.flat(4).grouped(groups)
    assert mesh == Mesh((GROUPS, DATA), (2, 2), (0, 1, 2, 3))
    assert (mesh.lines(DATA), mesh.lines(GROUPS)) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    tensors = Mesh((DATA, "tp"), (4, 2), tuple(range(8)))
    mesh = tensors.grouped({rank: rank // 4 for rank in range(8)})
    assert mesh.axes == (GROUPS, DATA, "tp") and mesh.shape == (2, 2, 2)
    assert set(mesh.lines(DATA)) == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert set(mesh.lines(GROUPS)) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert Mesh.flat(4).grouped(dict.fromkeys(range(4), 0)) == Mesh.flat(4)
    with pytest.raises(ValueError, match=r"groups of different sizes: \[\(3, 1\)\]"):
        Mesh.flat(4).grouped({0: 0, 1: 0, 2: 0, 3: 1})


# Composition


MODELS = {
    "pp": Spec(("linear", "residual"), (0, 1), exact=False),
    "experts": Spec(("linear", "experts", "linear"), (0, 0, 0), exact=False),
}


@pytest.mark.parametrize("zero", [1, 3])
def test_stages_of_groups(zero: int) -> None:
    model = case(MODELS["pp"], 8)
    program = piper.parallel(pp=2, dp=(2, 2), zero=zero, microbatches=2)
    piper.verify(model.module, model.batch, program).require()


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]])
def test_experts_of_groups(groups: list[list[int]]) -> None:
    """Devices with the same experts are in one group, in different groups, or there are none."""
    model = case(MODELS["experts"], 8)
    program = [
        piper.Place(filter={}, devices=[0, 1, 2, 3]),
        piper.Replicate(zero=3, shard_size=2),
        piper.ShardExperts(filter={"EP": "*"}, devices=groups),
    ]
    piper.verify(model.module, model.batch, program).require()


# Bugs


def _bypass(dag: TrainingDAG, node: Any) -> None:
    for reader in dag.users(node):
        dag.substitute(reader, (node.id, 0), node.inputs[0])
    dag.remove([node])


def _first(dag: TrainingDAG, kind: type[Any]) -> Any:
    return next(node for node in dag.of_type(kind) if node.outputs[0].kind in (Kind.GRAD, Kind.PARAM))


def _regrouped(dag: TrainingDAG, kinds: tuple[type[Any], ...], mesh: Mesh) -> None:
    """Give the buckets of some nodes another mesh."""
    for kind in kinds:
        for node in dag.of_type(kind):
            value = node.outputs[0]
            if value.bucket is not None:
                bucket = dataclasses.replace(value.bucket, mesh=mesh)
                dag.change(node, outputs=(dataclasses.replace(value, bucket=bucket),))


def no_sum_over_groups(dag: TrainingDAG) -> None:
    for node in list(dag.of_type(AllReduceShards)):
        _bypass(dag, node)


def no_sum_within_groups(dag: TrainingDAG) -> None:
    for node in list(dag.of_type(ReduceScatter)):
        _bypass(dag, node)


def summed_twice(dag: TrainingDAG) -> None:
    node = _first(dag, AllReduceShards)
    readers = dag.readers((node.id, 0))
    again = dag.add(dataclasses.replace(node, id=-1, origin=None, inputs=((node.id, 0),)))
    for reader in readers:
        dag.substitute(reader, (node.id, 0), (again.id, 0))


def whole_sum_within_a_group(dag: TrainingDAG) -> None:
    """An all-reduce of the bucket instead of the reduce-scatter and the sum over the groups."""
    node = _first(dag, AllReduceShards)
    total, scatter = dag.nodes[node.inputs[0][0]], _first(dag, ReduceScatter)
    pack = dag.nodes[scatter.inputs[0][0]]
    whole = dataclasses.replace(pack.outputs[0], placement=Replicated())
    reduced = dag.add(
        AllReduce(
            inputs=((pack.id, 0),), outputs=(whole,), tags=pack.tags, devices=pack.devices, stream="reduce"
        )
    )
    update = next(user for user in dag.users(node) if isinstance(user, Update))
    dag.substitute(update, (node.id, 0), (reduced.id, 0))
    dag.remove([node, total, scatter])


def undeclared(dag: TrainingDAG) -> None:
    """A reduce-scatter that claims to be complete."""
    node = _first(dag, ReduceScatter)
    value = dataclasses.replace(node.outputs[0], others=())
    dag.change(node, outputs=(value,))


def other_groups_for_gathers(dag: TrainingDAG) -> None:
    crossed = Mesh.flat(4).grouped({0: 0, 2: 0, 1: 1, 3: 1})
    _regrouped(dag, (Parameters, AllGather), crossed)


def one_group_forgotten(dag: TrainingDAG) -> None:
    """Buckets of two shards over the first two replicas, as if these were all."""
    half = Mesh((DATA, "tp"), (2, 2), (0, 1, 2, 3))
    _regrouped(dag, (Parameters, AllGather), half)


def sum_before_the_last_term(dag: TrainingDAG) -> None:
    """One microbatch's shard is summed over the groups before it is added to the shards of the others."""
    total = next(node for node in dag.of_type(Accumulate) if len(node.inputs) > 1)
    reduced = next(user for user in dag.users(total) if isinstance(user, AllReduceShards))
    early = dag.add(dataclasses.replace(reduced, id=-1, origin=None, inputs=(total.inputs[0],)))
    dag.rewire(total, inputs=((early.id, 0), *total.inputs[1:]))


BUGS: dict[Callable[[TrainingDAG], None], str] = {
    no_sum_over_groups: "reaches the optimizer as a sum over one group of replicas",
    no_sum_within_groups: "describes its sum differently from its terms",
    summed_twice: "over groups that all have the same shard of it",
    whole_sum_within_a_group: "over the 2 replicas of a group, but there are 2 groups",
    undeclared: "describes its shard differently",
    other_groups_for_gathers: "from shards that the optimizer does not update",
    one_group_forgotten: "of 2 shards, but 4 replicas share",
    sum_before_the_last_term: "describes its sum differently from its terms|to S",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_check_finds(bug: Callable[[TrainingDAG], None]) -> None:
    model = case(Spec(("linear", "residual"), (0, 1), exact=False), 8)
    dag = dag_of(model.step, [*program(3)[:1], *split(2), *program(3)[1:]])
    check(dag, final=True)
    bug(dag)
    with pytest.raises(VerificationError, match=BUGS[bug]):
        check(dag, final=True)


@pytest.mark.parametrize("patched, wrong", [
    ("same_shard", lambda self, replica: self.shard_group(replica)),
    ("same_shard", lambda self, replica: (replica,)),
    ("same_shard", lambda self, replica: (*self.mesh.line(GROUPS, replica), replica)),
    ("shard_group", lambda self, replica: self.mesh.line(GROUPS, replica)),
], ids=["sum within the group again", "no sum", "own shard twice", "gather over groups"])  # fmt: skip
def test_the_interpreter_finds_what_the_check_trusts(patched: str, wrong: Any) -> None:
    """A bucket that lists the wrong members."""
    model = case(Spec(("linear", "residual"), (0, 1), exact=False), 8)
    program = piper.parallel(dp=(2, 2), zero=2)
    piper.verify(model.module, model.batch, program).require()
    with mock.patch.object(Bucket, patched, wrong), pytest.raises(VerificationError):
        piper.verify(model.module, model.batch, program).require()


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_sum_that_is_scaled_shows(factor: float) -> None:
    """The groups take the mean of their shards instead of the sum, or scale twice."""
    model = case(Spec(("linear", "residual"), (0, 1), exact=False), 8)
    program, right = piper.parallel(dp=(2, 2), zero=2), OPERATIONS[AllReduceShards]

    def scaled(run: Reference, node: Any) -> Made:
        return [[[x * factor for x in bundle] for bundle in made] for made in right.interpret(run, node)]

    wrong = {AllReduceShards: dataclasses.replace(right, interpret=scaled)}
    with mock.patch.dict(OPERATIONS, wrong), pytest.raises(VerificationError):
        piper.verify(model.module, model.batch, program).require()
