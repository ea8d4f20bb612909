"""Helpers that make training DAGs of the tests' models and inspect them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, ClassVar

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.directives import Directive, parse
from lightning_piper.directives.base import Contract
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from lightning_piper.verify.interpreter import interpret
from tests.models import captured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(Directive):
    """A directive that changes nothing, as a third party may register it. When Piper sorts a program, it
    moves none of its own directives past this directive."""

    op: ClassVar[str] = "fixed"
    contract: ClassVar[Contract] = "bitwise"

    def apply(self, dag: TrainingDAG) -> None:
        pass


def build(name: str, *program: Any, size: int | None = None) -> TrainingDAG:
    """Return the DAG of a model's step of `size` samples after a program (directives or JSON objects)."""
    return apply_program(build_dag(captured(name).step, size), parse(program))


def run(name: str, dag: TrainingDAG, seed: int = 0) -> Outcome:
    """Return the outcome of the DAG in the reference interpreter, on the first samples of the model's batch,
    as many as the DAG has."""
    c = captured(name)
    return interpret(dag, c.tensors, [x[: dag.size] if x.ndim else x for x in c.leaves], seed)


def chunk(dag: TrainingDAG, label: str) -> Chunk:
    """Return the chunk with this label, for example `F[PP=0,MB=1]`."""
    (found,) = (c for c in dag.of_type(Chunk) if c.label == label)
    return found


def shape(dag: TrainingDAG) -> Counter[tuple[Any, ...]]:
    """Return how many nodes have the same type, devices, stream and outputs, so that DAGs can be compared
    without the ids of their nodes."""
    return Counter(
        (
            type(n).__name__,
            *([n.label] * isinstance(n, Chunk)),
            n.devices,
            n.stream,
            len(n.inputs),
            *(v.label for v in n.outputs),
        )
        for n in dag.nodes.values()
    )


def place(*stages: int, tag: str = "PP") -> list[dict[str, Any]]:
    """Return `place` directives in JSON that place stage i on device `stages[i]`."""
    return [{"op": "place", "filter": {tag: i}, "devices": [device]} for i, device in enumerate(stages)]


def split(count: int, dim_name: str = "MB", **condition: Any) -> dict[str, Any]:
    return {"op": "split", "filter": condition, "dim_name": dim_name, "num_microbatches": count}


def order(*groups: Any) -> dict[str, Any]:
    return {"op": "order", "filters": list(groups)}


def f(stage: int, mb: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the filter of a stage's forward pass for microbatch `mb`; for all microbatches if `mb` is
    None."""
    return {"PP": stage, **({} if mb is None else {"MB": mb}), "PASS": "F", **more}


def b(stage: int, mb: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the filter of a stage's backward pass for a microbatch."""
    return {**f(stage, mb), "PASS": "B", **more}


def bi(stage: int, mb: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the filter of a stage's input-gradient backward pass."""
    return {**f(stage, mb), "PASS": "BI", **more}


def bw(stage: int, mb: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the filter of a stage's weight-gradient backward pass."""
    return {**f(stage, mb), "PASS": "BW", **more}


def zero_bubble(stages: int, microbatches: int) -> list[dict[str, Any]]:
    """Return `order` directives in JSON for ZB-H1 (Qi et al., 2023), one for each stage. As in the programs
    of the schedule builders, each stage has all of its passes, F, BI and BW.
    """
    program = []
    for stage in range(stages):
        warmup = min(stages - stage, microbatches)
        groups = [f(stage, mb) for mb in range(warmup)]
        for mb in range(microbatches):
            groups.append(bi(stage, mb))
            if warmup + mb < microbatches:
                groups.append(f(stage, warmup + mb))
            if mb >= stage:
                groups.append(bw(stage, mb - stage))
        groups += [bw(stage, mb) for mb in range(max(0, microbatches - stage), microbatches)]
        program.append(order(*groups))
    return program
