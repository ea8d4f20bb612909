"""The split of a backward pass into an input-gradient pass `BI` and a weight-gradient pass `BW`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Kind
from lightning_piper.ops.chunk import make_chunk


def split_backward(dag: TrainingDAG, chunks: Sequence[Chunk]) -> None:
    """Replace each backward chunk by the chunks `BI` and `BW`, or by one of them if its region has only one.

    F -> saved -> B -> cotangent, grad      -->      F -> saved -> BI -> cotangent
                                                     F -> saved -> BW -> grad       (BI -> saved -> BW)
    """
    readers: dict[int, Node] = {user.id: user for chunk in chunks for user in dag.users(chunk)}
    moved: dict[Ref, Ref] = {}
    for chunk in chunks:
        moved |= _replace(dag, chunk)
    # Rewire each reader only once, because a sum reads a term of every slice.
    for reader in readers.values():
        dag.rewire(reader, inputs=tuple(moved.get(ref, ref) for ref in reader.inputs))


def _replace(dag: TrainingDAG, chunk: Chunk) -> dict[Ref, Ref]:
    """Split one chunk. Its first pass keeps the chunk's node and id, so that every chunk still has a larger
    id than the chunks that it reads.

    Returns:
        Old reference -> new reference, for each output of the chunk.
    """
    code = dag.code
    # (region, pass, output index) -> its value; parameter -> its gathered value, or None
    given = dict(zip(dag.interface(chunk).inputs, chunk.inputs, strict=True))
    gathered = dict(zip(dag.interface(chunk).params, chunk.params, strict=False))
    parts: list[Chunk] = []
    for kind in code.backward_passes_of(chunk.region):
        key = (chunk.region, kind)
        inputs = tuple(given[source] for source in code.interface_of(key).inputs)
        params = tuple(gathered.get(name) for name in code.interface_of(key).params)
        # The second pass needs gathers of its own for parameters that are gathered for each use.
        anew = (dag.gathered_anew(params) if parts else params) if any(params) else ()
        part = make_chunk(
            dag,
            key,
            chunk.slice,
            inputs,
            {**chunk.tags, "PASS": kind},
            devices=chunk.devices,
            stream=chunk.stream,
            placed_by=chunk.placed_by,
            origin=dag.origin,
            params=anew,
        )
        if parts:
            dag.add(part)
            # Nodes that a directive orders after B also wait for the second pass.
            for later in map(dag.nodes.__getitem__, list(dag.graph.successors(chunk.id))):
                by = dag.graph.edges[chunk.id, later.id]["order"]
                # A second forward pass waits for the gradient that a backward pass outputs. The first pass of
                # the split makes this gradient, so `later` need not wait for the second pass.
                if by is not None and not (later.tags.get("PASS") == AGAIN and by == later.origin):
                    dag.order(part, later, by)
        else:
            dag.rewire(chunk, inputs=inputs, params=part.params)
            dag.change(chunk, kind=kind, tags=part.tags, outputs=part.outputs, origin=dag.origin)
            part = chunk
        parts.append(part)
        given |= {(*key, index): (part.id, index) for index in range(len(part.outputs))}
    # Neither pass may read all parameters that B read. Remove gathers without readers.
    unused = {ref[0] for ref in gathered.values() if ref is not None}
    dag.remove([dag.nodes[i] for i in sorted(unused) if not dag.users(dag.nodes[i])])
    return {
        (chunk.id, code.whole(*part.key, index)[2]): (part.id, index)
        for part in parts
        for index, value in enumerate(part.outputs)
        if value.kind != Kind.SAVED
    }
