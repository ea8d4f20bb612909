"""Programs and compiled plans that the tests of plan/ and runtime/ share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_piper.directives import parse
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import Step
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program, complete
from lightning_piper.plan import Plan, compile_plans
from lightning_piper.plan.instructions import Instruction
from tests.models import captured

Program = list[dict[str, Any]]


def place(step: Step, devices: int) -> Program:
    """Directives that put stage i on device i modulo `devices`, and regions without a stage on device 0."""
    stages = sorted({region.tags.get("PP", -1) for region in step.at(step.size).regions})
    return [
        {"op": "place", "filter": {"PP": s if s >= 0 else "-"}, "devices": [max(s, 0) % devices]}
        for s in stages
    ]


def split(microbatches: int, **condition: Any) -> Program:
    return [{"op": "split", "filter": condition, "dim_name": "MB", "num_microbatches": microbatches}]


def order(stage: int, chunks: str) -> Program:
    """A directive with the order of a stage's chunks, for example `order(0, "F0 F1 B0 B1")`."""
    filters = [{"PP": stage, "PASS": chunk[0], "MB": int(chunk[1:])} for chunk in chunks.split()]
    return [{"op": "order", "filters": filters}]


def one_f_one_b(stages: int, microbatches: int) -> Program:
    """Orders for 1F1B: each stage runs some forward passes that fill the pipeline, then forward and backward
    passes in turn.
    """
    program: Program = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        chunks = [f"F{i}" for i in range(ahead)]
        for i in range(microbatches):
            chunks += [f"F{i + ahead}"] if i + ahead < microbatches else []
            chunks.append(f"B{i}")
        program += order(stage, " ".join(chunks))
    return program


def dag_of(step: Step, program: Sequence[Mapping[str, Any]], size: int | None = None) -> TrainingDAG:
    dag = build_dag(step, size)
    apply_program(dag, tuple(parse(list(program))))
    complete(dag)
    return dag


@functools.cache
def pipeline(name: str, devices: int, microbatches: int, ordered: bool = True) -> TrainingDAG:
    """The DAG of a model of `tests.models` as a pipeline with one stage on each device, by default with the
    order of 1F1B.
    """
    step = captured(name).step
    program = place(step, devices) + (split(microbatches) if microbatches > 1 else [])
    return dag_of(
        step, program + (one_f_one_b(devices, microbatches) if ordered and microbatches > 1 else [])
    )


def plans_of(name: str, devices: int, microbatches: int, ordered: bool = True) -> dict[int, Plan]:
    return dict(compile_plans(pipeline(name, devices, microbatches, ordered)))


def edited(plan: Plan, edit: Callable[[list[Instruction]], None]) -> Plan:
    """The plan with its instructions changed by `edit`."""
    instructions = list(plan.instructions)
    edit(instructions)
    return dataclasses.replace(plan, instructions=tuple(instructions))


def text(plan: Plan) -> list[str]:
    return str(plan).splitlines()
