"""Random programs on a step without a backward pass: every replica has the very bits that one device makes of
its share.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from hypothesis import given, note
from hypothesis import strategies as st

from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import to_json
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program, complete
from lightning_piper.testing import POOL, Case, Spec, case, cases, programs
from lightning_piper.verify import interpret


@functools.lru_cache(maxsize=256)
def forward_of(spec: Spec) -> CapturedStep:
    one = case(spec, 8)
    return capture(one.module, one.batch, name="validation_step")


# What a step returns is not weighed, so a sum of a joined term and of one of samples is refused there.
RETURNED = tuple(spec for spec in POOL if "gathered" not in spec.blocks)


@given(data=st.data(), case=cases(pool=RETURNED), fit=st.booleans())
def test_forward_only_steps_are_equivalent(tally: Counter[str], data: Any, case: Case, fit: bool) -> None:
    """Static check and plans, and the interpreter: alone, and on the shards of a training step."""
    program = data.draw(programs(case))
    note(f"program: {to_json(program)}, fit: {fit}")
    step = forward_of(case.spec).resized(case.size)
    training = build_dag(case.step)
    complete(apply_program(training, program))
    dag = compile_step(step, tuple(program), training=training if fit else None).dag
    assert dag.devices() == training.devices()
    outcome = interpret(dag, case.tensors, case.leaves)
    local_batch = case.size // dag.replicas
    if case.spec.random and dag.replicas > 1:
        return  # each replica draws other numbers than the first one
    for replica, results in enumerate(outcome.results):
        one = build_dag(step, local_batch)
        leaves = [x[replica * local_batch : (replica + 1) * local_batch] for x in case.leaves]
        wanted = interpret(one, case.tensors, leaves)
        assert results.keys() == {"0"} and torch.equal(results["0"], wanted.results[0]["0"])
        if dag.replicas == 1:
            assert all(torch.equal(outcome.metrics[name], x) for name, x in wanted.metrics.items())
            assert all(torch.equal(outcome.buffers[name], x) for name, x in wanted.buffers.items())
    tally["forward-only steps, each equal to one device"] += 1
