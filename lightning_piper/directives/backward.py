"""The backward pass of a chunk in two: `BI`, gradients of inputs, then `BW`, gradients of weights. `order` asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_piper.ir.build import make_chunk
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Parameters, Ref


def halve(dag: TrainingDAG, chunks: Sequence[Chunk]) -> None:
    """Split backward chunks into the halves that their regions have.

    F -> saved -> B -> cotangent, grad      -->      F -> saved -> BI -> cotangent
                                                     F -> saved -> BW -> grad       (BI -> saved -> BW)
    """
    readers: dict[int, Node] = {user.id: user for chunk in chunks for user in dag.users(chunk)}
    moved: dict[Ref, Ref] = {}
    for chunk in chunks:
        moved |= _replace(dag, chunk)
    for reader in readers.values():  # each once, for a sum has a term of every slice
        dag.rewire(reader, inputs=tuple(moved.get(ref, ref) for ref in reader.inputs))


def _replace(dag: TrainingDAG, chunk: Chunk) -> dict[Ref, Ref]:
    """Split one chunk. The first half takes its place and its id, so that chunks still come after all chunks that they read.

    Returns where each of its outputs is now.
    """
    code = dag.code
    given = dict(zip(dag.interface(chunk).inputs, chunk.inputs, strict=True))
    gathered = dict(zip(dag.interface(chunk).params, chunk.params, strict=False))
    halves: list[Chunk] = []
    for kind in code.halves_of(chunk.region):
        key = (chunk.region, kind)
        inputs = tuple(given[source] for source in code.interface_of(key).inputs)
        half = make_chunk(dag, key, chunk.slice, inputs, {**chunk.tags, "PASS": kind}, devices=chunk.devices,
                          stream=chunk.stream, placed_by=chunk.placed_by, origin=dag.origin)  # fmt: skip
        half.params = _gathers(dag, [gathered.get(name) for name in code.interface_of(key).params], again=bool(halves))
        if halves:
            dag.add(half)
            for later in list(dag.graph.successors(chunk.id)):  # what a directive lets wait for B
                if (by := dag.graph.edges[chunk.id, later]["order"]) is not None:
                    dag.order(half, dag.nodes[later], by)
        else:
            dag.rewire(chunk, inputs=inputs, params=half.params)
            chunk.kind, chunk.tags, chunk.outputs, chunk.origin = kind, half.tags, half.outputs, dag.origin
            half = chunk
        halves.append(half)
        given |= {(*key, place): (half.id, place) for place in range(len(half.outputs))}
    unused = {ref[0] for ref in gathered.values() if ref is not None}
    dag.remove([dag.nodes[i] for i in sorted(unused) if not dag.users(dag.nodes[i])])
    return {
        (chunk.id, code.whole(*half.key, place)[2]): (half.id, place)
        for half in halves for place, value in enumerate(half.outputs) if value.kind != "saved"
    }  # fmt: skip


def _gathers(dag: TrainingDAG, params: Sequence[Ref | None], again: bool) -> tuple[Ref | None, ...]:
    """What brings the parameters of a half. `again`: what is gathered for each use is gathered anew."""
    if not any(params):
        return ()
    copies: dict[Ref, Ref] = {}
    for ref in dict.fromkeys(ref for ref in params if ref is not None):
        gather = dag.nodes[ref[0]]
        source = dag.nodes[gather.inputs[0][0]]
        if again and isinstance(source, Parameters) and not source.kept:
            copies[ref] = (dag.add(dataclasses.replace(gather, id=-1)).id, 0)
    return tuple(ref if ref is None else copies.get(ref, ref) for ref in params)
