"""`shard_experts` on graphs: the result in all combinations with other directives, in either order."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.capture.eager.eager_reference import run_eagerly
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import Directive
from lightning_piper.directives.program import parse
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.values import Slice, TensorSpec
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.reduce import ReduceScatter
from lightning_piper.testing import (
    Case,
    Model,
    Spec,
    assert_same,
    case,
    make_batch,
    run_interpreter,
    run_plans,
)
from tests.dags import Fixed
from tests.forward import eager, leaves_of, run
from tests.groups import marked

# The numbers of one block grow: it trains its router and its experts, and no mode drops tokens.
EXACT = Spec(("linear", "experts", "places"), (0, 0, 1), exact=True)
ROUNDED = Spec(("experts", "crowded", "linear"), (0, 1, 1))
ALONE = Spec(("linear", "experts", "crowded"), (0, 0, 0))

STAGES, ALL = [[0, 2], [1, 3]], [0, 1, 2, 3]
TWICE = [[0, 1], [2, 3]]


def shard(devices: Any, **condition: Any) -> Directive:
    return piper.ShardExperts(filter=condition or {"EP": "*"}, devices=devices)


def replicate(devices: Any, **level: Any) -> Directive:
    return piper.Replicate(filter={}, devices=devices, bucket_size=1e-4, **level)


def together(devices: list[Any], *axes: str) -> list[Directive]:
    return [
        piper.Place(filter={}, devices=devices, axes=axes),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
    ]


def along(axis: str) -> Directive:
    return piper.ShardExperts(filter={"EP": "*"}, axis=axis)


def staged(schedule: Any, microbatches: int) -> list[Directive]:
    return list(schedule(2, microbatches, devices=STAGES))


# Name -> the earlier directives, and the two directives whose order does not matter.
PROGRAMS: dict[str, tuple[list[Directive], list[Directive]]] = {
    "ep2": (together([0, 1]), [replicate([0, 1]), shard([0, 1])]),
    "ep2, turned": (together([0, 1]), [replicate([0, 1]), shard([1, 0])]),
    "ep4": (together(ALL), [replicate(ALL), shard(ALL)]),
    "ep2 dp2": (together(ALL), [replicate(ALL), shard(TWICE)]),
    "ep2 dp2 zero2": (together(ALL), [replicate(ALL, shard_grads=True), shard([[0, 3], [1, 2]])]),
    "ep2 dp2 zero3": (together(ALL), [replicate(ALL, shard_params=True), shard([[2, 0], [1, 3]])]),
    "ep2 zero3": (together([0, 1]), [replicate([0, 1], shard_params=True), shard([0, 1])]),
    "mesh": (together(TWICE, "dp", "ep"), [replicate(ALL, shard_grads=True), along("ep")]),
    "mesh, other axis": (together(TWICE, "ep", "dp"), [replicate(ALL, shard_params=True), along("ep")]),
    "one layer": (together([0, 1]), [replicate([0, 1]), shard([0, 1], EP=0)]),
    "pp2 ep2": (staged(piper.schedules.one_f_one_b, 2), [replicate(STAGES), shard(STAGES)]),
    "pp2 ep2 zero1": (
        staged(piper.schedules.gpipe, 2),
        [replicate(STAGES, shard_optimizer=True), shard(STAGES)],
    ),
    "zero bubble": (
        staged(piper.schedules.zero_bubble, 4),
        [replicate(STAGES, shard_grads=True), shard(STAGES)],
    ),
    "two device groups": (staged(piper.schedules.dualpipe, 4), [replicate(STAGES), shard(STAGES)]),
}


@functools.cache
def compiled(name: str, spec: Spec, turned: bool) -> Compiled:
    head, pair = PROGRAMS[name]
    return compile_step(case(spec, 8).step, tuple([*head, *(pair[::-1] if turned else pair)]))


QUICK = [name for name in PROGRAMS if name not in ("ep2", "ep2 dp2")]
EITHER = list(itertools.product((EXACT, ROUNDED), PROGRAMS))


@pytest.mark.parametrize(
    "spec, name",
    marked(EITHER, [*itertools.product([EXACT], QUICK), (ROUNDED, "ep4")]),
    ids=[f"{'exact' if spec is EXACT else 'rounded'}-{name}" for spec, name in EITHER],
)
def test_the_result_is_that_of_one_device_in_either_order(spec: Spec, name: str) -> None:
    """Losses, gradients of routers, experts and all else; with exact arithmetic bit for bit. And both orders
    make the same of the step.
    """
    one = case(spec, 8)
    alone = run_eagerly(one.step, one.tensors, one.leaves, (Slice(0, 8),))
    assert all(
        alone.grads[f"blocks.{i}.router.weight"].any()
        for i, kind in enumerate(spec.blocks)
        if kind == "experts"
    )
    found = {}
    for turned in (False, True):
        made = compiled(name, spec, turned)
        found[turned] = run_interpreter(one, made.dag)
        assert_same(alone, found[turned], "bitwise" if spec.exact else "float64", terms=64)
        assert_same(found[turned], run_plans(one, made.dag), "bitwise")
    assert_same(found[False], found[True], "bitwise")
    kinds = [
        Counter(type(node) for node in compiled(name, spec, turned).dag.nodes.values())
        for turned in (False, True)
    ]
    assert kinds[0] == kinds[1]


def test_an_axis_of_a_mesh_says_what_groups_say() -> None:
    def text(devices: list[Any], axes: list[str], divide: Directive) -> str:
        directives = (*together(devices, *axes), replicate(ALL, shard_params=True), divide)
        return str(compile_step(case(EXACT, 8).step, directives).dag)

    lines = text(TWICE, ["dp", "ep"], along("ep"))
    assert lines == text(ALL, [], shard(TWICE))
    columns = text(TWICE, ["ep", "dp"], along("ep"))
    assert columns == text(ALL, [], shard([[0, 2], [1, 3]])) != lines
    assert text([ALL], ["dp", "ep"], along("ep")) == text(ALL, [], shard(ALL))
    deep = text([[[0], [1]], [[2], [3]]], ["node", "ep", "tp"], along("ep"))
    assert deep == lines


def test_each_region_has_its_own_mesh() -> None:
    """Two regions on the same devices, along other axes: the second place says nothing of the first."""
    other = piper.Place(filter={"PP": 1}, devices=TWICE, axes=["ep", "dp"])
    program: list[Directive] = [
        piper.Place(filter={"PP": 0}, devices=TWICE, axes=["dp", "ep"]),
        other,
        replicate(ALL),
    ]
    program += [piper.ShardExperts(filter={"PP": stage, "EP": "*"}, axis="ep") for stage in (0, 1)]
    dag = compile_step(case(EXACT, 8).step, program).dag
    found = {dag.regions[region].tags["PP"]: mesh.lines("ep") for region, mesh in dag.meshes.items()}
    assert found == {0: ((0, 1), (2, 3)), 1: ((0, 2), (1, 3))}
    flat = [piper.Place(filter={"PP": 1}, devices=ALL), *program[2:]]
    with pytest.raises(
        piper.DirectiveError,
        match=r"field 'axis': .*PP=1.* is placed on \[0, 1, 2, 3\], without a mesh. Place it on",
    ):
        compile_step(case(EXACT, 8).step, [program[0], *flat])
    backward = piper.Place(filter={"PASS": "B"}, devices=TWICE, axes=["ep", "dp"])
    with pytest.raises(
        piper.DirectiveError,
        match=r"field 'axes': .*another pass .* is on the mesh dp=2 x ep=2. Give both places the same axes",
    ):
        compile_step(
            case(EXACT, 8).step,
            [piper.Place(filter={"PASS": "F"}, devices=TWICE, axes=["dp", "ep"]), backward],
        )


@pytest.mark.parametrize(
    "devices, axes, axis, says",
    [
        (
            TWICE,
            ["dp", "tp"],
            "ep",
            r"with the mesh dp=2 x tp=2. Place it on a mesh with two or more devices along 'ep'",
        ),
        ([[0], [1], [2], [3]], ["dp", "ep"], "ep", r"with the mesh dp=4 x ep=1. Place it"),
        (
            TWICE,
            ["dp", "ep"],
            "data",
            r"field 'axis': 'data' is not the name of an axis that shards tensors. Give a name of 1 to 100 printable characters",
        ),
        (
            TWICE,
            ["dp"],
            "ep",
            r"field 'axes': .* has 1 name, but \[\[0, 1\], \[2, 3\]\] has 2 dimensions. Give one name for each "
            r"level",
        ),
        (
            [[0, 1], [2]],
            ["dp", "ep"],
            "ep",
            r"field 'devices': .* is not a mesh with the axes .*Give nested lists",
        ),
        (
            TWICE,
            ["dp", "dp"],
            "dp",
            r"field 'axes': \['dp', 'dp'\] is not usable. Give a list of different names",
        ),
        (TWICE, [], "ep", r"field 'devices': \[\[0, 1\], \[2, 3\]\] is a mesh without names of its axes"),
        (
            [[0, 1], [2, 0]],
            ["dp", "ep"],
            "ep",
            r"\[\[0, 1\], \[2, 0\]\] names device 0 more than once. Name each device once",
        ),
        (
            [[0, True]],
            ["dp", "ep"],
            "ep",
            r"\[\[0, True\]\] has True, which is not a device index. Give distinct integers",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(devices: Any, axes: Any, axis: str, says: str) -> None:
    program = [
        piper.Place(filter={}, devices=devices, axes=axes),
        piper.ShardExperts(filter={"EP": "*"}, axis=axis),
        replicate(ALL),
    ]
    with pytest.raises(piper.DirectiveError, match=says):
        compile_step(case(EXACT, 8).step, tuple(parse(program)))


@pytest.mark.parametrize(
    "name", marked(["ep2", "ep4", "ep2 dp2", "ep2 dp2 zero3", "pp2 ep2"], ["ep4", "ep2 dp2 zero3"])
)
def test_each_device_keeps_its_part(name: str) -> None:
    """1/EP of the stage's experts; a shard of that where several own the same and the directive shards
    parameters.
    """
    made = compiled(name, ROUNDED, False)
    whole = {n: info.spec.numel for n, info in made.step.params.items()}
    experts = {n for found in made.dag.code.routed.values() for n in found.params}
    degree = next(iter(made.dag.meshes.values())).parts
    for plan in made.plans.values():
        mine = {b for b in plan.shards if b.degree > 1}
        names = {n for b in mine for n in b.names}
        assert names == {n for n in experts if plan.device in _devices(made, n)}
        assert sum(spec.numel for b in mine for spec in b.tensors) * degree == sum(whole[n] for n in names)
        assert all(b.members == next(iter(made.dag.meshes.values())).size(DATA) for b in mine)


def _devices(made: Compiled, name: str) -> set[int]:
    return {d for node in made.dag.of_type(Parameters) for d in node.devices if name in node.outputs[0].names}


def test_nothing_is_summed_that_nobody_else_owns() -> None:
    """And each exchange is there once for each pass and microbatch: counts once for both passes."""
    dag = compiled("ep2", ALONE, False).dag
    assert not [node for node in dag.of_type(ReduceScatter) if node.outputs[0].others]
    assert (
        len([node for node in dag.of_type(AllGather) if node.outputs[0].others]) == 4
    )  # two of each layer, once a step
    directions = Counter((node.direction, node.region) for node in dag.of_type(AllToAll))
    layers = sorted(dag.meshes)
    assert directions == {
        (direction, r): {"counts": 2}.get(direction, 4)
        for direction in ("counts", "dispatch", "combine")
        for r in layers
    }
    twice = compiled("ep2 dp2", ALONE, False).dag
    assert (
        len([node for node in twice.of_type(ReduceScatter) if node.outputs[0].others]) == 4
    )  # of two layers, two buckets each


def test_owned_pieces_are_every_element_once() -> None:
    mesh = Mesh((DATA, "ep"), (2, 2), (0, 3, 1, 2))
    tensors = (TensorSpec((2, 50), torch.float32, (50, 1)), TensorSpec((3,), torch.float32, (1,)))
    bucket = Bucket(("a", "b"), tensors, mesh, torch.float32, along=("ep",))
    found: dict[str, list[int]] = {"a": [], "b": []}
    for replica in range(4):
        for name, start, stop, _ in bucket.local_shards(replica):
            found[name] += range(start, stop)
    assert {name: sorted(elements) for name, elements in found.items()} == {
        "a": list(range(200)),
        "b": list(range(6)),
    }
    assert [bucket.shard_group(r) for r in range(4)] == [(0, 1), (0, 1), (3, 2), (3, 2)]


class Evaluated(Model):
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)


EVALUATED = list(
    itertools.product(
        ("ep2, turned", "ep2 dp2 zero3", "pp2 ep2", "two device groups"), (False, True), (False, True)
    )
)


@pytest.mark.parametrize("name, turned, fit", marked(EVALUATED, [("ep2 dp2 zero3", True, False)]))
def test_evaluates_as_one_device(name: str, turned: bool, fit: bool) -> None:
    """In a fit from the shards of training."""
    head, pair = PROGRAMS[name]
    program = [*head, *(pair[::-1] if turned else pair)]
    module, batch = Evaluated(ROUNDED), make_batch(ROUNDED, 8)
    training = piper.compile(module, batch, program) if fit else None
    step = capture(module.eval(), batch, name="validation_step")
    made = compile_step(step, tuple(program), training=None if training is None else training.dag)
    wanted, logged = eager(module, "validation_step", batch)
    results = run_owned(made, module, list(batch.values()))
    for result in results:
        assert torch.allclose(result.metrics[0], logged["loss"], rtol=1e-13)
        assert torch.equal(result.metrics, results[0].metrics)
    assert len(leaves_of(wanted)) == len(results[0].results) == 1
    if training is not None:
        assert all(
            plan.shards.items() <= training.plans[device].shards.items()
            for device, plan in made.plans.items()
        )


def run_owned(made: Compiled, module: Any, leaves: list[torch.Tensor]) -> Any:
    with_parts = [b for plan in made.plans.values() for b in plan.shards if b.degree > 1]
    assert with_parts
    return run(made, module, leaves)


@pytest.mark.long
def test_brain_floats() -> None:
    """Plans are the interpreter's bits; against one device, rounding of the dtype."""
    module, batch = Model(ROUNDED).bfloat16(), {k: x.bfloat16() for k, x in make_batch(ROUNDED, 8).items()}
    head, pair = PROGRAMS["ep2 dp2 zero2"]
    made = piper.compile(module, batch, [*head, *pair])
    tensors = {made.step.canonical[n]: x.detach() for n, x in module.named_parameters()}
    one = Case(ROUNDED, module, batch, made.step, tensors)
    found = run_interpreter(one, made.dag)
    assert_same(found, run_plans(one, made.dag), "bitwise")
    alone = run_eagerly(made.step, tensors, one.leaves, (Slice(0, 8),))
    for name, gradient in alone.grads.items():
        assert found.grads[name].dtype is torch.bfloat16
        # Measured: 0.009 of the largest element; bfloat16 has 8 bits.
        assert float((found.grads[name] - gradient).abs().max()) <= 0.03 * float(gradient.abs().max()), name


@pytest.mark.parametrize("spec", [EXACT, ALONE], ids=["with places", "without places"])
def test_experts_are_sharded_before_a_recompute(spec: Spec) -> None:
    program = [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Recompute(filter={}),
        Fixed(),
        shard([0, 1]),
        replicate([0, 1]),
    ]
    says = (
        r"directive 3 .* R\[PP=0,EP=0\] is the second forward pass that directive 1 makes. Move this directive "
        r"before the recompute"
    )
    with pytest.raises(piper.DirectiveError, match=says):
        compile_step(case(spec, 8).step, program)
