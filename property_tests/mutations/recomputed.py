"""Bugs of `recompute`: of second forward passes, and of what backward passes compute again by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_piper.capture.cutting import graph_cut as capture_chunks
from lightning_piper.capture.cutting import recomputation
from lightning_piper.directives.recompute import Recompute
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind
from lightning_piper.ops import chunk as ops_chunk
from lightning_piper.ops.metrics import Metrics
from lightning_piper.ops.update import Update
from lightning_piper.plan import instructions as ins
from lightning_piper.plan import order as plan_order
from lightning_piper.runtime import chunks as runtime_chunks
from property_tests.mutations.plans import _plan_bug
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

APPLY = (Recompute, "apply")
SECOND, RANDOM, STATE, HALVES, SHARDED = (
    f"second passes{of}" for of in ("", " with dropout", " with buffers", " in halves", ", sharded")
)
BY_NAME, BY_FRACTION = "computed again, by name", "computed again, a fraction"

# Second forward passes


def _applied(change: Callable[[TrainingDAG, list[Chunk], Seeded], None]) -> Wrap:
    """The graph after a `recompute`, changed. `change` gets the second passes of one region, microbatch by
    microbatch.
    """

    def wrap(original: Function, seeded: Seeded) -> Function:
        def apply(self: Any, dag: TrainingDAG) -> None:
            original(self, dag)
            made = [chunk for chunk in dag.of_type(Chunk) if chunk.tags.get("PASS") == AGAIN]
            last = [chunk for chunk in made if chunk.region == max(c.region for c in made)]
            if last:
                change(dag, sorted(last, key=lambda chunk: chunk.slice), seeded)

        return apply

    return wrap


def _backward_of(dag: TrainingDAG, second: Chunk) -> Chunk:
    return next(user for user in dag.users(second) if isinstance(user, Chunk) and user.kind != "F")


def _first_of(dag: TrainingDAG, second: Chunk) -> Chunk:
    return next(
        chunk
        for chunk in dag.of_type(Chunk)
        if chunk.key == second.key and chunk.slice == second.slice and chunk.id != second.id
    )


@mutation(
    "second pass of another's input",
    "a second pass reads the input of another microbatch",
    "rewrite",
    APPLY,
    scenario=SECOND,
)
@_applied
def _of_anothers_input(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    dag.substitute(made[0], made[0].inputs[0], made[1].inputs[0])
    seeded.hit()


@mutation(
    "second pass of other samples",
    "a second pass says that it works on another microbatch",
    "rewrite",
    APPLY,
    scenario=SECOND,
)
@_applied
def _of_other_samples(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    dag.change(made[0], slice=made[1].slice)
    seeded.hit()


@mutation("second pass for another microbatch", "a backward reads the second pass of another "
                                                "microbatch", "rewrite", APPLY,
          scenario=SECOND)  # fmt: skip
@_applied
def _for_another_microbatch(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    backward = _backward_of(dag, made[0])
    for ref in [ref for ref in backward.inputs if ref[0] == made[0].id]:
        dag.substitute(backward, ref, (made[1].id, ref[1]))
        seeded.hit()


@mutation(
    "second pass elsewhere",
    "a second pass runs on a device that does not have its input",
    "rewrite",
    APPLY,
    scenario=SECOND,
)
@_applied
def _elsewhere(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    dag.change(made[0], devices=tuple(1 - device for device in made[0].devices))
    seeded.hit()


@mutation(
    "second pass reports",
    "the loss of a second pass is reported beside that of the first",
    "rewrite",
    APPLY,
    scenario=SECOND,
)
@_applied
def _reports(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    for node in list(dag.of_type(Metrics)):
        first = {_first_of(dag, second).id: second.id for second in made}
        twice = [i for i, ref in enumerate(node.inputs) if ref[0] in first]
        if twice:
            dag.change(node, **{name: (*getattr(node, name), *(getattr(node, name)[i] for i in twice))
                                for name in ("metrics", "terms", "slices")})  # fmt: skip
            dag.rewire(
                node, inputs=(*node.inputs, *((first[node.inputs[i][0]], node.inputs[i][1]) for i in twice))
            )
            seeded.hit()


@mutation("second pass of the new buffer", "a second pass reads the buffer that the first one has "
                                           "changed", "rewrite", APPLY,
          scenario=STATE)  # fmt: skip
@_applied
def _of_the_new_buffer(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    for second in [chunk for chunk in dag.of_type(Chunk) if chunk.tags.get("PASS") == AGAIN and chunk.state]:
        first = _first_of(dag, second)
        new = (first.id, next(i for i, value in enumerate(first.outputs) if value.kind == Kind.BUFFER))
        dag.rewire(second, state=(new,) * len(second.state))
        seeded.hit()


@mutation("second pass changes the buffer", "the module's buffer gets what a second pass has made of "
                                            "it", "rewrite", APPLY,
          scenario=STATE)  # fmt: skip
@_applied
def _changes_the_buffer(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    by_first = {_first_of(dag, c).id: c.id for c in dag.of_type(Chunk) if c.tags.get("PASS") == AGAIN}
    for node in dag.of_type(Update):
        if dag.value(node.inputs[0]).kind == Kind.BUFFER and node.inputs[0][0] in by_first:
            dag.rewire(node, inputs=(*node.inputs, (by_first[node.inputs[0][0]], node.inputs[0][1])))
            seeded.hit()


@mutation("second pass at once", "a second pass goes before all backward passes, as first ones do", "plan",
          (plan_order, "priority"), scenario=SECOND)  # fmt: skip
def _at_once(original: Function, seeded: Seeded) -> Function:
    def priority(dag: TrainingDAG, node: Any, *args: Any) -> Any:
        found = original(dag, node, *args)
        if node.tags.get("PASS") != AGAIN:
            return found
        seeded.hit()
        return (found[0], 0, *found[2:])

    return priority


@mutation(
    "second pass without its tag", "a second pass passes for a first one", "rewrite", APPLY, scenario=SECOND
)
@_applied
def _without_its_tag(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    for second in made:
        dag.change(second, tags={name: tag for name, tag in second.tags.items() if name != "PASS"})
        seeded.hit()


def _kept(halves: tuple[str, ...]) -> Wrap:
    """A backward pass goes on reading a bundle of the first pass."""

    @_applied
    def change(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
        for second in [chunk for chunk in dag.of_type(Chunk) if chunk.tags.get("PASS") == AGAIN]:
            for backward in [
                user for user in dag.users(second) if isinstance(user, Chunk) and user.kind in halves
            ]:
                refs = [ref for ref in backward.inputs if ref[0] == second.id and dag.value(ref).tensors]
                for ref in refs[-1:]:
                    dag.substitute(backward, ref, (_first_of(dag, second).id, ref[1]))
                    seeded.hit()

    return change


mutation("one bundle kept", "of what a backward pass reads, one bundle is still that of the first "
                            "pass", "rewrite", APPLY,
         scenario=SECOND)(_kept(("B",)))  # fmt: skip
mutation(
    "BW not served", "BI reads the second pass, and BW the first one", "rewrite", APPLY, scenario=HALVES
)(_kept(("BW",)))


@mutation(
    "bundles of a second pass exchanged",
    "BW reads what a second pass makes for BI",
    "rewrite",
    APPLY,
    scenario=HALVES,
)
@_applied
def _bundles_exchanged(dag: TrainingDAG, made: list[Chunk], seeded: Seeded) -> None:
    for second in made:
        places = {value.names: i for i, value in enumerate(second.outputs) if value.kind == Kind.SAVED}
        for backward in [user for user in dag.users(second) if isinstance(user, Chunk) and user.kind == "BW"]:
            dag.substitute(backward, (second.id, places["BW",]), (second.id, places["BI",]))
            seeded.hit()


@mutation("gather shared with the first pass", "a second pass reads the parameters that were gathered for "
                                               "the first", "rewrite",
          (TrainingDAG, "gathered_anew"), scenario=SHARDED)  # fmt: skip
def _gather_shared(original: Function, seeded: Seeded) -> Function:
    def gathered_anew(self: TrainingDAG, params: Any) -> Any:
        params = tuple(params)
        seeded.hits += any(ref is not None for ref in params)
        return params

    return gathered_anew


def _gather_dropped(device: int, instructions: list[ins.Instruction]) -> list[ins.Instruction]:
    gathered = {x.into for x in instructions if isinstance(x, ins.AllGatherInstruction)}
    runs = [x for x in instructions if isinstance(x, ins.Run)]
    for second in [run for run in runs if run.label.startswith(AGAIN)]:
        first = next(
            run for run in runs if (run.key, run.slice) == (second.key, second.slice) and run is not second
        )
        old, new = ([read.slot for read in run.reads if read.slot in gathered] for run in (second, first))
        if old and old != new:
            slots = dict(zip(old, new, strict=True))
            reads = tuple(ins.Read(slots.get(read.slot, read.slot), read.last) for read in second.reads)
            return [
                replace(x, reads=reads) if x is second else x for x in instructions if x.writes != (old[0],)
            ]
    return instructions


_plan_bug("gather dropped before the second pass", "a second pass reads what was gathered for the first "
                                                   "pass, and let go of by it",
          _gather_dropped, SHARDED)  # fmt: skip


@mutation("second pass draws anew, interpreted", "a second pass has random numbers of its own in the "
                                                 "interpreter", "rewrite",
          (ops_chunk, "chunk_seed"), scenario=RANDOM)  # fmt: skip
def _draws_anew(original: Function, seeded: Seeded) -> Function:
    def chunk_seed(step_seed: int, chunk: Chunk, first: int = 0) -> int:
        again = chunk.tags.get("PASS") == AGAIN
        seeded.hits += again
        return int(original(step_seed, chunk, first)) + again

    return chunk_seed


@mutation("second pass draws anew, executed", "the executor runs a second pass under a seed of its "
                                              "own", "executor",
          (runtime_chunks.ChunkBinder, "_seeded"), scenario=RANDOM)  # fmt: skip
def _draws_anew_executed(original: Function, seeded: Seeded) -> Function:
    def bind(self: Any, call: Function, run: ins.Run) -> Function:
        bound = original(self, call, run)
        if not run.label.startswith(AGAIN):
            return bound

        def wrong() -> None:
            self.seed += 1
            bound()
            self.seed -= 1
            seeded.hit()

        return wrong

    return bind


# What backward passes compute again


@mutation("neighbor of a kept value", "of the values that are kept, two change "
                                       "places", "rewrite", (capture_chunks, "extract"),
          scenario=BY_NAME, recapture=True)  # fmt: skip
def _neighbor(original: Function, seeded: Seeded) -> Function:
    def extract(p: Any, *args: Any) -> Any:
        for i, (out, nodes) in enumerate(p.outputs):
            alike = (
                [n for n in nodes if n.meta["val"].shape == nodes[-1].meta["val"].shape]
                if out.kind == Kind.SAVED
                else []
            )
            if p.key[1] == "F" and len(alike) > 1:
                turned = dict(zip(alike, alike[1:] + alike[:1], strict=True))
                p = replace(
                    p, outputs=[*p.outputs[:i], (out, [turned.get(n, n) for n in nodes]), *p.outputs[i + 1 :]]
                )
                seeded.hit()
        return original(p, *args)

    return extract


@mutation("random numbers computed again", "a backward pass draws again what it should have been "
                                           "given", "rewrite",
          (recomputation, "_torch"), scenario="random numbers kept", recapture=True)  # fmt: skip
def _random_again(original: Any, seeded: Seeded) -> Any:
    def is_random(node: Any) -> bool:
        seeded.hits += original.is_random(node)
        return False

    class Lame:
        def __getattribute__(self, name: str) -> Any:
            return is_random if name == "is_random" else getattr(original, name)

    return Lame()


def _again(change: Callable[[Any, Any, set[Any]], set[Any]]) -> Wrap:
    """The nodes that a backward pass computes again, changed."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def computed_again(region: Any, forward: Any, *args: Any) -> set[Any]:
            found = original(region, forward, *args)
            wrong = change(forward, args, found)
            seeded.hits += wrong != found
            return wrong

        return computed_again

    return wrap


def _size_of(forward: Any) -> int:
    return int(
        max(
            node.meta["val"].shape[0]
            for node in forward.nodes
            if getattr(node.meta.get("val"), "ndim", 0) > 1
        )
    )


AGAIN_OF = (capture_chunks, "recomputed_nodes")
mutation("chosen anew at another size", "what is computed again is another choice for a microbatch of one "
                                        "sample", "rewrite",
         AGAIN_OF, scenario=BY_FRACTION, recapture=True)(_again(
             lambda forward, args, found: found if _size_of(forward) > 3 else set()))  # fmt: skip
mutation("names not looked at", "operations whose results are to be kept are computed again", "rewrite",
         (recomputation, "_keeps_by_name"), scenario=BY_NAME, recapture=True)(
             lambda original, seeded: lambda patterns: lambda node: seeded.hit() is not None)  # fmt: skip
mutation(
    "nothing computed again",
    "a fraction is asked for, and all is kept",
    "rewrite",
    AGAIN_OF,
    scenario=BY_FRACTION,
    recapture=True,
)(_again(lambda forward, args, found: set()))
