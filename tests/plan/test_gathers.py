"""Which gathers of parameters and which sums over replicas are redundant, and when the gathers that remain
are started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_piper.annotate import annotate
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.values import Sharded
from lightning_piper.ops.communication.gather import AllGather
from lightning_piper.ops.communication.reduce import ReduceScatter, ReduceScatterInstruction
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import eliminate
from lightning_piper.plan import Plan, check_plans, compile_plans, global_order
from lightning_piper.plan import instructions as ins
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.models import captured
from tests.plan.programs import Program, dag_of, one_f_one_b, order, split
from tests.sharded import replicate, stages

GROUPS = [[0, 2], [1, 3]]


def pipeline(microbatches: int, orders: Program, sharded: str = "params", model: str = "mlp") -> TrainingDAG:
    """Two stages on two replicas each; every microbatch has two samples."""
    step = captured(model, 2 * microbatches).step
    level = {f"shard_{sharded}": True}
    return dag_of(step, [*stages(step, GROUPS), *split(microbatches), *orders, replicate(GROUPS, **level)])


def dropped(dag: TrainingDAG, kind: type[Node]) -> list[str]:
    """The labels of the chunks whose gathers (or whose sums, depending on `kind`) `eliminate` drops."""

    def chunks(node: Node) -> list[str]:
        around = (
            dag.users(node) if kind is AllGather else [dag.nodes[i] for i in dag.graph.predecessors(node.id)]
        )
        while around and not isinstance(around[0], Chunk):
            around = [dag.nodes[i] for other in around for i in dag.graph.predecessors(other.id)]
        return [chunk.label for chunk in around]

    of = {node.id: chunks(node) for node in dag.of_type(kind)}
    eliminate(dag)
    check(dag, final=True)
    return sorted(label for i, labels in of.items() if i not in dag.nodes for label in labels)


def gpipe(microbatches: int, stage: int) -> Program:
    every = range(microbatches)
    return order(stage, " ".join([f"F{i}" for i in every] + [f"B{i}" for i in every]))


# Which ones are dropped


def test_1f1b_gathers_dropped_are_those_whose_bucket_is_still_there() -> None:
    """A stage with one bucket uses no other: whatever its order, it gathers once. Its first stage's backward
    reads nothing.
    """
    assert dropped(pipeline(3, one_f_one_b(2, 3)), AllGather) == [
        "B[PP=1,MB=0]",
        "B[PP=1,MB=1]",
        "B[PP=1,MB=2]",
        "F[PP=0,MB=1]",
        "F[PP=0,MB=2]",
        "F[PP=1,MB=1]",
        "F[PP=1,MB=2]",
    ]


def test_a_bucket_used_in_between_lets_no_gather_be_dropped() -> None:
    """All stages on one group, one microbatch after the other: but for the turn at the last stage, every
    chunk needs a gather.
    """
    dag = dag_of(captured("gpt").step, [{"op": "place", "filter": {}, "devices": [0, 1]}, *split(2),
                                        replicate([0, 1], shard_params=True)])  # fmt: skip
    assert dropped(dag, AllGather) == ["B[PP=2,MB=0]"]
    order_ = [node.label for node in global_order(dag) if isinstance(node, Chunk)]
    turn = order_.index("B[PP=2,MB=0]")
    assert order_[turn - 1] == "F[PP=2,MB=1]"
    assert order_[turn:] == [
        "B[PP=2,MB=0]",
        "B[PP=1,MB=0]",
        "B[PP=0,MB=0]",
        "B[PP=2,MB=1]",
        "B[PP=1,MB=1]",
        "B[PP=0,MB=1]",
    ]


def test_the_parameters_that_are_kept_are_gathered_once_a_step() -> None:
    for level in ("optimizer", "grads"):
        dag = pipeline(3, [], level)
        assert len(list(dag.of_type(AllGather))) == 2 and dropped(dag, AllGather) == []


def test_gpipe_sums_dropped_are_all_but_the_last_of_a_stage() -> None:
    found = dropped(pipeline(3, [*gpipe(3, 0), *gpipe(3, 1)]), ReduceScatter)
    assert found == ["B[PP=0,MB=0]", "B[PP=0,MB=1]", "B[PP=1,MB=0]", "B[PP=1,MB=1]"]


def test_1f1b_sums_are_dropped_where_backward_follows_backward() -> None:
    """The first of two stages ends with the backward passes that its head start left over: B0 F2 B1 F3 B2
    B3.
    """
    assert dropped(pipeline(4, one_f_one_b(2, 4)), ReduceScatter) == ["B[PP=0,MB=2]"]


def test_sums_in_another_order_than_their_total_stay_apart() -> None:
    """Sums keep the order of their terms: the total adds microbatches 0, 1, 2; the run is 0, 2, 1, or 2, 0,
    1, or backwards.
    """
    for run, expected in (
        ("B0 B2 B1", []),
        ("B2 B0 B1", ["B[PP=1,MB=0]"]),
        ("B2 B1 B0", []),
        ("B1 B2 B0", ["B[PP=1,MB=1]"]),
    ):
        dag = pipeline(3, order(1, f"F0 F1 F2 {run}"))
        before = [_slices(dag, ref[0]) for ref in _total(dag).inputs]
        assert before == [["0:1"], ["1:2"], ["2:3"]]
        assert dropped(dag, ReduceScatter)[-len(expected) or len(dag.nodes) :] == expected, run
        assert [part for ref in _total(dag).inputs for part in _slices(dag, ref[0])] == [
            "0:1",
            "1:2",
            "2:3",
        ], run


def _total(dag: TrainingDAG) -> Accumulate:
    """The sum over microbatches of the last stage's gradients."""
    return next(
        n
        for n in dag.of_type(Accumulate)
        if n.tags.get("PP") == 1 and isinstance(n.outputs[0].placement, Sharded)
    )


