"""Bugs in the weights of the loss's terms: in what the capture finds, in what is counted, in who weighs
what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_piper.capture.losses import loss_terms as found_terms
from lightning_piper.capture.losses import loss_weights, tangents
from lightning_piper.capture.losses.denominators import ONE, SAMPLES
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node
from lightning_piper.ir.values import Slice
from lightning_piper.ops import chunk as chunk_operation
from lightning_piper.ops import metrics, weights
from lightning_piper.ops.weights import CountsSum, Weights
from lightning_piper.passes import completion
from lightning_piper.runtime.chunks import ChunkBinder
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

WEIGH = (completion, "weigh")
TOKENS, TERMS, REPLICAS = "pipeline", "tied over three", "replicas"


# What the capture finds


def _term(change: Callable[[Any], Any]) -> Wrap:
    """The denominator that a term is given."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def term(self: Any, denominator: Any) -> int:
            changed = change(denominator)
            seeded.hits += changed != denominator
            return int(original(self, changed))

        return term

    return wrap


_OF_TERM = (loss_weights._LossWeighting, "_term")
mutation(
    "tokens weighed as samples",
    "a mean over positions that count weighs n/N",
    "rewrite",
    _OF_TERM,
    scenario=TOKENS,
    recapture=True,
)(_term(lambda d: d if d in (ONE, SAMPLES) else SAMPLES))
mutation(
    "samples weighed as a sum",
    "a mean over samples weighs 1",
    "rewrite",
    _OF_TERM,
    scenario="convolution",
    recapture=True,
)(_term(lambda d: ONE if d == SAMPLES else d))
mutation("a sum weighed as samples", "a sum weighs n/N", "rewrite", _OF_TERM, scenario="one device",
         recapture=True)(_term(lambda d: SAMPLES if d == ONE else d))  # fmt: skip


@mutation("one tangent for all terms", "every term's gradient has the first one's weight", "rewrite",
          (tangents._TermGradients, "of"), scenario=TERMS, recapture=True)  # fmt: skip
def _one_tangent_for_all_terms(original: Function, seeded: Seeded) -> Function:
    def led(self: Any, node: Any, term: int) -> Any:
        seeded.hit()
        return node

    return led


@mutation("tangents exchanged", "the gradient of each term has another one's weight", "rewrite",
          (loss_weights._LossWeighting, "_divide"), scenario=TERMS, recapture=True)  # fmt: skip
def _tangents_exchanged(original: Function, seeded: Seeded) -> Function:
    def divide(self: Any, loss: Any, parts: Any) -> Any:
        made = original(self, loss, parts)
        seeded.hit()
        return dict(zip(made, [*list(made.values())[1:], *list(made.values())[:1]], strict=True))

    return divide


@mutation("summand in every term", "the reported loss has each summand once for each term", "rewrite",
          (loss_weights._LossWeighting, "_part"), scenario=TERMS, recapture=True)  # fmt: skip
def _summand_in_every_term(original: Function, seeded: Seeded) -> Function:
    def part(self: Any, node: Any, term: int) -> Any:
        seeded.hit()
        return node

    return part


@mutation("a mean taken for a sum of rows", "what is reduced over the batch counts as linear with weight "
                                            "1", "rewrite",
          (found_terms.LossTerms, "_summed"), scenario="convolution", recapture=True)  # fmt: skip
def _a_mean_taken_for_a_sum_of_rows(original: Function, seeded: Seeded) -> Function:
    def summed(self: Any, node: Any) -> Any:
        made = original(self, node)
        seeded.hits += made.denominator == SAMPLES
        return dataclasses.replace(made, denominator=ONE) if made.denominator == SAMPLES else made

    return summed


# The nodes that count and weigh


