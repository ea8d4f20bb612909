"""Bugs of split backward passes: of the capture that cuts them, and of the orders that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_piper.capture.cutting import graph_cut as capture_chunks
from lightning_piper.directives import order
from lightning_piper.ir import regions
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ops.update import Accumulate
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

SCENARIO = "halves"
SPLIT = (order, "split_backward")


def _split(change: Callable[[TrainingDAG, list[Chunk], Seeded], None]) -> Wrap:
    """The graph after a split of backward passes, changed. `change` gets the new BW that follow a BI, of one
    region.
    """

    def wrap(original: Function, seeded: Seeded) -> Function:
        def split_backward(dag: TrainingDAG, chunks: Any) -> None:
            before = set(dag.nodes)
            original(dag, chunks)
            made = [node for node in dag.of_type(Chunk) if node.id not in before]
            one = [chunk for chunk in made if chunk.region == made[0].region]
            if len(one) > 1:
                change(dag, one, seeded)

        return split_backward

    return wrap


def _sum_of(dag: TrainingDAG, chunk: Chunk) -> Accumulate:
    return next(user for user in dag.users(chunk) if isinstance(user, Accumulate))


def _inputs_half(dag: TrainingDAG, chunk: Chunk) -> Ref:
    """What BI hands over to a BW."""
    return next(ref for ref in chunk.inputs if getattr(dag.nodes[ref[0]], "kind", "") == "BI")


@mutation("gradient of weights dropped", "a BW is left out of a gradient's sum", "rewrite", SPLIT)
@_split
def _weights_dropped(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    total = _sum_of(dag, made[0])
    dag.rewire(total, inputs=tuple(ref for ref in total.inputs if ref[0] != made[0].id))
    seeded.hit()


@mutation("BW dropped", "one microbatch has its BI and no BW", "rewrite", SPLIT)
@_split
def _half_dropped(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    for reader in dag.users(made[0]):
        dag.rewire(reader, inputs=tuple(ref for ref in reader.inputs if ref[0] != made[0].id))
    dag.remove(made[:1])
    seeded.hit()


@mutation("gradient of weights doubled", "a BW enters a gradient twice", "rewrite", SPLIT)
@_split
def _weights_doubled(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    total = _sum_of(dag, made[0])
    dag.rewire(total, inputs=(*total.inputs, *(ref for ref in total.inputs if ref[0] == made[0].id)))
    seeded.hit()


@mutation(
    "BW of another microbatch's BI", "a BW reads what BI of another microbatch hands over", "rewrite", SPLIT
)
@_split
def _handed_over_of_another(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    dag.substitute(made[0], _inputs_half(dag, made[0]), _inputs_half(dag, made[1]))
    seeded.hit()


@mutation(
    "BW of another microbatch's F",
    "a BW reads what the forward of another microbatch saved",
    "rewrite",
    SPLIT,
)
@_split
def _saved_of_another(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    for old, new in zip(made[0].inputs, made[1].inputs, strict=True):
        if getattr(dag.nodes[old[0]], "kind", "") == "F":
            dag.substitute(made[0], old, new)
            seeded.hit()


@mutation(
    "hand-over summed",
    "a gradient's sum takes what BI hands over in place of what BW makes of it",
    "rewrite",
    SPLIT,
)
@_split
def _hand_over_summed(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    total, handed = _sum_of(dag, made[0]), _inputs_half(dag, made[0])
    dag.rewire(total, inputs=tuple(handed if ref[0] == made[0].id else ref for ref in total.inputs))
    seeded.hit()


@mutation("bundles of F exchanged", "BW reads what F saved for BI", "rewrite", SPLIT)
@_split
def _bundles_exchanged(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    old = next(
        ref
        for ref in made[0].inputs
        if dag.value(ref).label == "saved:BW" and ref != _inputs_half(dag, made[0])
    )
    forward = dag.nodes[old[0]]
    place = next(i for i, value in enumerate(forward.outputs) if value.label == "saved:BI")
    dag.substitute(made[0], old, (forward.id, place))
    seeded.hit()


@mutation("BW not waited for", "a sum does not wait for the BW that is one of its terms", "rewrite", SPLIT)
@_split
def _not_waited_for(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    dag.graph.remove_edge(made[0].id, _sum_of(dag, made[0]).id)
    seeded.hit()


@mutation(
    "BW of other samples", "a BW says that it works on the samples of another microbatch", "rewrite", SPLIT
)
@_split
def _other_samples(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    dag.change(made[0], slice=made[1].slice)
    seeded.hit()


@mutation("gradients of BW exchanged", "the gradient bundles of a BW are taken for each other, "
                                       "everywhere", "rewrite",
          (regions.StepCode, "whole"), scenario=SCENARIO)  # fmt: skip
def _gradients_exchanged(original: Function, seeded: Seeded) -> Function:
    def whole(self: Any, region: int, kind: str, index: int) -> Any:
        bundles = (
            [i for i, out in enumerate(self.interfaces[region, "B"].outputs) if out.kind == "grad"]
            if kind == "BW"
            else []
        )
        found = original(self, region, kind, index)
        if len(bundles) > 1:
            seeded.hit()
            return (*found[:2], bundles[(bundles.index(found[2]) + 1) % len(bundles)])
        return found

    return whole


@mutation("hand-over in another order", "BW takes the tensors that BI hands over from the last to the "
                                        "first", "rewrite",
          (capture_chunks, "wire_inputs"), scenario=SCENARIO, recapture=True)  # fmt: skip
def _hand_over_in_another_order(original: Function, seeded: Seeded) -> Function:
    def wire(whole: Any, parts: Any, *args: Any) -> None:
        original(whole, parts, *args)
        for ref, nodes in parts["BW"].inputs.items() if len(parts) == 2 else ():
            if ref[1] == "BI" and len(nodes) > 1:
                parts["BW"].inputs[ref] = nodes[::-1]
                seeded.hit()

    return wire


@mutation("hand-over incomplete", "BI hands over one of its tensors twice, in place of another", "rewrite",
          (capture_chunks, "wire_inputs"), scenario=SCENARIO, recapture=True)  # fmt: skip
def _hand_over_incomplete(original: Function, seeded: Seeded) -> Function:
    def wire(whole: Any, parts: Any, *args: Any) -> None:
        original(whole, parts, *args)
        if len(parts) == 2 and len(parts["BI"].outputs[-1][1]) > 1:
            out, nodes = parts["BI"].outputs[-1]
            parts["BI"].outputs[-1] = (out, [*nodes[:-1], nodes[-2]])
            seeded.hit()

    return wire
