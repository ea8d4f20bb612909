"""The list of passes and the loop that runs it: the order of passes, the DAG that the hook sees, and the
directive that an error names.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

from lightning_piper.capture import capture
from lightning_piper.compiler import compile, compile_step
from lightning_piper.directives import Directive, Order, Place, Replicate, Split, parse
from lightning_piper.directives.base import Contract
from lightning_piper.errors import DirectiveError, ExecutionError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.order import Barrier
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import (
    Done,
    Pass,
    apply_program,
    complete,
    eliminate,
    passes_of,
    pipeline,
    run_passes,
    run_pipeline,
)
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.schedules import gpipe
from lightning_piper.verify import hook, verify_step
from lightning_piper.verify.static_check import check
from tests.dags import place, split
from tests.forward import Steps, examples
from tests.models import captured

GROUPS = [[0, 2], [1, 3]]
REPLICATED = [*gpipe(2, 2, devices=GROUPS), Replicate(filter={}, devices=GROUPS, shard_params=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turned(Directive):
    """A directive that adds gradients from the last slice to the first, and returns the contract that the
    test sets.
    """

    op: ClassVar[str] = "turned"
    contract: ClassVar[Contract] = "bitwise"
    returns: Any = None

    def apply(self, dag: TrainingDAG) -> Contract | None:
        for total in list(dag.of_type(Accumulate)):
            dag.rewire(total, inputs=total.inputs[::-1])
        return self.returns  # type: ignore[no-any-return]


def test_the_passes_of_a_training_step() -> None:
    passes = passes_of(parse(gpipe(2, 2)))
    assert [each.title for each in passes] == [
        "capture",
        "0 place",
        "1 place",
        "2 split",
        "3 order",
        "4 order",
        "complete",
        "eliminate communication",
    ]
    assert [each.contract for each in passes] == ["bitwise"] * 3 + ["reassociated"] + ["bitwise"] * 4
    assert [each.name for each in passes if not each.apart] == ["complete"]
    assert [each.name for each in passes if each.finished] == ["complete", "eliminate communication"]


def test_the_passes_of_a_step_without_a_backward_pass() -> None:
    """What places comes first, and all regions have a place before the batch is shared out."""
    program = [
        Order(filters=[{"PASS": "F"}, {"PASS": "B"}]),
        *parse(place(0, 1)),
        Replicate(filter={}, devices=[0]),
    ]
    assert [each.title for each in passes_of(program, forward_only=True)] == [
        "capture",
        "1 place",
        "2 place",
        "0 order",
        "place the rest",
        "3 replicate",
        "place the rest",
        "return everywhere",
        "complete",
        "eliminate communication",
    ]


def test_directives_that_contradict_each_other_have_no_passes() -> None:
    program = [Replicate(filter={}, devices=[0, 1]), Replicate(filter={}, devices=[1, 0])]
    for forward_only in (False, True):
        with pytest.raises(
            DirectiveError,
            match=r"directive 1 \(replicate\): field 'devices': device 1 is replica 0 here and",
        ):
            passes_of(program, forward_only)


@pytest.mark.parametrize("program", [gpipe(2, 2), REPLICATED, []], ids=["gpipe", "replicated", "none"])
def test_what_is_verified_is_what_runs(program: list[Directive], monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` and `verify` see the same graphs, and the last is the one that plans are made of."""
    c = captured("mlp")
    seen: list[str] = []
    for name in ("check", "check_orders"):  # the second where a pass only orders
        monkeypatch.setattr(hook, name, lambda dag, final=False: seen.append(f"{dag}, {final}"))
    compiled = compile_step(c.step, tuple(program))
    by_compile = seen.copy()
    seen.clear()
    report = verify_step(c.step, c.module, c.batch, program)
    assert seen == by_compile and len(seen) == len(report.rows) == len(program) + 2
    assert seen[-1] == f"{compiled.dag}, True" and seen[0] == f"{build_dag(c.step)}, False"
    by_hand = complete_and_eliminated(apply_program(build_dag(c.step), program))
    assert str(by_hand) == str(compiled.dag)


def complete_and_eliminated(dag: TrainingDAG) -> TrainingDAG:
    complete(dag)
    eliminate(dag)
    return dag


