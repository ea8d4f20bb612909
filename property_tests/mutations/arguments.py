"""Bugs of what metric objects are updated with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_piper.directives import split
from lightning_piper.directives.rewrites import transfers
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Ref
from lightning_piper.ops import arguments, build
from lightning_piper.ops.arguments import Arguments, JoinArguments
from lightning_piper.ops.base import BINDERS, Binding
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

READ_COPIES, JOIN = (split._Rewrite, "_read_copies"), (arguments, "join")


# Where a split repeats what makes them


def _inputs(change: Callable[[tuple[Ref, ...]], tuple[Ref, ...]]) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def read_copies(self: Any, user: Any) -> None:
            original(self, user)
            if isinstance(user, Arguments) and change(user.inputs) != user.inputs:
                self.dag.rewire(user, inputs=change(user.inputs))
                seeded.hit()

        return read_copies

    return wrap


mutation(
    "arguments of the last microbatch lost",
    "metric objects do not get the last samples",
    "rewrite",
    READ_COPIES,
    scenario="scored",
)(_inputs(lambda refs: refs[:-1]))
mutation("arguments of a microbatch twice", "metric objects count some samples twice", "rewrite", READ_COPIES,
         scenario="scored")(_inputs(lambda refs: (*refs, refs[-1])))  # fmt: skip
mutation("arguments in another order", "metric objects get the last samples first", "rewrite", READ_COPIES,
         scenario="scored")(_inputs(lambda refs: refs[::-1]))  # fmt: skip


@mutation(
    "arguments nowhere", "a metric object gets nothing", "rewrite", (build, "_results"), scenario="scored"
)
def _arguments_nowhere(original: Function, seeded: Seeded) -> Function:
    def results(dag: TrainingDAG, chunks: Any) -> None:
        original(dag, chunks)
        dag.remove([next(dag.of_type(Arguments))])
        seeded.hit()

    return results


@mutation("arguments on every group", "two processes of a replica update a metric object", "rewrite",
          (transfers, "place_dependents"), scenario="scored over two groups")  # fmt: skip
def _arguments_on_every_group(original: Function, seeded: Seeded) -> Function:
    def place_dependents(dag: TrainingDAG, chunks: Any) -> Any:
        placed = original(dag, chunks)
        for node in [node for node in dag.of_type(Arguments) if node.devices == (0,)]:
            placed.append(dag.add(dataclasses.replace(node, id=-1, devices=(1,))))
            seeded.hit()
        return placed

    return place_dependents


# Where they are joined


Weights = Callable[[], Sequence[torch.Tensor]]


def _joined(
    change: Callable[[list[torch.Tensor], Any, Weights], tuple[list[torch.Tensor], Any, Weights]],
) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def join(values: Sequence[torch.Tensor], way: Any, weights: Weights) -> torch.Tensor:
            right = original(values, way, weights)
            wrong: torch.Tensor = original(*change(list(values), way, weights))
            seeded.hits += not torch.equal(wrong, right)
            return wrong

        return join

    return wrap


def _alike(values: Sequence[torch.Tensor]) -> Weights:
    return lambda: [torch.tensor(1 / len(values), dtype=torch.float64)] * len(values)


mutation("arguments joined backwards", "the samples of the last microbatch come "
                                       "first", "executor", JOIN, scenario="scored")(
    _joined(lambda values, way, weights: (values[::-1], way, weights)))  # fmt: skip
mutation(
    "first microbatch joined twice",
    "the first microbatch stands in the place of the last one",
    "executor",
    JOIN,
    scenario="scored",
)(_joined(lambda values, way, weights: ([*values[:-1], values[0]], way, weights)))
mutation("mean of means", "microbatches count alike, also the smaller "
                          "ones", "executor", JOIN, scenario="scored")(
    _joined(lambda values, way, weights: (values, way, _alike(values))))  # fmt: skip
mutation("means added up", "an argument without samples is the sum over "
                           "microbatches", "executor", JOIN, scenario="scored")(
    _joined(lambda values, way, weights: (values, "sum" if way == "samples" else way, weights)))  # fmt: skip


@mutation("stale arguments", "a metric object gets what it got in the step "
                             "before", "executor", (BINDERS, JoinArguments),
          scenario="scored")  # fmt: skip
def _stale_arguments(original: Function, seeded: Seeded) -> Function:
    def bind(instruction: JoinArguments, on: Binding) -> Function:
        run, before = original(instruction, on), dict[str, torch.Tensor]()

        def stale() -> None:
            run()
            found = {name: on.step_outputs.results[name] for name in instruction.names}
            if before:
                on.step_outputs.results.update(before)
                seeded.hit()
            before.update(found)

        return stale

    return bind