def _slices(dag: TrainingDAG, node_id: int) -> list[str]:
    """The samples that a value is computed from, in the order in which they are added."""
    node = dag.nodes[node_id]
    return (
        [str(node.slice)]
        if isinstance(node, Chunk)
        else [s for source, _ in node.inputs for s in _slices(dag, source)]
    )


def test_another_stage_between_two_backward_passes_lets_no_sum_be_dropped() -> None:
    dag = dag_of(captured("mlp").step, [{"op": "place", "filter": {}, "devices": [0, 1]}, *split(2),
                                        replicate([0, 1], shard_grads=True)])  # fmt: skip
    labels = [n.label for n in global_order(dag) if isinstance(n, Chunk)]
    assert labels[4:] == ["B[PP=1,MB=0]", "B[PP=0,MB=0]", "B[PP=1,MB=1]", "B[PP=0,MB=1]"]
    assert dropped(dag, ReduceScatter) == []


@pytest.mark.parametrize(
    "program", [one_f_one_b(2, 4), gpipe(4, 0) + gpipe(4, 1), []], ids=["1F1B", "GPipe", "default"]
)
@pytest.mark.parametrize("level", ["optimizer", "grads", "params"])
def test_dropping_changes_no_result_and_is_done_once(level: str, program: Program) -> None:
    """Only how sums are associated; nothing is left to drop afterwards."""
    model = captured("mlp", 8, double=True)
    dag = dag_of(
        model.step,
        [*stages(model.step, GROUPS), *split(4), *program, replicate(GROUPS, **{f"shard_{level}": True})],
    )
    before = interpret(dag, model.tensors, model.leaves)
    eliminate(dag)
    after = interpret(dag, model.tensors, model.leaves)
    for name, grad in before.grads.items():
        torch.testing.assert_close(after.grads[name], grad, rtol=1e-13, atol=1e-15)
    text = str(dag)
    eliminate(dag)
    assert str(dag) == text


def test_chunks_run_in_the_same_order_afterwards() -> None:
    dag = pipeline(4, one_f_one_b(2, 4))
    before = [n.id for n in global_order(dag) if isinstance(n, Chunk)]
    eliminate(dag)
    assert [n.id for n in global_order(dag) if isinstance(n, Chunk)] == before


# When they are started