def test_a_pass_that_is_wrong_is_wrong_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the last pass does reaches plans and reports alike."""

    def lossy(dag: TrainingDAG) -> None:
        total = next(total for total in dag.of_type(Accumulate) if len(total.inputs) > 1)
        dag.rewire(total, inputs=total.inputs[1:])

    monkeypatch.setattr(pipeline, "eliminate", lossy)
    c = captured("mlp")
    wanted = (
        r"^the training DAG does not compute what one device computes:\n  gradient of .*, samples 0:2 are "
        r"missing"
    )
    with pytest.raises(VerificationError, match=wanted):
        compile_step(c.step, tuple(gpipe(2, 2)))
    with pytest.raises(VerificationError, match=wanted):
        verify_step(c.step, c.module, c.batch, gpipe(2, 2))
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    assert [row.ok for row in verify_step(c.step, c.module, c.batch, gpipe(2, 2)).rows] == [True] * 6 + [
        False
    ]


# The loop


def test_the_hook_comes_after_each_pass() -> None:
    seen: list[tuple[str, int, bool]] = []

    def after(dag: TrainingDAG, done: Done) -> None:
        assert dag.origin is None and done.seconds >= 0
        seen.append(
            (done.by.title, len(list(dag.of_type(Chunk))), all(chunk.devices for chunk in dag.of_type(Chunk)))
        )

    dag = run_pipeline(
        captured("mlp").step, [Split(filter={}, dim_name="MB", num_microbatches=2)], after=after
    )
    assert seen == [
        ("capture", 4, False),
        ("0 split", 8, False),
        ("complete", 8, True),
        ("eliminate communication", 8, True),
    ]
    assert dag.program.ops == ("split",)


def test_what_a_pass_adds_carries_the_index_of_its_directive() -> None:
    def add(dag: TrainingDAG) -> None:
        dag.add(Barrier())

    dag = run_passes(
        build_dag(captured("mlp").step), [Pass("one", "bitwise", add, 7), Pass("two", "bitwise", add)]
    )
    assert [barrier.origin for barrier in dag.of_type(Barrier)] == [7, None]


def test_an_error_names_the_directive_of_its_pass() -> None:
    def refuse(dag: TrainingDAG) -> None:
        raise DirectiveError("(mine): no")

    def after(dag: TrainingDAG, done: Done) -> None:
        raise VerificationError("it is wrong")

    dag = build_dag(captured("mlp").step)
    with pytest.raises(DirectiveError, match=r"^directive 2 \(mine\): no$"):
        run_passes(dag, [Pass("mine", "bitwise", refuse, 2)])
    assert dag.origin is None
    with pytest.raises(DirectiveError, match=r"^\(mine\): no$"):
        run_passes(dag, [Pass("mine", "bitwise", refuse)])
    with pytest.raises(VerificationError, match=r"^after directive 2 \(mine\), it is wrong$"):
        run_passes(dag, [Pass("mine", "bitwise", lambda dag: None, 2)], after)
    with pytest.raises(VerificationError, match=r"^it is wrong$"):
        run_passes(dag, [Pass("mine", "bitwise", lambda dag: None)], after)


def test_what_a_directive_raises_says_which_one_it_is() -> None:
    def apply(dag: TrainingDAG) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug") as caught:
        run_passes(build_dag(captured("mlp").step), [Pass("mine", "bitwise", apply, index=3)])
    assert caught.value.__notes__ == ["raised while Piper applied directive 3 (mine)"]


def test_an_evaluation_step_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directives are checked like those of training, and an error names the one that was applied last."""

    class Apart(Place):
        op = "apart"

        def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
            for chunk in dag.of_type(Chunk):
                dag.change(chunk, devices=(chunk.region,))  # and nothing is sent

    step = capture(Steps(), examples(), name="validation_step")
    assert compile_step(step, (Place(filter={}, devices=[0]),)).dag.forward_only
    with pytest.raises(
        VerificationError,
        match=r"^after directive 0 \(apart\), the training DAG does not compute what one device",
    ):
        compile_step(step, (Apart(filter={}, devices=[0]),))


# Contracts


