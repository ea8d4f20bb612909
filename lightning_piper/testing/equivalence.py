"""Ways to compare a rewritten DAG with the DAG before it and with one device."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from lightning_piper.capture.eager.eager_reference import Outcome, run_eagerly
from lightning_piper.directives import accumulating
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.values import Slice
from lightning_piper.ops.metrics import named
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.runtime import Executor, LocalTransport, joined, run_local, shards_of
from lightning_piper.testing.models import Case, Spec, case
from lightning_piper.verify.interpreter import interpret

Mode = Literal["bitwise", "float64", "exact"]
EPS = torch.finfo(torch.float64).eps


def mode_of(case: Case, bitwise: bool) -> Mode:
    """Return how strictly to compare a rewrite of this case. `exact` models allow no rounding under any
    contract.
    """
    return "bitwise" if bitwise else "exact" if case.spec.exact else "float64"


def assert_same(expected: Outcome, found: Outcome, mode: Mode, terms: int = 1) -> None:
    """Assert that two outcomes agree in loss, logged values, gradients and changed buffers.

    Args:
        expected, found: Outcomes of the same step.
        mode: `bitwise` and `exact` require equal bits (except for the sign of zero). `float64` allows the
            effect of summing in another order: a sum of n terms moves by at most (n - 1) eps times the sum of
            the terms' magnitudes. The sum of magnitudes is taken to be at most `terms` times the tensor's
            largest value. With `exact` and `float64`, a gradient may also differ by the error bounds of
            operations (`Outcome.slack`).
        terms: An upper bound of the number of summed terms.

    Raises:
        AssertionError: A value differs. The message names the first one.
    """
    for kind, a, b in (
        ("metric", expected.metrics, found.metrics),
        ("gradient", expected.grads, found.grads),
        ("buffer", expected.buffers, found.buffers),
    ):
        assert a.keys() == b.keys(), f"{kind}s of {sorted(set(a) ^ set(b))} are in only one of the outcomes"
        for name in a:
            x, y = a[name].double(), b[name].double()
            loose = kind == "gradient" and mode != "bitwise"
            slack = expected.slack.get(name, 0.0) + found.slack.get(name, 0.0) if loose else 0.0
            if mode != "float64" and not slack:
                assert torch.equal(x, y), f"{kind} {name} differs by {(x - y).abs().max():.3e}"
            else:
                allowed = terms * terms * EPS * max(float(x.abs().max()), 1.0) + slack
                moved = float((x - y).abs().max())
                assert moved <= allowed, (
                    f"{kind} {name} differs by {moved:.3e}; rounding explains {allowed:.3e}"
                )


@functools.lru_cache(maxsize=4096)
def single_device(spec: Spec, size: int, slices: tuple[Slice, ...]) -> Outcome:
    """Return the outcome of the step on one device that accumulates over `slices`.

    The step runs eagerly. If it draws random numbers, or has several slices and loss terms with different
    weights, the reference interpreter runs the captured step instead.
    """
    one = case(spec, size)
    if not spec.random and (len(slices) == 1 or not spec.mixed):
        return run_eagerly(one.step, one.tensors, one.leaves, slices)
    return interpret(accumulating(one.step, slices), one.tensors, one.leaves)


def run_interpreter(case: Case, dag: TrainingDAG) -> Outcome:
    """Run a case's batch in the reference interpreter. Return the outcome: the loss and logged values,
    gradients and changed buffers, by name. The case's tensors stay unchanged."""
    return interpret(dag, case.tensors, case.leaves)


def run_plans(case: Case, dag: TrainingDAG) -> Outcome:
    """Compile the DAG to plans, check the plans, and run them with all devices in this process. Return what
    `run_interpreter` returns. Raise AssertionError if devices report different metrics."""
    plans = compile_plans(dag)
    check_plans(plans)
    buffers = {name: case.tensors[name].clone() for name in case.step.buffers}
    device = torch.device("cpu")
    transport = LocalTransport(plans)
    ordered = [plans[d] for d in sorted(plans)]
    executors = [
        Executor(
            plan, dag.step, case.tensors, buffers, transport, device, shards_of(plan, case.tensors, device)
        )
        for plan in ordered
    ]
    results = run_local(executors, case.leaves, seed=0, scale=1.0)
    for result in results[1:]:
        assert torch.equal(result.metrics, results[0].metrics), "devices report different metrics"
    grads = joined(ordered, results)
    changed = {name for interface in dag.code.interfaces.values() for name in interface.state}
    metrics = named(dag.code, results[0].metrics)
    return Outcome(metrics, grads, {name: buffers[name] for name in changed})
