"""The layers of verification, each as a function that raises when it finds something wrong."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_piper.capture.eager.eager_reference import Outcome, run_eagerly
from lightning_piper.directives import Offload, Order, Place, Recompute
from lightning_piper.directives.base import Contract
from lightning_piper.ir.buckets import Bucket, packed_params
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, matches
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.values import Kind, Slice, flattened
from lightning_piper.ops.arguments import Arguments
from lightning_piper.ops.host import Fetch
from lightning_piper.ops.metrics import named
from lightning_piper.passes import Done, run_pipeline
from lightning_piper.plan import Plan, check_plans, compile_plans
from lightning_piper.plan.instructions import AllGatherInstruction, HostCopy, Run
from lightning_piper.runtime import (
    Executor,
    LocalTransport,
    StepResult,
    local_shards_of,
    run_local,
    shards_of,
)
from lightning_piper.testing import (
    POOL,
    Case,
    assert_same,
    cases,
    check_program,
    programs,
    run_plans,
    single_device,
)
from lightning_piper.verify import interpret
from lightning_piper.verify.hook import StaticCheck
from property_tests.mutations.scenarios import Scenario, batches

CPU = torch.device("cpu")
STEPS = 2
RATE = 1 / 64  # of the optimizer
SCALE = 8.0  # of the loss; a power of two, so that it can be divided out again without a trace


@dataclass(frozen=True)
class Built:
    """What the static layer lets pass.

    Attributes:
        stages: the DAG as captured, after each directive, and finished; and the contract of what was done to
            it.
        regrouped: a directive took sums in another order, though it promises the same bits.
        dag, plans: without redundant communication.
    """

    scenario: Scenario
    case: Case
    stages: tuple[tuple[Contract, TrainingDAG], ...]
    regrouped: bool
    dag: TrainingDAG
    plans: Mapping[int, Plan]


def static(scenario: Scenario, recapture: bool = False) -> Built:
    """Nothing runs: the DAG is checked after each directive, then the plans."""
    case = scenario.case(recapture)
    stages: list[tuple[Done, TrainingDAG]] = []
    static_check = StaticCheck()

    def after(dag: TrainingDAG, done: Done) -> None:
        static_check(dag, done)
        stages.append((done, dag.copy()))

    dag = run_pipeline(case.step, scenario.program, after=after)
    plans = compile_plans(dag)
    check_plans(plans)
    *before, _ = stages  # the last one is `dag`
    regrouped = any(done.contract != done.by.contract for done, _ in before)
    return Built(
        scenario, case, tuple((done.contract, found) for done, found in before), regrouped, dag, plans
    )


def interpreter(built: Built) -> None:
    """The captured step against eager execution; each directive against the DAG before; the whole against one
    device.
    """
    case, spec = built.case, built.scenario.spec
    last, slices = None, None
    for contract, dag in built.stages:
        now, parts = interpret(dag, case.tensors, case.leaves), dag.microbatches()
        if last is None:
            if not spec.random:
                assert_same(_eager(built, (Slice(0, case.size),)), now, "float64", 64)
        elif parts == slices or not (spec.coupled or spec.random):
            exact = contract == "bitwise" or spec.exact
            assert_same(last, now, "bitwise" if exact else "float64", _terms(dag))
        last, slices = now, parts
    assert last is not None
    outcome = interpret(built.dag, case.tensors, case.leaves)
    replicated = built.dag.replicas > 1 and not spec.exact  # sums are taken replica by replica
    assert_same(last, outcome, "float64" if replicated else "bitwise", _terms(built.dag))
    if slices is not None:
        # Sums of a tied parameter are taken region by region, those of a region with several device groups
        # group by group.
        tied = ("tied" in spec.blocks or built.regrouped) and not spec.exact
        assert_same(
            _eager(built, slices), outcome, "float64" if tied or replicated else "bitwise", _terms(built.dag)
        )


def _eager(built: Built, slices: tuple[Slice, ...]) -> Outcome:
    """One device. Random numbers are drawn by region, which only the package itself can do: with whatever bug
    it has now.
    """
    spec, case = built.scenario.spec, built.case
    if spec.random or (spec.mixed and len(slices) > 1):
        return single_device.__wrapped__(spec, case.size, slices)
    return run_eagerly(case.step, case.tensors, case.leaves, slices)


def _terms(dag: TrainingDAG) -> int:
    return 8 * dag.size + len(list(dag.of_type(Chunk)))


def plans(built: Built) -> None:
    """The plans keep the directives' promises, give what the interpreter gives, and go on doing so while
    parameters change.
    """
    _kept(built)
    _forgotten(built)
    _stored(built)
    for plan in built.plans.values():
        _frugal(plan)
    before = torch.get_rng_state()
    found = run_plans(built.case, built.dag)
    assert torch.equal(before, torch.get_rng_state()), "the step has drawn from the caller's random numbers"
    assert_same(interpret(built.dag, built.case.tensors, built.case.leaves), found, "bitwise")
    _train(built)


def _kept(built: Built) -> None:
    """Chunks run where `place` and in the order in which `order` says."""
    position = {(device, x.node): i for device, plan in built.plans.items()
                for i, x in enumerate(plan.instructions) if isinstance(x, Run)}  # fmt: skip
    chunks = list(built.dag.of_type(Chunk))
    for directive in built.scenario.program:
        if isinstance(directive, Place):
            for chunk in chunks:
                if matches(directive.filter, chunk.tags):
                    assert chunk.devices == tuple(directive.devices), (
                        f"{chunk.label} is not on {list(directive.devices)}"
                    )
        elif isinstance(directive, Order):
            groups = [[group] if isinstance(group, Mapping) else group for group in directive.filters]
            members = [[c for c in chunks if any(matches(f, c.tags) for f in group)] for group in groups]
            for before, after in itertools.pairwise(members):
                for a, b in itertools.product(before, after):
                    late = (
                        a.devices == b.devices and position[a.devices[0], a.id] > position[b.devices[0], b.id]
                    )
                    assert not late, f"{a.label} runs after {b.label}, against the order"


def _forgotten(built: Built) -> None:
    """What `recompute` forgets is not kept: backward passes read second passes alone, which run right before
    them. Where a part is kept, that is what is named, or less than all.
    """
    dag = built.dag
    runs = {
        device: [x.node for x in plan.instructions if isinstance(x, Run)]
        for device, plan in built.plans.items()
    }
    for said in [directive for directive in built.scenario.program if isinstance(directive, Recompute)]:
        chosen = [
            c
            for c in dag.of_type(Chunk)
            if c.kind != "F" and matches(said.filter, dag.regions[c.region].tags)
        ]
        if said.keep is not None:
            _kept_as_said(built, {chunk.key for chunk in chosen}, said)
            continue
        for backward in chosen:
            sources = [dag.nodes[ref[0]] for ref in backward.inputs if dag.value(ref).tensors]
            for second in [x for x in sources if isinstance(x, Chunk) and x.key == (backward.region, "F")]:
                assert second.tags.get("PASS") == AGAIN, (
                    f"{backward.label} reads what {second.label} has kept"
                )
                readers = {user.id for user in dag.users(second)}
                for device in second.devices:
                    after = runs[device][runs[device].index(second.id) + 1]
                    assert after in readers, (
                        f"{second.label} runs before {dag.nodes[after].label}, which does not need it"
                    )


def _kept_as_said(built: Built, backward: set[PassKey], said: Recompute) -> None:
    """Less is kept than without the directive; and what is named is not computed once more."""
    code, whole = built.dag.code, built.case.step.at(built.dag.code.size)
    kept, all_kept = (
        sum(
            spec.nbytes
            for region, _ in backward
            for out, specs in zip(
                step.interface_of((region, "F")).outputs, step.code_of((region, "F")).outputs, strict=True
            )
            if out.kind == Kind.SAVED
            for spec in specs
        )
        for step in (code, whole)
    )
    assert kept < all_kept, f"{kept} bytes are kept, and without a recompute {all_kept}"
    for region, kind in backward if isinstance(said.keep, list) else ():
        first, then = (
            {
                node.name: getattr(node.target, "__name__", "")
                for node in code.code_of(key).graph.nodes
                if node.op == "call_function"
            }
            for key in ((region, "F"), (region, kind))
        )
        again = [
            name
            for name in first.keys() & then
            if any(fnmatch.fnmatch(then[name].split(".")[0], p) for p in said.keep)
        ]
        assert not again, (
            f"{again} are to be kept, and the backward pass of region {region} computes them again"
        )


def _stored(built: Built) -> None:
    """What `offload` stores is kept nowhere else, and comes when it is to come: so many chunks before it is
    read.
    """
    dag = built.dag
    for said in [directive for directive in built.scenario.program if isinstance(directive, Offload)]:
        for back in [
            c
            for c in dag.of_type(Chunk)
            if c.kind != "F" and matches(said.filter, dag.regions[c.region].tags)
        ]:
            for ref in [
                ref for ref in back.inputs if dag.value(ref).kind == Kind.SAVED and dag.value(ref).nbytes
            ]:
                made = dag.nodes[ref[0]]
                again = made.tags.get("PASS") == AGAIN or getattr(made, "kind", "") == "BI"
                assert again or isinstance(made, Fetch), (
                    f"{back.label} reads what {made.label} has kept on the device"
                )
    for plan in built.plans.values():
        chunks: list[int] = []
        fetched: dict[int, int] = {}  # node -> chunks before it
        for x in plan.instructions:
            if isinstance(x, HostCopy) and not x.to_host:
                fetched[x.node] = len(chunks)
            elif isinstance(x, Run):
                for fetch in [
                    f
                    for ref in dict.fromkeys(dag.nodes[x.node].reads)
                    if isinstance(f := dag.nodes[ref[0]], Fetch)
                ]:
                    between = len(chunks) - fetched.pop(fetch.id, len(chunks))
                    assert between <= fetch.ahead, (
                        f"%{fetch.id} fetches {between} chunks before {x.label}, not {fetch.ahead}"
                    )
                chunks.append(x.node)


def _frugal(plan: Plan) -> None:
    """What is gathered for its uses alone is there for the chunk that runs, or the next one that reads
    parameters; no longer.
    """
    gathers = {
        x.into: i
        for i, x in enumerate(plan.instructions)
        if isinstance(x, AllGatherInstruction) and not x.kept
    }
    used = [
        (i, {r.slot for r in x.reads} & gathers.keys())
        for i, x in enumerate(plan.instructions)
        if isinstance(x, Run)
    ]
    last = {slot: max(i for i, slots in used if slot in slots) for slot in gathers}
    for k, (i, slots) in enumerate(used):
        there = {slot for slot, issued in gathers.items() if issued < i <= last[slot]}
        before = next((mine for _, mine in reversed(used[:k]) if mine), set())
        after = next((mine for _, mine in used[k + 1 :] if mine), set())
        assert there <= slots | after | (before & after), (
            f"device {plan.device}, {plan.instructions[i].where}: unused buckets lie there"
        )


def _train(built: Built) -> None:
    """Some steps with a simple optimizer on each device, against the same with the interpreter.

    What a device should not need is not a number: whole copies of what is sharded, and the others' shards of
    what it keeps.
    """
    dag, case, plans = built.dag, built.case, [plan for _, plan in sorted(built.plans.items())]
    shards = [poisoned(plan, shards_of(plan, case.tensors, CPU)) for plan in plans]
    pieces = [local_shards_of(plan, flats) for plan, flats in zip(plans, shards, strict=True)]
    params = [whole_params(plan, case.tensors) for plan in plans]
    buffers = {name: case.tensors[name].clone() for name in case.step.buffers}
    transport = LocalTransport(built.plans)
    executors = [Executor(plan, dag.step, own, buffers, transport, CPU, flats)
                 for plan, own, flats in zip(plans, params, shards, strict=True)]  # fmt: skip
    expected = {name: x.clone() for name, x in case.tensors.items()}
    for number, leaves in enumerate(batches(built.scenario.spec, case.size, STEPS)):
        outcome = interpret(dag, expected, leaves, seed=number)
        results = run_local(executors, leaves, seed=number, scale=SCALE)
        _same_arguments(dag, plans, results, outcome.results)
        for plan, result, own, parts in zip(plans, results, params, pieces, strict=True):
            for name, value in named(dag.code, result.metrics).items():
                assert torch.equal(value, outcome.metrics[name]), (
                    f"step {number}, device {plan.device}: {name} differs"
                )
            # In place, as clipping and unscaling do: a gradient that shares memory is changed twice.
            for grad in result.grads.values():
                grad.div_(SCALE)
            for name, grad in result.grads.items():
                held = parts.get(name, own[name])  # in one dimension also if it is a whole parameter's shard
                change = grad if held.shape == grad.shape else flattened(grad, dag.step.params[name].spec)
                held.sub_(change, alpha=RATE)
        for name, grad in outcome.grads.items():
            expected[name].sub_(grad, alpha=RATE)
        for name, value in outcome.buffers.items():
            expected[name].copy_(value)
        for plan, own, flats in zip(plans, params, shards, strict=True):
            read = {
                n for c in dag.of_type(Chunk) if plan.device in c.devices for n in dag.interface(c).params
            }
            for name in read - {name for bucket in plan.shards for name in bucket.names}:
                same = torch.equal(own[name], expected[name])
                assert same, f"step {number}, device {plan.device}: {name} differs after the update"
            for bucket, flat in flats.items():
                member = bucket.member(plan.replica)
                mine = flat.chunk(bucket.members)[member] if plan.shards[bucket] else flat
                right = packed_params(bucket, expected, plan.replica, CPU).chunk(bucket.members)[member]
                same = torch.equal(mine, right)
                assert same, (
                    f"step {number}, device {plan.device}: its shard of {bucket.names} differs after the "
                    "update"
                )
        for name, buffer in buffers.items():
            assert torch.equal(buffer, expected[name]), f"step {number}: buffer {name} differs"


def _same_arguments(
    dag: TrainingDAG,
    plans: Sequence[Plan],
    results: Sequence[StepResult],
    wanted: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Metric objects get what the interpreter says, each on one device of a replica."""
    owners = {
        name: node.devices for node in dag.of_type(Arguments) for name in dag.value(node.inputs[0]).names
    }
    for plan, result in zip(plans, results, strict=True):
        mine = {name for name, devices in owners.items() if plan.device in devices}
        assert result.results.keys() == mine, f"device {plan.device} has arguments {sorted(result.results)}"
        for name, x in result.results.items():
            assert torch.equal(x, wanted[plan.replica][name]), (
                f"device {plan.device}: argument {name} differs"
            )


def whole_params(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A device's own copies; of what is sharded there are none."""
    sharded = {name for bucket in plan.shards for name in bucket.names}
    return {
        name: torch.full_like(x, float("nan")) if name in sharded else x.clone()
        for name, x in tensors.items()
    }


def poisoned(plan: Plan, shards: dict[Bucket, torch.Tensor]) -> dict[Bucket, torch.Tensor]:
    """The same shards, without those of others in a bucket that a device keeps."""
    for bucket, flat in shards.items():
        for member, part in enumerate(flat.chunk(bucket.members)):
            if plan.shards[bucket] and member != bucket.member(plan.replica):
                part.fill_(float("nan"))
    return shards


@settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), case=cases(pool=(POOL[0], POOL[3], POOL[4])))
def random_programs(data: st.DataObject, case: Case) -> None:
    """The same programs each time."""
    check_program(case, data.draw(programs(case)))
