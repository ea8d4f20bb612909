"""Runs steps with the executors and with the reference interpreter, and returns their results in a form that
can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ops.metrics import named
from lightning_piper.passes.completion import complete
from lightning_piper.plan import Plan, compile_plans
from lightning_piper.runtime import Executor, LocalTransport, StepResult, run_local
from lightning_piper.verify.interpreter import interpret
from tests.models import Captured

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rig:
    """The executors of all devices in one process. `tensors` are their parameters and buffers."""

    dag: TrainingDAG
    captured: Captured
    executors: list[Executor]
    tensors: dict[str, Tensor]

    def step(self, seed: int = 3, scale: float = 1.0) -> list[StepResult]:
        return run_local(self.executors, self.captured.leaves, seed, scale)

    def outcome(self, seed: int = 3) -> Outcome:
        """The result of a step, with the gradients of all devices together."""
        before = {name: x.clone() for name, x in self.tensors.items()}
        results = self.step(seed)
        return outcome_of(
            self.dag, results, {n: x for n, x in self.tensors.items() if not torch.equal(x, before[n])}
        )


def rig(captured: Captured, dag: TrainingDAG, plans: Mapping[int, Plan] | None = None) -> Rig:
    complete(dag)
    plans = compile_plans(dag) if plans is None else plans
    tensors = {name: x.clone() for name, x in captured.tensors.items()}
    transport = LocalTransport(plans)
    executors = [Executor(plans[d], captured.step, tensors, tensors, transport, CPU) for d in sorted(plans)]
    return Rig(dag, captured, executors, tensors)


def outcome_of(dag: TrainingDAG, results: list[StepResult], buffers: Mapping[str, Tensor]) -> Outcome:
    grads: dict[str, Tensor] = {}
    for result in results:
        for name, grad in result.grads.items():
            assert name not in grads or torch.equal(grads[name], grad), f"devices disagree about {name}"
            grads[name] = grad
        assert torch.equal(result.metrics, results[0].metrics)
    return Outcome(named(dag.code, results[0].metrics), grads, dict(buffers))


def reference(captured: Captured, dag: TrainingDAG, seed: int = 3) -> Outcome:
    """The result that the reference interpreter gives; of the buffers, only those that have changed."""
    before = {name: x.clone() for name, x in captured.tensors.items()}
    outcome = interpret(dag, before, [x.clone() for x in captured.leaves], seed)
    changed = {name: x for name, x in outcome.buffers.items() if not torch.equal(x, captured.tensors[name])}
    return Outcome(outcome.metrics, outcome.grads, changed)
