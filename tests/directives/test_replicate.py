"""`replicate`: the rewritten program, its errors, and the findings of the static check in a program that is
replicated wrongly.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.directives import parse, replicas_of
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Partial
from lightning_piper.ops.communication.reduce import AllReduce
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import complete
from lightning_piper.plan import compile_plans
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.groups import marked
from tests.models import captured, fresh
from tests.plan.programs import dag_of, split

# Two replicas of two samples each, in microbatches of one sample. Chunks make terms of sums, and the
# optimizer gets the whole sums.
DP2 = """
training step of 4 samples
%11 F[PP=0,MB=0] 0:1 @0,1 -> activation:tanh float32[1,6], saved:BW float32[1,6] #1
%12 F[PP=0,MB=1] 1:2 @0,1 -> activation:tanh float32[1,6], saved:BW float32[1,6] #1
%13 F[PP=1,MB=0] 0:1 @0,1 (%11.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[1,2], saved:BW float32[1,6], saved:BI,BW x0 #1
%14 F[PP=1,MB=1] 1:2 @0,1 (%12.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[1,2], saved:BW float32[1,6], saved:BI,BW x0 #1
%8 metrics [PP=1] @0,1 (%13.0, %14.0, %13.1, %14.1) -> metrics:returned loss,train_loss float64[4] P(sum)
%10 allreduce @0,1 stream=metrics (%8.0) -> metrics:returned loss,train_loss float64[4] #0
%9 report @0,1 (%10.0)
%15 B[PP=1,MB=0] 0:1 @0,1 (%13.2, %13.3, %13.4) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%16 B[PP=1,MB=1] 1:2 @0,1 (%14.2, %14.3, %14.4) -> grad:second.weight,second.bias x2 P(sum), cotangent:mm float32[1,6] #1
%17 B[PP=0,MB=0] 0:1 @0,1 (%11.1, %15.1) -> grad:first.weight,first.bias x2 P(sum) #1
%18 B[PP=0,MB=1] 1:2 @0,1 (%12.1, %16.1) -> grad:first.weight,first.bias x2 P(sum) #1
%19 pack [PP=1] @0,1 (%15.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%20 pack [PP=1] @0,1 (%16.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%21 accumulate [PP=1] @0,1 (%19.0, %20.0) -> grad:second.weight,second.bias float32[128] P(sum) #2
%23 pack [PP=0] @0,1 (%17.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%24 pack [PP=0] @0,1 (%18.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%25 accumulate [PP=0] @0,1 (%23.0, %24.0) -> grad:first.weight,first.bias float32[128] P(sum) #2
%27 allreduce @0,1 stream=reduce (%21.0) -> grad:second.weight,second.bias float32[128] #2
%22 update [PP=1] @0,1 (%27.0) #2
%28 allreduce @0,1 stream=reduce (%25.0) -> grad:first.weight,first.bias float32[128] #2
%26 update [PP=0] @0,1 (%28.0) #2
"""


def placed(devices: Any = (0, 1), **condition: Any) -> dict[str, Any]:
    return {"op": "place", "filter": condition, "devices": list(devices)}


def replicate(devices: Any = (0, 1), filter: Any = None, **fields: Any) -> dict[str, Any]:
    return {"op": "replicate", "filter": filter or {}, "devices": list(devices), **fields}


STAGES = [placed((0, 2), PP=0), placed((1, 3), PP=1)]
GROUPS = [[0, 2], [1, 3]]


def run(name: str, dag: TrainingDAG) -> Outcome:
    model = captured(name)
    return interpret(dag, model.tensors, model.leaves)


def largest(a: Outcome, b: Outcome) -> float:
    return max(float((a.grads[n].double() - b.grads[n].double()).abs().max()) for n in a.grads)


def test_the_rewritten_program() -> None:
    dag = dag_of(captured("mlp").step, [placed(), *split(2), replicate()])
    assert str(dag).splitlines() == DP2.strip().splitlines()
    check(dag, final=True)
    assert [compile_plans(dag)[d].replica for d in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    "name",
    marked(
        ["mlp", "gpt", "tied", "losses", "logs", "used_twice", "exact"], ["gpt", "tied", "losses", "exact"]
    ),
)
@pytest.mark.parametrize("program", [
    [placed(), replicate()],
    [placed(), *split(2), replicate()],
    [placed(), replicate(), *split(2)],
], ids=["whole", "microbatches", "microbatches afterwards"])  # fmt: skip
def test_equals_one_device(name: str, program: list[Any]) -> None:
    step = captured(name).step
    alone, dag = run(name, dag_of(step, [])), dag_of(step, program)
    check(dag, final=True)
    found = run(name, dag)
    assert largest(alone, found) < 1e-6
    for metric, value in alone.metrics.items():
        torch.testing.assert_close(found.metrics[metric], value, rtol=1e-6, atol=1e-6)
    if name == "exact":
        assert all(torch.equal(alone.grads[n], found.grads[n]) for n in alone.grads)
    for total in dag.of_type(Accumulate):  # negative control: one microbatch fewer
        if len(total.inputs) > 1:
            dag.rewire(total, inputs=total.inputs[1:])
            assert largest(alone, run(name, dag)) > 1e-4
            break


def test_pipelines_of_replicas() -> None:
    dag = dag_of(
        captured("tied").step, [*STAGES, placed((0, 2), PP=2), *split(2), replicate(GROUPS)]
    )  # tied on one group
    check(dag, final=True)
    assert largest(run("tied", dag_of(captured("tied").step, [])), run("tied", dag)) < 1e-6
    assert [compile_plans(dag)[d].replica for d in range(4)] == [0, 0, 1, 1]
    assert {node.devices for node in dag.of_type(AllReduce)} == {(0, 2), (1, 3), (0, 1, 2, 3)}


def test_one_directive_or_one_for_each_stage() -> None:
    step = captured("mlp").step
    several = [
        replicate(GROUPS[s], {"PP": s}, bucket_size=1e-6 + s, reduce_stream=f"reduce{s}") for s in (0, 1)
    ]
    dag = dag_of(step, [*STAGES, *split(2), *several])
    check(dag, final=True)
    found = Counter(n.stream for n in dag.of_type(AllReduce))
    assert found == {"metrics": 1, "reduce0": 2, "reduce1": 1}  # one bucket a parameter, and one for both
    together = dag_of(step, [*STAGES, *split(2), replicate(GROUPS)])
    assert largest(run("mlp", dag), run("mlp", together)) == 0


def test_replicas_of_a_program() -> None:
    assert replicas_of(parse([*STAGES, replicate(GROUPS)])) == {0: 0, 2: 1, 1: 0, 3: 1}
    assert replicas_of(parse([placed(), replicate([1, 0])])) == {1: 0, 0: 1}
    assert replicas_of(parse(STAGES)) == {}


REFUSED: list[tuple[list[Any], str]] = [
    ([replicate()], "directive 0 (replicate): field 'devices': F[PP=0] is not placed yet. Place it first, "
                    "on one of [[0, 1]]"),
    ([placed(), replicate([0, 2])], "[[0, 2]] does not contain the group [0, 1], on which F[PP=0] is "
                                    "placed. Give the place"),
    ([placed(), replicate([0])], "field 'devices': the groups have 1 device. Give groups of one size, of at "
                                 "least two devices"),
    ([placed(), replicate([[0, 1], [2, 3, 4]])], "the groups have 2 and 3 devices"),
    ([placed(), replicate([[0, 1], [1, 0]])], "device 1 is replica 1 in one group and replica 0 in another."),
    ([placed(), replicate([])], "[] is not a list of distinct devices"),
    ([placed(), replicate([[0, 1], 2])], "2 is not a list of distinct devices"),
    ([placed(), replicate([0, 0])], "[0, 0] is not a list of distinct devices. Give distinct device indices"),
    ([placed(), replicate([0, -1])], "[0, -1] is not a list of distinct devices"),
    ([placed(), {**replicate(), "devices": 2}], "2 is not a list of distinct devices"),
    ([placed(), replicate(reduce_stream="")], "field 'reduce_stream': '' is not a stream"),
    ([placed(), replicate(bucket_size=0)], "field 'bucket_size': 0 is not a size. Give a number of MB, such as 25"),
    ([placed(), replicate(bucket_size=True)], "field 'bucket_size': True"),
    ([placed(), replicate(bucket_size="25")], "field 'bucket_size': '25'"),
    ([placed(), {**replicate(), "filter": 3}], "directive 1 (replicate): field 'filter'"),
    ([placed(), replicate(filter={"PP": 9})], "{PP: 9} matches nothing. Choose from the step's tags: PASS in {B, F}; PP in "
                                              "{0, 1}"),
    ([placed(), replicate(), replicate()], "already sums the gradients of second.weight, second.bias over replicas. Replicate "
                                           "each region only once"),
    ([placed((0, 1, 2)), replicate([0, 1, 2])], "the batch has 4 samples, which cannot be divided evenly over "
                                                "3 replicas. Give a multiple of 3 samples"),
    ([placed((0, 1, 2)), *split(6), replicate([0, 1, 2])], "4 samples cannot be split into 6 microbatches for each of 3 "
                                                           "replicas. Give a batch of 18 samples over all replicas (6"),
    ([placed(), *split(4), replicate()], "4 samples cannot be split into 4 microbatches for each of 2 replicas. "
                                         "Give at most 2 microbatches, or a batch of 8 samples over all replicas (4 "
                                         "for each replica)"),
    (
        [placed((0, 1), PP=0), placed((1, 0), PP=1), replicate((0, 1), {"PP": 0}),
            replicate((1, 0), {"PP": 1})],
        "directive 3 (replicate): field 'devices': device 1 is replica 0 here and 1 in an earlier directive",
    ),
    ([placed()], "F[PP=0] is on 2 devices, [0, 1] (directive 0), but the program does not divide the batch over them. "
                 "Add a replicate"),
    ([placed((0, 1), PP=0), placed((2,), PP=1)], "Place every region on the same number of devices"),
]  # fmt: skip


@pytest.mark.parametrize("program, message", REFUSED)
def test_refuses(program: list[Any], message: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(message)):
        dag_of(captured("mlp").step, program)


def test_refuses_buffers_that_change() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"each replica would update .*running_mean.* from its own samples, so the values would differ between replicas\. "
        r".*GroupNorm",
    ):
        dag_of(captured("conv").step, [placed(), replicate()])


class Averaged(L.LightningModule):
    """A step that updates a batch norm's statistics and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("average", torch.zeros(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.average.mul_(0.9).add_(batch.mean(0))
        return self.norm(batch).square().mean()  # type: ignore[no-any-return]


def test_the_remedy_for_buffers_of_the_module_does_not_name_statistics() -> None:
    with pytest.raises(DirectiveError, match=r"would update average from .*gather_samples"):
        dag_of(capture(Averaged(), torch.randn(8, 4)), [placed(), replicate()])


@pytest.mark.parametrize("verify", [True, False])
def test_a_region_without_replicate_is_refused(verify: bool) -> None:
    """Also unchecked: replicas that drift apart show in no loss."""
    program = [placed((0, 1), PP=0), placed((2, 3), PP=1), replicate((0, 1), {"PP": 0})]
    with pytest.raises(
        DirectiveError, match=r"no directive sums the gradient of second.weight.* over devices \[2, 3\]"
    ):
        piper.compile(*fresh("mlp"), program, verify=verify)


# The remains of a wrong rewrite, and the finding of the static check.

Fault = Callable[[TrainingDAG], None]


def sums(dag: TrainingDAG) -> list[AllReduce]:
    return [node for node in dag.of_type(AllReduce) if dag.value((node.id, 0)).kind == "grad"]


def missing(dag: TrainingDAG) -> None:
    node = sums(dag)[0]
    for reader in dag.users(node):
        dag.substitute(reader, (node.id, 0), node.inputs[0])
    dag.remove([node])


def twice(dag: TrainingDAG) -> None:
    node = sums(dag)[0]
    (reader,) = dag.users(node)
    again = dag.add(dataclasses.replace(node, id=-1, inputs=((node.id, 0),)))
    dag.substitute(reader, (node.id, 0), (again.id, 0))


def wrong_group(dag: TrainingDAG) -> None:
    node = next(n for n in sums(dag) if n.devices == (0, 2))
    dag.change(node, devices=(0, 1, 2, 3))


def half_a_group(dag: TrainingDAG) -> None:
    node = next(n for n in sums(dag) if n.devices == (0, 2))
    dag.change(node, devices=(0,))


def still_partial(dag: TrainingDAG) -> None:
    node = sums(dag)[0]
    dag.change(node, outputs=(dataclasses.replace(node.outputs[0], placement=Partial()),))


def whole_gradients(dag: TrainingDAG) -> None:
    """Change the placements as if each replica had the whole batch."""
    chunk = next(c for c in dag.of_type(Chunk) if c.kind == "B")
    dag.mesh = Mesh.flat(1)
    assert chunk.slice.stop <= dag.size


FAULTS: list[tuple[Fault, str]] = [
    (
        missing,
        r"no directive sums the gradient of .* over devices \[\d, \d\], so every replica would step with "
        r"its own gradient",
    ),
    (twice, r"sums grad .* over devices that each hold the whole value"),
    (wrong_group, r"allreduce .* on device 0,1,2,3 .*sums grad .*, which lies on devices \[0, 2\]"),
    (half_a_group, r"a transfer is missing|which lies on devices \[0, 2\]"),
    (still_partial, r"outputs P\(sum\) after its sum"),
    (whole_gradients, "samples 2:4 are missing"),
]


@pytest.mark.parametrize("fault, message", FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_static_check_finds(fault: Fault, message: str) -> None:
    dag = dag_of(captured("mlp").step, [*STAGES, *split(2), replicate(GROUPS)])
    check(dag, final=True)
    fault(dag)
    with pytest.raises(VerificationError, match=message):
        check(dag, final=True)


def test_an_unfinished_program_may_wait_for_its_replicate() -> None:
    dag = dag_of(captured("mlp").step, [*STAGES, *split(2), replicate(GROUPS)])
    missing(dag)
    check(dag)
    assert any(isinstance(dag.value(u.inputs[0]).placement, Partial) for u in dag.of_type(Update))
    with pytest.raises(DirectiveError, match="Add a replicate"):
        complete(dag)