class Chain(L.LightningModule):
    """A model with one region for each layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for i, layer in enumerate(self.layers):
            with annotate("PP", i):
                batch = torch.tanh(layer(batch))
        return batch.square().mean()


def chain(layers: int, size: int = 8) -> CapturedStep:
    return capture(Chain(layers), torch.randn(size, 4))


def on_one_group(step: CapturedStep, microbatches: int, **fields: Any) -> TrainingDAG:
    level = {"shard_params": True} | fields
    dag = dag_of(
        step,
        [{"op": "place", "filter": {}, "devices": [0, 1]}, *split(microbatches), replicate([0, 1], **level)],
    )
    eliminate(dag)
    return dag


def held(plan: Plan) -> list[int]:
    """For each chunk of the plan, the number of gathered buckets that exist when it runs: those that are
    still arriving, and those in use.
    """
    live: set[int] = set()
    counts = []
    for instruction in plan.instructions:
        if isinstance(instruction, ins.AllGatherInstruction):
            live.add(instruction.into)
        if isinstance(instruction, ins.Run):
            counts.append(len(live))
        live -= {read.slot for read in instruction.reads if read.last}
    assert not live
    return counts


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_at_most_two_buckets_are_gathered_at_once(microbatches: int) -> None:
    """The one in use and the next one, of six layers."""
    plan = compile_plans(on_one_group(chain(6), microbatches))[0]
    counts = held(plan)
    assert len(counts) == 12 * microbatches and max(counts) == 2
    assert counts.count(2) > len(counts) // 2, "the next one travels while this one is in use"
    kept = held(compile_plans(on_one_group(chain(6), microbatches, shard_params=False, shard_grads=True))[0])
    assert max(kept) >= 5, "the control: what is kept is all there"


def test_a_gather_stands_before_the_chunk_that_runs_before_its_reader() -> None:
    plan = compile_plans(on_one_group(chain(4), 2))[0]
    runs = [i for i, x in enumerate(plan.instructions) if isinstance(x, ins.Run)]
    gathers = {x.into: i for i, x in enumerate(plan.instructions) if isinstance(x, ins.AllGatherInstruction)}
    waits = {x.into: i for i, x in enumerate(plan.instructions) if isinstance(x, ins.WaitWork)}
    first = {
        slot: next(k for k, i in enumerate(runs) if slot in {r.slot for r in plan.instructions[i].reads})
        for slot in gathers
    }
    for slot, issued in gathers.items():
        reader = first[slot]
        before = runs[max(reader - 1, 0)]
        assert issued < before, "it has that chunk's time to arrive"
        assert reader < 2 or issued > runs[reader - 2], "and lies there no longer"
        assert before < waits[slot] < runs[reader] or reader == 0, "and is waited for when that chunk is done"


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("level", ["shard_params", "shard_grads"])
def test_a_sum_of_a_bucket_is_waited_for_after_the_next_chunk(microbatches: int, level: str) -> None:
    """It has that chunk's time, and its bucket lies there no longer; but for the last one, which no chunk
    comes after.
    """
    plan = compile_plans(on_one_group(chain(6), microbatches, **{"shard_params": False, level: True}))[0]
    sums = {x.into: i for i, x in enumerate(plan.instructions) if isinstance(x, ReduceScatterInstruction)}
    waits = {x.into: i for i, x in enumerate(plan.instructions) if isinstance(x, ins.WaitWork)}
    chunks = [
        sum(isinstance(x, ins.Run) for x in plan.instructions[start : waits[slot]])
        for slot, start in sorted(sums.items(), key=lambda item: item[1])
    ]
    assert len(chunks) >= 6 and chunks == [1] * (len(chunks) - 1) + [0]


def test_all_members_issue_collectives_in_one_order() -> None:
    dag = pipeline(4, one_f_one_b(2, 4), model="mlp")
    eliminate(dag)
    plans = compile_plans(dag)
    check_plans(plans)
    for a, b in ((0, 2), (1, 3)):
        orders = [[x.node for x in plans[d].instructions if isinstance(x, ins.Collective)] for d in (a, b)]
        assert orders[0] == orders[1] and len(orders[0]) > 3


# What it costs to drop them


class Counted(TrainingDAG):
    """A DAG that counts how many nodes are read and how many references are rewritten."""

    operations = 0

    def users(self, node: Node) -> list[Node]:
        found = super().users(node)
        self.operations += 1 + len(found)
        return found

    def rewire(self, node: Node, **reads: Any) -> None:
        self.operations += len(node.reads)
        super().rewire(node, **reads)


def operations(step: CapturedStep, microbatches: int, program: Callable[[int], Program]) -> tuple[int, int]:
    """The number of nodes of the DAG, and the number of operations that `eliminate` takes."""
    dag = dag_of(step, [*stages(step, GROUPS), *split(microbatches), *program(microbatches),
                        replicate(GROUPS, shard_params=True, bucket_size=1e-6)])  # fmt: skip
    dag.__class__ = Counted
    assert isinstance(dag, Counted)
    nodes = len(dag.nodes)
    eliminate(dag)
    return nodes, dag.operations


@pytest.mark.parametrize("program", [
    lambda m: one_f_one_b(2, m),
    lambda m: gpipe(m, 0) + gpipe(m, 1),
    lambda m: [],
], ids=["1F1B", "GPipe", "default"])  # fmt: skip
def test_the_cost_is_linear_in_the_nodes(program: Callable[[int], Program]) -> None:
    step = captured("mlp", 512).step
    counts = [operations(step, microbatches, program) for microbatches in (64, 128, 256)]
    (n1, c1), (n2, c2), (n3, c3) = counts
    assert n3 > 5000
    # Each doubling adds the same for each new node.
    assert (c3 - c2) / (n3 - n2) == pytest.approx((c2 - c1) / (n2 - n1), rel=0.02)
    assert c3 < 8 * n3


def test_the_number_of_instructions_is_linear_in_the_microbatches() -> None:
    lengths = []
    for microbatches in (32, 64, 96):
        step = captured("mlp", 2 * microbatches).step
        dag = dag_of(step, [*stages(step, GROUPS), *split(microbatches), *one_f_one_b(2, microbatches),
                            replicate(GROUPS, shard_params=True)])  # fmt: skip
        eliminate(dag)
        lengths.append(Counter({d: len(plan.instructions) for d, plan in compile_plans(dag).items()}))
    first, second, third = lengths
    assert {d: third[d] - second[d] for d in first} == {d: second[d] - first[d] for d in first}
