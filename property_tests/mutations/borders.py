"""Bugs at the borders of a split part, and in what a step hands on besides gradients: metrics, buffers,
random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_piper.directives import split
from lightning_piper.directives.rewrites import transfers
from lightning_piper.ir import seeds
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.values import Slice
from lightning_piper.ops import build, metrics
from lightning_piper.ops import chunk as chunk_operation
from lightning_piper.ops.communication.reduce import AllReduce
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.update import Update
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

READ_COPIES = (split._Rewrite, "_read_copies")


# Cut and concat


def _made(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Wrap:
    """The fields of a node, changed as it is made. What takes the place of its class is a class as well, of
    the same instances.
    """

    def wrap(original: Any, seeded: Seeded) -> Function:
        class Making(type):
            def __call__(cls, **fields: Any) -> Any:
                changed = {**fields, **change(fields)}
                seeded.hits += changed != fields
                return original(**changed)

            def __instancecheck__(cls, node: object) -> bool:
                return isinstance(node, original)

        return Making(original.__name__, (original,), {})

    return wrap


def _earlier_rows(fields: dict[str, Any]) -> dict[str, Any]:
    return {"start": fields["start"] - 1, "stop": fields["stop"] - 1} if fields["start"] else {}


mutation("cut at the wrong rows", "a piece begins and ends one row too early", "rewrite", (split, "Cut"))(
    _made(_earlier_rows)
)
mutation("cut along the wrong dimension", "a piece of every sample instead of some "
                                          "samples", "rewrite", (split, "Cut"))(
    _made(lambda fields: {"dim": fields["dim"] + 1}))  # fmt: skip
mutation("concat in the wrong order", "pieces are joined from the last to the "
                                      "first", "rewrite", (split, "Concat"))(
    _made(lambda fields: {"inputs": fields["inputs"][::-1]}))  # fmt: skip
mutation("concat without the last piece", "the last piece is not joined", "rewrite", (split, "Concat"))(
    _made(lambda fields: {"inputs": fields["inputs"][:-1]}))  # fmt: skip
mutation("concat along the wrong dimension", "pieces are joined side by side", "rewrite", (split, "Concat"))(
    _made(lambda fields: {"dim": fields["dim"] + 2}))  # fmt: skip


# Metrics


def _metrics(change: Callable[[TrainingDAG, Metrics], None]) -> Wrap:
    """The node that merges a metric over slices, changed after a split."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def read_copies(self: Any, user: Any) -> None:
            original(self, user)
            if isinstance(user, Metrics):
                change(self.dag, user)
                seeded.hit()

        return read_copies

    return wrap


def _lose_one(dag: TrainingDAG, node: Metrics) -> None:
    dag.change(node, metrics=node.metrics[1:], terms=node.terms[1:], slices=node.slices[1:])
    dag.rewire(node, inputs=node.inputs[1:])


def _forget_slices(dag: TrainingDAG, node: Metrics) -> None:
    dag.change(node, slices=(Slice(0, dag.size),) * len(node.slices))


def _exchange(dag: TrainingDAG, node: Metrics) -> None:
    last = max(node.metrics)
    dag.change(node, metrics=tuple(last - metric for metric in node.metrics))


mutation(
    "microbatch missing in the loss", "the reported loss leaves out one microbatch", "rewrite", READ_COPIES
)(_metrics(_lose_one))
mutation("loss without weights", "each microbatch enters the reported loss as if it were the "
                                 "batch", "rewrite", READ_COPIES)(
    _metrics(_forget_slices))  # fmt: skip
mutation("metrics exchanged", "the loss is reported under another metric's name", "rewrite", READ_COPIES)(
    _metrics(_exchange)
)


@mutation("metrics of a device lost", "the sum over devices leaves out one region's metrics", "rewrite",
          (transfers, "connect_report"))  # fmt: skip
def _metrics_of_a_device_lost(original: Function, seeded: Seeded) -> Function:
    def connect_report(dag: TrainingDAG) -> None:
        original(dag)
        for total in dag.of_type(AllReduce):
            if len(total.inputs) > 1:
                dag.rewire(total, inputs=total.inputs[:-1])
                seeded.hit()

    return connect_report


@mutation("metrics counted twice", "what a device reports enters the sum over devices and the "
                                   "report", "rewrite",
          (transfers, "connect_report"))  # fmt: skip
def _metrics_counted_twice(original: Function, seeded: Seeded) -> Function:
    def connect_report(dag: TrainingDAG) -> None:
        original(dag)
        for total in list(dag.of_type(AllReduce)):
            dag.rewire(next(dag.of_type(StepReport)), inputs=((total.id, 0), total.inputs[0]))
            seeded.hit()

    return connect_report


@mutation("report missing", "nobody reports the loss", "rewrite", (build, "_report"))
def _report_missing(original: Function, seeded: Seeded) -> Function:
    def report(dag: TrainingDAG, chunks: Any) -> None:
        original(dag, chunks)
        node = next(dag.of_type(StepReport))
        dag.rewire(node, inputs=())
        seeded.hit()

    return report


