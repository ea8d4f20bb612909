"""The layers of verification, each as a function that raises when it finds something wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_piper.capture.eager import Outcome, run_eagerly
from lightning_piper.directives import Directive, Order, Place, apply_program, finish
from lightning_piper.ir.build import build_dag, metric_names
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import matches
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Slice
from lightning_piper.plan import Plan, check_plans, compile_plans
from lightning_piper.plan.instructions import Run
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.testing import POOL, Case, assert_same, cases, check_program, programs, run_plans, single_device
from lightning_piper.verify import check, interpret
from property_tests.mutations.scenarios import Scenario, batches

CPU = torch.device("cpu")
STEPS = 2
RATE = 1 / 64  # of the optimizer
SCALE = 8.0  # of the loss; a power of two, so that it can be divided out again without a trace


@dataclass(frozen=True)
class Built:
    """What the static layer lets pass.

    Attributes:
        stages: the DAG as captured and after each directive.
        dag, plans: finished.
    """

    scenario: Scenario
    case: Case
    stages: tuple[tuple[Directive | None, TrainingDAG], ...]
    dag: TrainingDAG
    plans: Mapping[int, Plan]


def static(scenario: Scenario, recapture: bool = False) -> Built:
    """Nothing runs: the DAG is checked after each directive, then the plans."""
    case = scenario.case(recapture)
    dag = build_dag(case.step)
    stages: list[tuple[Directive | None, TrainingDAG]] = [(None, dag.copy())]
    check(dag)

    def after(dag: TrainingDAG, index: int, directive: Directive) -> None:
        check(dag)
        stages.append((directive, dag.copy()))

    apply_program(dag, scenario.program, after)
    finish(dag)
    check(dag)
    plans = compile_plans(dag)
    check_plans(plans)
    return Built(scenario, case, tuple(stages), dag, plans)


def interpreter(built: Built) -> None:
    """The captured step against eager execution; each directive against the DAG before; the whole against one device."""
    case, spec = built.case, built.scenario.spec
    last, slices = None, None
    for index, (directive, dag) in enumerate(built.stages, start=-1):
        now, parts = interpret(dag, case.tensors, case.leaves), dag.microbatches()
        if last is None:
            if not spec.random:
                assert_same(_eager(built, (Slice(0, case.size),)), now, "float64", 64)
        elif parts == slices or not (spec.coupled or spec.random):
            assert directive is not None
            exact = (directive.contract == "bitwise" and index not in dag.reassociated) or spec.exact
            assert_same(last, now, "bitwise" if exact else "float64", _terms(dag))
        last, slices = now, parts
    assert last is not None
    outcome = interpret(built.dag, case.tensors, case.leaves)
    assert_same(last, outcome, "bitwise")
    if slices is not None:
        # Sums of a tied parameter are taken region by region, those of a region with several homes home by home.
        tied = ("tied" in spec.blocks or built.dag.reassociated) and not spec.exact
        assert_same(_eager(built, slices), outcome, "float64" if tied else "bitwise", _terms(built.dag))


def _eager(built: Built, slices: tuple[Slice, ...]) -> Outcome:
    """One device. Random numbers are drawn by region, which only the package itself can do: with whatever bug it has now."""
    spec, case = built.scenario.spec, built.case
    if spec.random:
        return single_device.__wrapped__(spec, case.size, slices)
    return run_eagerly(case.step, case.tensors, case.leaves, slices)


def _terms(dag: TrainingDAG) -> int:
    return 8 * dag.size + len(list(dag.of_type(Chunk)))


def plans(built: Built) -> None:
    """The plans keep the directives' promises, give what the interpreter gives, and go on doing so while parameters change."""
    _kept(built)
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
                    assert chunk.devices == tuple(directive.devices), f"{chunk.label} is not on {list(directive.devices)}"
        elif isinstance(directive, Order):
            groups = [[group] if isinstance(group, Mapping) else group for group in directive.filters]
            members = [[c for c in chunks if any(matches(f, c.tags) for f in group)] for group in groups]
            for before, after in itertools.pairwise(members):
                for a, b in itertools.product(before, after):
                    late = a.devices == b.devices and position[a.devices[0], a.id] > position[b.devices[0], b.id]
                    assert not late, f"{a.label} runs after {b.label}, against the order"


def _train(built: Built) -> None:
    """Some steps with a simple optimizer on each device, against the same with the interpreter."""
    dag, case = built.dag, built.case
    params = {device: {name: x.clone() for name, x in case.tensors.items()} for device in built.plans}
    buffers = {name: case.tensors[name].clone() for name in case.step.buffers}
    transport = LocalTransport(built.plans)
    executors = [Executor(plan, case.step, params[d], buffers, transport, CPU) for d, plan in sorted(built.plans.items())]
    expected = {name: x.clone() for name, x in case.tensors.items()}
    names = metric_names(dag.code)
    for number, leaves in enumerate(batches(built.scenario.spec, case.size, STEPS)):
        outcome = interpret(dag, expected, leaves, seed=number)
        results = run_local(executors, leaves, seed=number, scale=SCALE)
        for device, result in zip(sorted(built.plans), results, strict=True):
            for name, value in zip(names, result.metrics.unbind(), strict=True):
                assert torch.equal(value, outcome.metrics[name]), f"step {number}, device {device}: {name} differs"
            # In place, as clipping and unscaling do: a gradient that shares memory is changed twice.
            for grad in result.grads.values():
                grad.div_(SCALE)
            for name, grad in result.grads.items():
                params[device][name].sub_(grad, alpha=RATE)
        for name, grad in outcome.grads.items():
            expected[name].sub_(grad, alpha=RATE)
        for name, value in outcome.buffers.items():
            expected[name].copy_(value)
        for chunk in dag.of_type(Chunk):
            for name in dag.interface(chunk).params:
                for device in chunk.devices:
                    same = torch.equal(params[device][name], expected[name])
                    assert same, f"step {number}, device {device}: {name} differs after the update"
        for name, buffer in buffers.items():
            assert torch.equal(buffer, expected[name]), f"step {number}: buffer {name} differs"


@settings(max_examples=15, derandomize=True, database=None, deadline=None, phases=[Phase.generate], report_multiple_bugs=False,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(data=st.data(), case=cases(pool=(POOL[0], POOL[3], POOL[4])))
def random_programs(data: st.DataObject, case: Case) -> None:
    """The same programs each time."""
    check_program(case, data.draw(programs(case)))
