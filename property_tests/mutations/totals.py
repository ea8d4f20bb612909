"""Bugs of sums over the whole batch: in the capture, in the rewrites, in the plans, and where they are
taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_piper.directives import split
from lightning_piper.directives.rewrites import batch_sharding
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.regions import StepCode
from lightning_piper.ops import build
from lightning_piper.ops.base import BINDERS
from lightning_piper.ops.communication.total import Total, TotalInstruction
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

SCENARIO = "whole batch"


def _dropped(which: Callable[[Chunk], bool]) -> Wrap:
    """Who is to read a sum reads the term of its own samples."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def total(dag: TrainingDAG, chunk: Chunk, i: int) -> Ref:
            if not which(chunk):
                return original(dag, chunk, i)  # type: ignore[no-any-return]
            seeded.hit()
            return (chunk.id, i)

        return total

    return wrap


mutation("statistics of the batch not summed", "each part of the batch is normalized by its "
                                               "own", "rewrite", (build, "_total"),
         scenario=SCENARIO)(_dropped(lambda chunk: chunk.kind == "F"))  # fmt: skip
mutation("gradient of statistics not summed", "each part of the batch gets what it has done to the "
                                              "statistics alone", "rewrite",
         (build, "_total"), scenario=SCENARIO)(_dropped(lambda chunk: chunk.kind != "F"))  # fmt: skip


@mutation(
    "statistics of one replica",
    "each replica sums over itself",
    "rewrite",
    (batch_sharding, "_shrink"),
    scenario=SCENARIO,
)
def _statistics_of_one_replica(original: Function, seeded: Seeded) -> Function:
    def shrink(dag: TrainingDAG, node: Node, replicas: int, made: Any) -> None:
        original(dag, node, replicas, made)
        if isinstance(node, Total):
            dag.change(node, mesh=Mesh(("data", "other"), (1, replicas), tuple(range(replicas))))
            seeded.hit()

    return shrink


@mutation("statistics of the first microbatch of each "
          "replica", "what the others make of their samples is left "
                                                                "out", "rewrite",
          (split._Rewrite, "_read_copies"), scenario=SCENARIO)  # fmt: skip
def _statistics_of_the_first_microbatch(original: Function, seeded: Seeded) -> Function:
    def read_copies(self: Any, user: Node) -> None:
        original(self, user)
        if isinstance(user, Total):
            self.dag.rewire(user, inputs=user.inputs[:1])
            seeded.hit()

    return read_copies


@mutation("running statistics once for each microbatch", "each microbatch changes what the one before has "
                                                         "left", "rewrite",
          (StepCode, "goes_on"), scenario=SCENARIO)  # fmt: skip
def _running_statistics_each_time(original: Function, seeded: Seeded) -> Function:
    def goes_on(self: StepCode, buffer: str) -> bool:
        seeded.hit()
        return True

    return goes_on


@mutation("statistics summed without the others", "each device takes its own terms for the sum", "executor",
          (BINDERS, TotalInstruction), scenario=SCENARIO)  # fmt: skip
def _statistics_without_the_others(original: Function, seeded: Seeded) -> Function:
    def bind(instruction: TotalInstruction, on: Any) -> Any:
        seeded.hit()
        return original(dataclasses.replace(instruction, members=(on.own,)), on)

    return bind
