"""`replicate` that shards (ZeRO): the rewritten program, equality with one device, the memory of each device,
and errors.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper.capture.eager.eager_reference import run_eagerly
from lightning_piper.directives import parse
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.reduce import ReduceScatter
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.plan import compile_plans
from lightning_piper.testing.equivalence import run_plans
from lightning_piper.verify.static_check import check
from tests.groups import marked
from tests.models import captured, fresh
from tests.plan.programs import dag_of, split
from tests.sharded import (
    LEVELS,
    NAMES,
    distance,
    finished,
    program,
    replicate,
    run,
    stages,
    trained_alone,
    trained_in_shards,
)

by_level = pytest.mark.parametrize("level", LEVELS, ids=NAMES)

# One gather of each bucket, which all chunks read, and one sum of each bucket over replicas and all
# microbatches.
OPTIMIZER = """
%29 parameters @0,1 -> param:second.weight,second.bias float32[64] S(0) #2
%30 parameters @0,1 -> param:first.weight,first.bias float32[64] S(0) #2
%31 allgather @0,1 stream=gather (%30.0) -> param:first.weight,first.bias float32[128] #2
%11 F[PP=0,MB=0] 0:1 @0,1 (%31.0) -> activation:tanh float32[1,6], saved #1
%12 F[PP=0,MB=1] 1:2 @0,1 (%31.0) -> activation:tanh float32[1,6], saved #1
%32 allgather @0,1 stream=gather (%29.0) -> param:second.weight,second.bias float32[128] #2
%13 F[PP=1,MB=0] 0:1 @0,1 (%11.0, %32.0) -> loss:returned loss float32[], log:train_loss float32[], saved #1
%14 F[PP=1,MB=1] 1:2 @0,1 (%12.0, %32.0) -> loss:returned loss float32[], log:train_loss float32[], saved #1
%15 B[PP=1,MB=0] 0:1 @0,1 (%13.2, %13.3, %13.4, %32.0) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%16 B[PP=1,MB=1] 1:2 @0,1 (%14.2, %14.3, %14.4, %32.0) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%17 B[PP=0,MB=0] 0:1 @0,1 (%11.1, %15.1) -> grad:first.weight,first.bias x2 P(sum) #1
%18 B[PP=0,MB=1] 1:2 @0,1 (%12.1, %16.1) -> grad:first.weight,first.bias x2 P(sum) #1
%19 pack [PP=1] @0,1 (%15.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%20 pack [PP=1] @0,1 (%16.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%21 accumulate [PP=1] @0,1 (%19.0, %20.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%23 pack [PP=0] @0,1 (%17.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%24 pack [PP=0] @0,1 (%18.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%25 accumulate [PP=0] @0,1 (%23.0, %24.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%27 reducescatter [PP=1] @0,1 stream=reduce (%21.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%22 update [PP=1] @0,1 (%27.0) #2
%28 reducescatter [PP=0] @0,1 stream=reduce (%25.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%26 update [PP=0] @0,1 (%28.0) #2
"""

# Each microbatch is summed over the replicas separately, so shards are accumulated.
GRADIENTS = """
%31 parameters @0,1 -> param:second.weight,second.bias float32[64] S(0) #2
%32 parameters @0,1 -> param:first.weight,first.bias float32[64] S(0) #2
%33 allgather @0,1 stream=gather (%32.0) -> param:first.weight,first.bias float32[128] #2
%11 F[PP=0,MB=0] 0:1 @0,1 (%33.0) -> activation:tanh float32[1,6], saved #1
%12 F[PP=0,MB=1] 1:2 @0,1 (%33.0) -> activation:tanh float32[1,6], saved #1
%34 allgather @0,1 stream=gather (%31.0) -> param:second.weight,second.bias float32[128] #2
%13 F[PP=1,MB=0] 0:1 @0,1 (%11.0, %34.0) -> loss:returned loss float32[], log:train_loss float32[], saved #1
%14 F[PP=1,MB=1] 1:2 @0,1 (%12.0, %34.0) -> loss:returned loss float32[], log:train_loss float32[], saved #1
%15 B[PP=1,MB=0] 0:1 @0,1 (%13.2, %13.3, %13.4, %34.0) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%16 B[PP=1,MB=1] 1:2 @0,1 (%14.2, %14.3, %14.4, %34.0) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%17 B[PP=0,MB=0] 0:1 @0,1 (%11.1, %15.1) -> grad:first.weight,first.bias x2 P(sum) #1
%18 B[PP=0,MB=1] 1:2 @0,1 (%12.1, %16.1) -> grad:first.weight,first.bias x2 P(sum) #1
%19 pack [PP=1] @0,1 (%15.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%20 pack [PP=1] @0,1 (%16.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%23 pack [PP=0] @0,1 (%17.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%24 pack [PP=0] @0,1 (%18.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%27 reducescatter [PP=1] @0,1 stream=reduce (%19.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%28 reducescatter [PP=1] @0,1 stream=reduce (%20.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%21 accumulate [PP=1] @0,1 (%27.0, %28.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%22 update [PP=1] @0,1 (%21.0) #2
%29 reducescatter [PP=0] @0,1 stream=reduce (%23.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%30 reducescatter [PP=0] @0,1 stream=reduce (%24.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%25 accumulate [PP=0] @0,1 (%29.0, %30.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%26 update [PP=0] @0,1 (%25.0) #2
"""

# A gather for each chunk that reads parameters. (The first layer's backward pass does not read parameters.)
PARAMETERS = """
%31 parameters @0,1 -> param:second.weight,second.bias float32[64] S(0) #2
%32 parameters @0,1 -> param:first.weight,first.bias float32[64] S(0) #2
%33 allgather [PP=0,MB=0] @0,1 stream=gather (%32.0) -> param:first.weight,first.bias float32[128] #2
%11 F[PP=0,MB=0] 0:1 @0,1 (%33.0) -> activation:tanh float32[1,6], saved #1
%34 allgather [PP=0,MB=1] @0,1 stream=gather (%32.0) -> param:first.weight,first.bias float32[128] #2
%12 F[PP=0,MB=1] 1:2 @0,1 (%34.0) -> activation:tanh float32[1,6], saved #1
%35 allgather [PP=1,MB=0] @0,1 stream=gather (%31.0) -> param:second.weight,second.bias float32[128] #2
%13 F[PP=1,MB=0] 0:1 @0,1 (%11.0, %35.0) -> loss:returned loss float32[], log:train_loss float32[], saved #1
%36 allgather [PP=1,MB=1] @0,1 stream=gather (%31.0) -> param:second.weight,second.bias float32[128] #2
%14 F[PP=1,MB=1] 1:2 @0,1 (%12.0, %36.0) -> loss:returned loss float32[], log:train_loss float32[], saved #1
%37 allgather [PP=1,MB=0] @0,1 stream=gather (%31.0) -> param:second.weight,second.bias float32[128] #2
%15 B[PP=1,MB=0] 0:1 @0,1 (%13.2, %13.3, %13.4, %37.0) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%17 B[PP=0,MB=0] 0:1 @0,1 (%11.1, %15.1) -> grad:first.weight,first.bias x2 P(sum) #1
%19 pack [PP=1] @0,1 (%15.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%23 pack [PP=0] @0,1 (%17.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%27 reducescatter [PP=1] @0,1 stream=reduce (%19.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%29 reducescatter [PP=0] @0,1 stream=reduce (%23.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%38 allgather [PP=1,MB=1] @0,1 stream=gather (%31.0) -> param:second.weight,second.bias float32[128] #2
%16 B[PP=1,MB=1] 1:2 @0,1 (%14.2, %14.3, %14.4, %38.0) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%18 B[PP=0,MB=1] 1:2 @0,1 (%12.1, %16.1) -> grad:first.weight,first.bias x2 P(sum) #1
%20 pack [PP=1] @0,1 (%16.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%24 pack [PP=0] @0,1 (%18.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%28 reducescatter [PP=1] @0,1 stream=reduce (%20.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%21 accumulate [PP=1] @0,1 (%27.0, %28.0) -> grad:second.weight,second.bias float32[64] S(0) #2
%22 update [PP=1] @0,1 (%21.0) #2
%30 reducescatter [PP=0] @0,1 stream=reduce (%24.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%25 accumulate [PP=0] @0,1 (%29.0, %30.0) -> grad:first.weight,first.bias float32[64] S(0) #2
%26 update [PP=0] @0,1 (%25.0) #2
"""


@pytest.mark.parametrize(
    "level, text", list(zip(LEVELS, (OPTIMIZER, GRADIENTS, PARAMETERS), strict=True)), ids=NAMES
)
def test_the_rewritten_program(level: dict[str, Any], text: str) -> None:
    step = captured("mlp").step
    dag = dag_of(step, program(step, "split before", level))
    check(dag, final=True)
    lines = [re.sub(r"saved:.*(?= #)", "saved", line) for line in str(dag).splitlines()[1:]]
    assert [
        line for line in lines if "metrics" not in line and "report" not in line
    ] == text.strip().splitlines()


def test_each_level_implies_those_before() -> None:
    step = captured("mlp").step
    all_of_it = {"shard_optimizer": True, "shard_grads": True, "shard_params": True}
    assert str(dag_of(step, program(step, "DP2", all_of_it))) == str(
        dag_of(step, program(step, "DP2", LEVELS[2]))
    )
    assert str(dag_of(step, program(step, "DP2", LEVELS[2]))) != str(
        dag_of(step, program(step, "DP2", LEVELS[1]))
    )


# Equality with one device

EPS = 1e-14  # measured: at most 5e-16, from float64 sums of some tens of terms


EQUAL = [
    *itertools.product(
        ["gpt", "tied", "frozen", "reentered"], ["DP2", "split before", "split after", "PP2xDP2 unordered"]
    ),
    *itertools.product(["mlp", "losses", "logs", "used_twice"], ["DP2", "split after", "PP2xDP2"]),
]


@by_level
@pytest.mark.parametrize("name, shape", marked(EQUAL, EQUAL[3::7]))
def test_equals_one_device(name: str, shape: str, level: dict[str, Any]) -> None:
    model = captured(name, double=True)
    alone = run(model, dag_of(model.step, []))
    whole = dag_of(model.step, program(model.step, shape, level, bucket_size=0.0002))
    dag = finished(model, program(model.step, shape, level, bucket_size=0.0002))
    found = run(model, dag)
    assert distance(alone, run(model, whole)) < EPS and distance(alone, found) < EPS
    executed = run_plans(model, dag)  # type: ignore[arg-type]
    for name_, grad in found.grads.items():
        assert torch.equal(grad, executed.grads[name_]), name_
    for metric, value in found.metrics.items():
        assert torch.equal(value, executed.metrics[metric]), metric


@by_level
def test_one_microbatch_less_is_another_result(level: dict[str, Any]) -> None:
    """The control of the bound above."""
    model = captured("gpt", double=True)
    dag = dag_of(model.step, program(model.step, "split before", level))
    total = next(t for t in dag.of_type(Accumulate) if len(t.inputs) > 1)
    dag.rewire(total, inputs=total.inputs[1:])
    assert distance(run(model, dag_of(model.step, [])), run(model, dag)) > 0.1


@by_level
@pytest.mark.parametrize("shape", ["DP2", "split before", "split after", "PP2xDP2 unordered"])
def test_exact_arithmetic_keeps_every_bit(shape: str, level: dict[str, Any]) -> None:
    """Tied, integer-valued, in float64: no order of sums makes a difference."""
    model = captured("exact")
    alone = run(model, dag_of(model.step, []))
    assert distance(alone, run(model, finished(model, program(model.step, shape, level)))) == 0


@pytest.mark.parametrize("replicas", marked([2, 3], [3]))
@pytest.mark.parametrize("size", [1e-6, 0.0003, 25.0])
@by_level
def test_any_bucket_size(level: dict[str, Any], size: float, replicas: int) -> None:
    """From a bucket for each tensor to all in one; three replicas divide no power of two."""
    model = captured("gpt", 12, double=True)
    devices = list(range(replicas))
    directives = [
        {"op": "place", "filter": {}, "devices": devices},
        replicate(devices, **level, bucket_size=size),
        *split(2),
    ]
    dag = finished(model, directives)
    assert distance(run(model, dag_of(model.step, [])), run(model, dag)) < EPS
    buckets = [node.outputs[0].bucket for node in dag.of_type(Parameters)]
    regions = {
        frozenset(c.region for c in dag.of_type(Chunk) if n in dag.interface(c).params)
        for n in model.step.params
    }
    if size == 1e-6:
        assert all(b is not None and len(b.names) == 1 for b in buckets) and len(buckets) == len(
            model.step.params
        )
    if size == 25.0:
        assert len(buckets) == len(regions) < len(model.step.params)
    assert all(b is not None and b.members == replicas and b.numel == b.shard * replicas for b in buckets)


def test_the_number_of_gathers_and_sums() -> None:
    """Of three stages with a bucket each and two microbatches; the backward of an embedding reads no
    parameter.
    """
    model = captured("gpt")
    expected = {"optimizer": (3, 3), "grads": (3, 6), "params": (10, 6)}
    for level, name in zip(LEVELS, NAMES, strict=True):
        dag = dag_of(model.step, program(model.step, "split before", level))
        assert (len(list(dag.of_type(AllGather))), len(list(dag.of_type(ReduceScatter)))) == expected[name], (
            name
        )
        assert {node.kept for node in dag.of_type(Parameters)} == {name != "params"}


def test_streams() -> None:
    model = captured("mlp")
    dag = finished(model, program(model.step, "DP2", LEVELS[2], reduce_stream="r", gather_stream="g"))
    assert {n.stream for n in dag.of_type(ReduceScatter)} == {"r"} and {
        n.stream for n in dag.of_type(AllGather)
    } == {"g"}
    assert {stream for _, stream in compile_plans(dag)[0].groups} == {"g", "r", "metrics"}


def test_a_part_split_alone() -> None:
    model = captured("gpt", double=True)
    alone = run(model, dag_of(model.step, []))
    for level in LEVELS:
        dag = finished(model, program(model.step, "part split", level))
        assert distance(alone, run(model, dag)) < EPS


# What differs from region to region


GROUPS = [[0, 2], [1, 3]]


@pytest.mark.parametrize("first", [{}, *LEVELS], ids=["none", *NAMES])
@pytest.mark.parametrize("second", marked([{}, *LEVELS], [{}, LEVELS[-1]]), ids=["none", *NAMES])
def test_levels_by_region(first: dict[str, Any], second: dict[str, Any]) -> None:
    model = captured("mlp", double=True)
    several = [
        replicate(GROUPS[0], {"PP": 0}, **first, bucket_size=1e-6),
        replicate(GROUPS[1], {"PP": 1}, **second),
    ]
    dag = finished(model, [*stages(model.step, GROUPS), *split(2), *several])
    assert distance(run(model, dag_of(model.step, [])), run(model, dag)) < EPS
    kept = {n.devices: n.kept for n in dag.of_type(Parameters)}
    wanted = {(0, 2): first, (1, 3): second}
    assert kept == {group: "shard_params" not in level for group, level in wanted.items() if level}
    for group, level in wanted.items():
        found = {
            type(dag.value(u.inputs[0]).placement).__name__ for u in dag.of_type(Update) if u.devices == group
        }
        assert found == {"Sharded" if level else "Replicated"}


@by_level
def test_a_tied_parameter_on_the_same_devices_by_several_directives(level: dict[str, Any]) -> None:
    model = captured("tied", double=True)
    groups = [[0, 1], [2, 3], [0, 1]]
    several = [replicate(group, {"PP": i}, **level) for i, group in enumerate(groups)]
    dag = finished(model, [*stages(model.step, groups), *split(2), *several])
    assert distance(run(model, dag_of(model.step, [])), run(model, dag)) < EPS
    assert sum("embed.weight" in n.outputs[0].names for n in dag.of_type(Parameters)) == 1


def test_a_tied_parameter_is_kept_whole_here_and_in_shards_only_there() -> None:
    """On different devices each group has its own policy, as long as the optimizer has shards in both."""
    model = captured("tied")
    groups = [[0, 1], [2, 3], [4, 5]]
    several = [replicate(group, {"PP": i}, **LEVELS[i]) for i, group in enumerate(groups)]
    dag = finished(model, [*stages(model.step, groups), *split(2), *several])
    kept = {n.devices: n.kept for n in dag.of_type(Parameters) if "embed.weight" in n.outputs[0].names}
    assert kept == {(0, 1): True, (4, 5): False}
    expected, found = trained_alone(model, dag), trained_in_shards(model, dag)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


def test_split_before_and_after_are_the_same_program() -> None:
    """Microbatches of the whole batch, each divided, or of each replica's share: other samples meet, the work
    is the same.
    """
    step = captured("gpt").step
    for level in LEVELS:
        counts = [
            sorted(
                line.split()[1] for line in str(dag_of(step, program(step, shape, level))).splitlines()[1:]
            )
            for shape in ("split before", "split after")
        ]
        assert counts[0] == counts[1]


def test_verify_reports_it() -> None:
    report = piper.verify(*fresh("tied"), program(captured("tied").step, "PP2xDP2 unordered", LEVELS[2]))
    assert report.ok, str(report)


def test_one_device_by_eager_execution() -> None:
    """Not only by the captured step."""
    model = captured("gpt", double=True)
    dag = finished(model, program(model.step, "split before", LEVELS[2]))
    slices = dag.microbatches()
    assert slices is not None and len(slices) == 4
    assert distance(run_eagerly(model.step, model.tensors, model.leaves, slices), run(model, dag)) < EPS


# Refusals

PLACED = {"op": "place", "filter": {}, "devices": [0, 1]}
HERE = "directive 1 (replicate): field "
FIELDS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"{HERE}'{name}': {value!r} is not a Boolean. Give True or False")
      for name in ("shard_optimizer", "shard_grads", "shard_params", "overlap_update") for value in (1, "yes", None, [])),
    *(({name: value}, f"{HERE}'{name}': {value!r} is not a stream. Give a name of 1 to 100 printable characters, such as")
      for name in ("reduce_stream", "gather_stream") for value in ("", 0, None, ["s"])),
    *(({"bucket_size": value}, f"{HERE}'bucket_size': {value!r} is not a size. Give a number of MB, such as 25")
      for value in (0, -1.5, "1", None, True, float("nan"))),
    *(({"reduce_dtype": value}, f"{HERE}'reduce_dtype': {value!r} is unknown. Give one of 'float16', 'bfloat16', 'float32', "
                                "'float64'")
      for value in ("int64", "torch.float32", 32, "", ["float32"], True)),
    *(({"gather_dtype": value, "shard_params": True}, f"{HERE}'gather_dtype': {value!r} is unknown. Give one of 'float16', "
                                                      "'bfloat16', 'float32'")
      for value in ("float64", "int8", torch.bfloat16, True)),
    ({"gather_dtype": "bfloat16"}, f"{HERE}'gather_dtype': the directive shards nothing. Give zero=1, 2 or 3"),
    *(({"shard_by": value}, f"{HERE}'shard_by': {value!r} is unknown. Give one of 'elements', 'parameter'")
      for value in ("tensor", 1, None, ["x"])),
    ({"shard_by": "parameter"}, f"{HERE}'shard_by': the directive shards nothing. Give zero=1, 2 or 3"),
    ({"overlap_update": True, "shard_params": True}, f"{HERE}'overlap_update': no replica updates whole parameters on its "
                                                     "own. Give shard_by='parameter', or remove"),
    ({"shard_everything": True}, "directive 1 (replicate): field 'shard_everything' is unknown. Give one of "
                                 "filter, devices"),
]  # fmt: skip


@pytest.mark.parametrize("fields, message", FIELDS, ids=[str(fields) for fields, _ in FIELDS])
def test_refuses_a_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(message)):
        dag_of(captured("mlp").step, [PLACED, replicate([0, 1], **fields)])
    with pytest.raises(DirectiveError, match=re.escape(message.replace("directive 1", "directive 0"))):
        parse([replicate([0, 1], **fields)])


SAME = [[0, 1], [2, 3], [0, 1]]
FAR = [[0, 1], [2, 3], [4, 5]]
ALIKE = ". Give regions that share parameters the same options"
TIED_APART = ", used in several regions, would be sharded in one region and whole in another" + ALIKE
CONFLICTS: list[tuple[str, list[list[int]], list[dict[str, Any]], int, str]] = [
    ("tied", SAME, [LEVELS[0], {}, {}], 5, "the gradient of embed.weight" + TIED_APART),
    ("tied", FAR, [{}, {}, LEVELS[2]], 5, "the gradient of embed.weight" + TIED_APART),
    ("tied", SAME, [LEVELS[2], {}, LEVELS[0]], 5,
     "another directive keeps the parameters embed.weight only as shards between their uses" + ALIKE),
    ("tied", SAME, [LEVELS[1], {}, LEVELS[2]], 5, "another directive keeps the parameters embed.weight "
                                                  "whole between their uses"),
    ("tied", FAR, [LEVELS[1], {}, {**LEVELS[1], "reduce_dtype": "float64"}], 5,
     "another directive sums the gradient of embed.weight, used in several regions, in "
     "torch.float32, but this one would sum it in torch.float64" + ALIKE),
]  # fmt: skip


@pytest.mark.parametrize("name, groups, levels, index, message", CONFLICTS)
def test_refuses_a_conflict(
    name: str, groups: list[list[int]], levels: list[dict[str, Any]], index: int, message: str
) -> None:
    step = captured(name).step
    several = [
        replicate(group, {"PP": i}, **level)
        for i, (group, level) in enumerate(zip(groups, levels, strict=True))
    ]
    with pytest.raises(
        DirectiveError, match=re.escape(f"directive {index} (replicate): field 'filter': {message}")
    ):
        dag_of(step, [*stages(step, groups), *several])


@pytest.mark.parametrize("first", [{}, *LEVELS], ids=["none", *NAMES])
@by_level
def test_refuses_a_region_that_is_replicated_already(first: dict[str, Any], level: dict[str, Any]) -> None:
    with pytest.raises(
        DirectiveError,
        match=r"directive 2 \(replicate\): field 'filter': an earlier directive already sums the gradients of first",
    ):
        dag_of(
            captured("mlp").step, [PLACED, replicate([0, 1], **first), replicate([0, 1], {"PP": 0}, **level)]
        )