@mutation("maximum merged as sum", "the largest values of microbatches are added up", "rewrite",
          (metrics, "folds"))  # fmt: skip
def _maximum_merged_as_sum(original: Function, seeded: Seeded) -> Function:
    def folds(code: Any) -> tuple[str, ...]:
        seeded.hit()
        return tuple("sum" if name == "max" else name for name in original(code))

    return folds


# Buffers


@mutation("statistics of each microbatch alone", "every microbatch reads the buffers as they were before "
                                                 "the step", "rewrite",
          (split, "chain_state"), scenario="batch norm")  # fmt: skip
def _statistics_of_each_microbatch_alone(original: Function, seeded: Seeded) -> Function:
    def chain_state(dag: TrainingDAG) -> None:
        original(dag)
        for chunk in dag.of_type(Chunk):
            if any(chunk.state):
                dag.rewire(chunk, state=(None,) * len(chunk.state))
                seeded.hit()

    return chain_state


def _writers(dag: TrainingDAG, update: Update) -> list[Ref]:
    """Who changes the buffers of an update, by slice."""
    node, index = update.inputs[0]
    key = _chunk(dag, node).key
    return [
        (chunk.id, index)
        for chunk in sorted((c for c in dag.of_type(Chunk) if c.key == key), key=lambda c: c.slice)
    ]


def _chunk(dag: TrainingDAG, node: int) -> Chunk:
    found = dag.nodes[node]
    assert isinstance(found, Chunk)
    return found


def _buffer_updates(dag: TrainingDAG) -> list[Update]:
    return [update for update in dag.of_type(Update) if dag.value(update.inputs[0]).kind == "buffer"]


@mutation("statistics chained backwards", "buffers pass from the last microbatch to the "
                                          "first", "rewrite", (split, "chain_state"),
          scenario="batch norm")  # fmt: skip
def _statistics_chained_backwards(original: Function, seeded: Seeded) -> Function:
    def chain_state(dag: TrainingDAG) -> None:
        original(dag)
        for update in _buffer_updates(dag):
            writers = _writers(dag, update)
            for i, (node, index) in enumerate(writers):
                reader = _chunk(dag, node)
                source = (writers[i + 1][0], index) if i + 1 < len(writers) else None
                dag.rewire(reader, state=(source,) * len(reader.state))
            dag.rewire(update, inputs=tuple(writers[:1]))
            seeded.hit()

    return chain_state


@mutation("statistics of the first microbatch", "the module keeps its buffers as the first microbatch left "
                                                "them", "rewrite",
          (split, "chain_state"), scenario="batch norm")  # fmt: skip
def _statistics_of_the_first_microbatch(original: Function, seeded: Seeded) -> Function:
    def chain_state(dag: TrainingDAG) -> None:
        original(dag)
        for update in _buffer_updates(dag):
            dag.rewire(update, inputs=tuple(_writers(dag, update)[:1]))
            seeded.hit()

    return chain_state


@mutation(
    "statistics not kept",
    "the module's buffers stay as they were",
    "rewrite",
    (build, "_final_buffers"),
    scenario="batch norm",
)
def _statistics_not_kept(original: Function, seeded: Seeded) -> Function:
    def final_buffers(dag: TrainingDAG, last: set[Ref]) -> None:
        seeded.hits += len(last)

    return final_buffers


# Random numbers


@mutation("one mask for all microbatches", "the seed of a chunk does not depend on its "
                                           "samples", "rewrite", (seeds, "seed_of"),
          scenario="dropout")  # fmt: skip
def _one_mask_for_all_microbatches(original: Function, seeded: Seeded) -> Function:
    def seed_of(step_seed: int, region: int, kind: str, start: int) -> int:
        seeded.hits += start > 0
        return original(step_seed, region, kind, 0)

    return seed_of


@mutation("one mask for all regions", "the seed of a chunk does not depend on its "
                                      "region", "rewrite", (seeds, "seed_of"),
          scenario="dropout")  # fmt: skip
def _one_mask_for_all_regions(original: Function, seeded: Seeded) -> Function:
    def seed_of(step_seed: int, region: int, kind: str, start: int) -> int:
        seeded.hits += region > 0
        return original(step_seed, 0, kind, start)

    return seed_of


@mutation("reference draws by device", "the seed of a chunk depends on where it is placed", "rewrite",
          (chunk_operation, "chunk_seed"),
          scenario="dropout")  # fmt: skip
def _reference_draws_by_device(original: Function, seeded: Seeded) -> Function:
    def chunk_seed(step_seed: int, chunk: Chunk, first: int = 0) -> int:
        seeded.hits += chunk.devices > (0,)
        return original(
            step_seed, dataclasses.replace(chunk, region=chunk.region + sum(chunk.devices)), first
        )

    return chunk_seed
