"""Bugs of gathered samples: in the capture, in the rewrites, and where rows are exchanged."""

from __future__ import annotations

from typing import Any

from lightning_piper.capture.losses import loss_weights
from lightning_piper.directives import split
from lightning_piper.directives.rewrites import batch_sharding
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Node
from lightning_piper.ir.terms import Term, Weighing
from lightning_piper.ir.values import Slice
from lightning_piper.ops import build
from lightning_piper.ops.communication import gather_samples
from lightning_piper.ops.communication.gather_samples import GatherSamples
from property_tests.mutations.table import Function, Seeded, mutation

SCENARIO = "gathered samples"


@mutation(
    "samples of one replica",
    "each replica compares its own samples alone",
    "rewrite",
    (batch_sharding, "_shrink"),
    scenario=SCENARIO,
)
def _samples_of_one_replica(original: Function, seeded: Seeded) -> Function:
    def shrink(dag: TrainingDAG, node: Node, replicas: int, made: Any) -> None:
        original(dag, node, replicas, made)
        if isinstance(node, GatherSamples):
            dag.change(node, mesh=Mesh(("data", "other"), (1, replicas), tuple(range(replicas))))
            seeded.hit()

    return shrink


@mutation(
    "microbatches gathered in reverse",
    "rows of samples meet labels of others",
    "rewrite",
    (split._Rewrite, "_read_copies"),
    scenario=SCENARIO,
)
def _in_reverse(original: Function, seeded: Seeded) -> Function:
    def read_copies(self: Any, user: Node) -> None:
        original(self, user)
        if isinstance(user, GatherSamples):
            self.dag.rewire(user, inputs=user.inputs[::-1])
            seeded.hit()

    return read_copies


@mutation(
    "one microbatch gathered twice",
    "the last one is never compared",
    "rewrite",
    (split._Rewrite, "_read_copies"),
    scenario=SCENARIO,
)
def _twice(original: Function, seeded: Seeded) -> Function:
    def read_copies(self: Any, user: Node) -> None:
        original(self, user)
        if isinstance(user, GatherSamples):
            self.dag.rewire(user, inputs=(*user.inputs[:-1], user.inputs[0]))
            seeded.hit()

    return read_copies


@mutation(
    "gathered samples cut into microbatches",
    "each microbatch compares its own",
    "rewrite",
    (split.Split, "_cuttable"),
    scenario=SCENARIO,
)
def _cut(original: Function, seeded: Seeded) -> Function:
    def cuttable(self: Any, dag: TrainingDAG, chunks: list[Any]) -> list[Any]:
        seeded.hit()
        return chunks

    return cuttable


@mutation(
    "gradients of all rows to each part",
    "no part takes its own rows out",
    "rewrite",
    (build, "_exchange"),
    scenario=SCENARIO,
)
def _not_scattered(original: Function, seeded: Seeded) -> Function:
    def exchange(dag: TrainingDAG, chunk: Any, i: int, way: str) -> Any:
        if way == "gather":
            return original(dag, chunk, i, way)
        seeded.hit()
        return (chunk.id, i)

    return exchange


@mutation("loss of the whole batch in each replica", "what every replica computes counts in full for "
                                                     "each", "rewrite",
          (loss_weights._LossWeighting, "_term"), scenario=SCENARIO, recapture=True)  # fmt: skip
def _in_each_replica(original: Function, seeded: Seeded) -> Function:
    def term(self: Any, denominator: Any) -> Any:
        made = original(self, denominator)
        if denominator is loss_weights.WHOLE_BATCH and self.terms[made].weighing != Weighing.SUM:
            self.terms[made] = Term(Weighing.SUM, self.terms[made].label)
            seeded.hit()
        return made

    return term


@mutation("code for the samples of one replica", "the joined part takes the own rows out of those of "
                                                 "all", "rewrite",
          (TrainingDAG, "code_for"), scenario=SCENARIO)  # fmt: skip
def _code_of_a_part(original: Function, seeded: Seeded) -> Function:
    def code_for(self: TrainingDAG, key: Any, part: Slice) -> Any:
        if self.regions[key[0]].joined and len(part) != self.size:
            seeded.hit()
        return self.code_at(key, len(part))

    return code_for


@mutation("replicas gathered in reverse", "rows of one replica lie where the others expect their "
                                          "own", "executor",
          (gather_samples._Gather, "join"), scenario=SCENARIO)  # fmt: skip
def _replicas_in_reverse(original: Function, seeded: Seeded) -> Function:
    def join(self: Any, state: Any, received: Any) -> Any:
        seeded.hit()
        return original(self, state, received[::-1])

    return join


@mutation("rows of another replica", "each replica gets the gradients of its neighbor's rows", "executor",
          (gather_samples._Scatter, "parts"), scenario=SCENARIO)  # fmt: skip
def _of_another_replica(original: Function, seeded: Seeded) -> Function:
    def parts(self: Any, state: Any) -> Any:
        seeded.hit()
        return original(self, state)[::-1]

    return parts


@mutation("gradients of one replica for the sum", "what the others make of these rows is lost", "executor",
          (gather_samples._Scatter, "join"), scenario=SCENARIO)  # fmt: skip
def _not_summed(original: Function, seeded: Seeded) -> Function:
    def join(self: Any, state: Any, received: Any) -> Any:
        seeded.hit()
        return original(self, state, received[:1])

    return join