def _after(change: Callable[[TrainingDAG, Weights], None]) -> Wrap:
    """A complete DAG's nodes of weights, changed."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def weigh(dag: TrainingDAG) -> None:
            original(dag)
            for node in list(dag.of_type(Weights)):
                change(dag, node)
                seeded.hit()

        return weigh

    return wrap


def _readers(dag: TrainingDAG, node: Weights) -> list[Node]:
    return [user for user in dag.users(node) if hasattr(user, "weights")]


def _of_one_replica(dag: TrainingDAG, node: Weights) -> None:
    total = dag.nodes[node.inputs[1][0]]
    dag.rewire(node, inputs=(node.inputs[0], total.inputs[0]))
    dag.remove([total])


def _summed_again(dag: TrainingDAG, node: Weights) -> None:
    first = dag.nodes[node.inputs[1][0]]
    about = {"outputs": first.outputs, "devices": first.devices, "stream": first.stream, "mesh": dag.mesh}
    again = dag.add(CountsSum(inputs=((first.id, 0),), **about))  # type: ignore[arg-type]
    dag.rewire(node, inputs=(node.inputs[0], (again.id, 0)))


def _shifted(by: int) -> Callable[[TrainingDAG, Weights], None]:
    def shift(dag: TrainingDAG, node: Weights) -> None:
        for user in _readers(dag, node):
            refs = [
                ref if ref is None else (ref[0], (ref[1] + by) % len(node.outputs)) for ref in user.weights
            ]  # type: ignore[attr-defined]
            dag.rewire(user, weights=tuple(refs))

    return shift


def _counted_once_more(dag: TrainingDAG, node: Weights) -> None:
    _counting(dag, node, (*node.slices, node.slices[-1]))


def _last_not_counted(dag: TrainingDAG, node: Weights) -> None:
    _counting(dag, node, node.slices[:-1])


def _counting(dag: TrainingDAG, node: Weights, slices: tuple[Slice, ...]) -> None:
    source = dag.nodes[node.inputs[0][0]]
    dag.change(source, slices=slices, outputs=weights.counted(dag, node.terms, slices))


def _of_replicas(dag: TrainingDAG, node: Weights) -> None:
    dag.change(node, parts=dag.replicas)


def _forgotten(dag: TrainingDAG, node: Weights) -> None:
    user = _readers(dag, node)[0]
    dag.rewire(user, weights=(None,) * len(user.weights))  # type: ignore[attr-defined]


for _name, _what, _scenario, _change in (
    (
        "denominator of one replica",
        "each replica divides by what it counted itself",
        REPLICAS,
        _of_one_replica,
    ),
    (
        "counts summed twice",
        "what was summed over the replicas is summed over them again",
        REPLICAS,
        _summed_again,
    ),
    ("weight of another microbatch", "a pass takes the next weight", TOKENS, _shifted(2)),
    (
        "gradient taken for a weight",
        "what is logged and what is differentiated change places",
        TOKENS,
        _shifted(1),
    ),
    (
        "microbatch counted twice",
        "the last slice enters the denominator once more",
        TOKENS,
        _counted_once_more,
    ),
    ("microbatch not counted", "the denominator leaves out the last slice", TOKENS, _last_not_counted),
    (
        "weights of a mean of replicas",
        "weights are divided by the number of replicas",
        REPLICAS,
        _of_replicas,
    ),
    ("weight forgotten", "one pass has no weight", TOKENS, _forgotten),
):
    mutation(_name, _what, "rewrite", WEIGH, scenario=_scenario)(_after(_change))


# What they compute


@mutation(
    "denominator of a part",
    "each slice divides by its own count",
    "executor",
    (weights, "weights_of"),
    scenario=TOKENS,
)
def _denominator_of_a_part(original: Function, seeded: Seeded) -> Function:
    def weights_of(
        denominators: Sequence[Any], own: torch.Tensor, total: torch.Tensor, parts: int
    ) -> list[torch.Tensor]:
        seeded.hit()
        return [torch.ones_like(row) for row in original(denominators, own, total, parts)]

    return weights_of


@mutation("weight without the scale", "the gradient of a term that is counted is not scaled", "executor",
          (ChunkBinder, "begin"), scenario=TOKENS)  # fmt: skip
def _weight_without_the_scale(original: Function, seeded: Seeded) -> Function:
    def begin(self: Any, leaves: Any, seed: int, scale: float) -> None:
        original(self, leaves, seed, scale)
        seeded.hits += scale != 1.0
        self.scale = 1.0

    return begin


@mutation("stale counts", "what was counted in the first step is used in "
                          "all", "executor", (ChunkBinder, "bind_counts"),
          scenario=TOKENS)  # fmt: skip
def _stale_counts(original: Function, seeded: Seeded) -> Function:
    def bind_counts(self: Any, terms: Any, slices: Any) -> Any:
        count, kept = original(self, terms, slices), []

        def first() -> Any:
            seeded.hits += bool(kept)
            kept.append(kept[0] if kept else count())
            return kept[0]

        return first

    return bind_counts


@mutation(
    "a sum's weight in plans",
    "a sum weighs n/N where plans are made",
    "executor",
    (chunk_operation, "share_of"),
    scenario="one device",
)
def _a_sums_weight_in_plans(original: Function, seeded: Seeded) -> Function:
    def share_of(dag: TrainingDAG, term: int, part: Slice) -> float | None:
        seeded.hit()
        return len(part) / dag.size

    return share_of


@mutation(
    "terms of metrics exchanged",
    "a logged value is weighed as the first term",
    "rewrite",
    (metrics, "share_of"),
    scenario="one device",
)
def _terms_of_metrics_exchanged(original: Function, seeded: Seeded) -> Function:
    def share_of(dag: TrainingDAG, term: int, part: Slice) -> float | None:
        share = original(dag, term, part)
        seeded.hits += share == 1.0
        return len(part) / dag.size if share == 1.0 else share

    return share_of