def test_a_directive_says_what_it_kept_on_this_graph() -> None:
    """Sums turned round: a promise of the same bits is broken, unless `apply` says that here it is another
    one.
    """
    c, kept = captured("mlp"), {}
    for returns in (None, "reassociated"):
        report = verify_step(c.step, c.module, c.batch, parse([split(3), Turned(returns=returns)]))
        kept[report.rows[2].contract] = report.rows[2].ok
        assert report.rows[2].before.verdict == "equal within rounding"
    assert kept == {"bitwise": False, "reassociated": True}
    done: list[Done] = []
    place_by_half = [{"op": "place", "filter": {"MB": i}, "devices": [i]} for i in (0, 1)]
    run_pipeline(c.step, parse([split(2), *place_by_half]), after=lambda dag, each: done.append(each))
    assert [each.contract for each in done[2:4]] == ["bitwise", "reassociated"] and done[
        3
    ].by.contract == "bitwise"


def test_a_contract_that_is_none_is_refused() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"^directive 0 \(turned\): apply returned 3. Return 'bitwise' or 'reassociated' or 'bounded' or 'rounded'",
    ):
        apply_program(build_dag(captured("mlp").step), [Turned(returns=3)])

    class Careless(Turned):
        contract = "exact"  # type: ignore[assignment]

    with pytest.raises(
        DirectiveError, match=r"^directive 0 Careless has the contract 'exact'. Give it contract = 'bitwise'"
    ):
        compile(captured("mlp").module, torch.zeros(4, 4), [Careless()])


# Sizes


@pytest.mark.parametrize("split_first", [True, False])
def test_piper_makes_code_only_for_the_sizes_that_run(split_first: bool) -> None:
    """Neither the microbatches of all replicas nor the whole batch of a replica run, and an executor traces
    nothing.
    """
    c = captured("mlp")
    batch = tuple(torch.cat([x, x]) for x in c.leaves)
    step, groups = capture(c.module, batch), [[0, 1], [2, 3]]
    placed = [Place(group, filter={"PP": stage}) for stage, group in enumerate(groups)]
    rest = [Split(num_microbatches=4), Replicate(devices=groups)]
    compiled = compile_step(step, tuple(parse([*placed, *rest[:: 1 if split_first else -1]])))
    assert {len(chunk.slice) for chunk in compiled.dag.of_type(Chunk)} == {1} and step.size == 8
    assert compiled.dag.local_batch_size == 4 and step.traces == 2
    for node in compiled.dag.nodes.values():
        assert all(type(value.tensors) is tuple for value in node.outputs)
    transport = LocalTransport(compiled.plans)
    executors = [
        Executor(plan, step, c.tensors, {}, transport, torch.device("cpu"))
        for _, plan in sorted(compiled.plans.items())
    ]
    run_local(executors, batch, seed=0)
    assert step.traces == 2
    with pytest.raises(ExecutionError, match=r"captured with float32\[4,4\]"):
        executors[0].begin([x[:3] for x in c.leaves], seed=0)


def test_late_specs_are_the_specs_of_the_code() -> None:
    step = captured("mlp").step
    dag = build_dag(step)
    apply_program(dag, parse([split(2)]))
    for chunk in dag.of_type(Chunk):
        for i, value in enumerate(chunk.outputs):
            late, specs = value.tensors, step.at(2).code_of(chunk.key).outputs[i]
            assert late == specs == late and hash(late) == hash(specs) and repr(late) == repr(specs)
    first = next(dag.of_type(Chunk)).outputs[0].tensors
    assert first != step.at(4).code[0, "F"].outputs[0]


def test_a_rewrite_that_keeps_the_specs_of_another_size_is_refused() -> None:
    """The check compares with the specs of the chunk's own size, whether the wrong specs are late or not."""
    dag = build_dag(captured("mlp").step)
    whole = next(dag.of_type(Chunk)).outputs
    apply_program(dag, parse([split(2)]))
    chunk = next(dag.of_type(Chunk))
    check(dag)
    for wrong in (whole, tuple(dataclasses.replace(x, tensors=tuple(x.tensors)) for x in whole)):
        dag.change(chunk, outputs=wrong)
        with pytest.raises(VerificationError, match=r"but for samples 0:2 its code makes"):
            check(dag)
