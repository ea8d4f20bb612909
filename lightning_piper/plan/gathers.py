"""When sharded parameters are gathered, and which gathers and sums over replicas are redundant.

A gather depends on nothing that the step makes, so it could be the first thing in a plan: but then its bucket would lie there
unused. Instead it is issued before the chunk that runs before the one that reads it, and has that chunk's time to arrive: two
buckets are in flight at once, the one in use and the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Accumulate, Chunk, Node, Pack, ReduceScatter, Ref

Group = tuple[int, ...]


def with_gathers(dag: TrainingDAG, order: Sequence[Node]) -> list[Node]:
    """The nodes in `order`, and the gathers among them, each as late as lets it arrive during the chunk before its first reader."""
    before: dict[int, list[Node]] = {}  # chunk -> gathers issued before it
    previous: dict[Group, Chunk] = {}
    issued: set[int] = set()
    for chunk in [node for node in order if isinstance(node, Chunk)]:
        for source in dict.fromkeys(ref[0] for ref in chunk.params if ref is not None):
            if source not in issued:
                issued.add(source)
                before.setdefault(previous.get(chunk.devices, chunk).id, []).append(dag.nodes[source])
        previous[chunk.devices] = chunk
    result: list[Node] = []
    for node in order:
        result += [*before.get(node.id, ()), node]
    return result


def drop_redundant(dag: TrainingDAG, order: Sequence[Node]) -> None:
    """Remove, from a finished DAG, communication that its order makes redundant:

    - a gather of a bucket, where no chunk of these devices has used another bucket since the last gather of it: the parameters are
      still there (as between a last layer's forward and backward pass);
    - the sum of a bucket's gradients over replicas, where the next chunk of these devices makes gradients of the same bucket: they
      are added up first (as between the backward passes of a stage that does nothing in between).

    Neither needs more memory than the communication would have needed meanwhile.
    """
    held: dict[Group, dict[Bucket, Ref]] = {}
    last: dict[Group, Chunk] = {}
    for chunk in [node for node in order if isinstance(node, Chunk)]:
        if any(ref is not None for ref in chunk.params):
            _reuse(dag, chunk, held)
        before = last.get(chunk.devices)
        if before is not None and before.key == chunk.key:
            _join(dag, before, chunk)
        last[chunk.devices] = chunk


def _reuse(dag: TrainingDAG, chunk: Chunk, held: dict[Group, dict[Bucket, Ref]]) -> None:
    """Let the chunk read what the last chunk with gathered parameters held."""
    there = held.get(chunk.devices, {})
    now: dict[Bucket, Ref] = {}
    for ref in dict.fromkeys(ref for ref in chunk.params if ref is not None):
        bucket = dag.value(ref).bucket
        assert bucket is not None
        now[bucket] = there.get(bucket, ref)
        if now[bucket] != ref:
            dag.substitute(chunk, ref, now[bucket])
            if not dag.users(dag.nodes[ref[0]]):
                dag.remove([dag.nodes[ref[0]]])
    held[chunk.devices] = now


def _join(dag: TrainingDAG, before: Chunk, chunk: Chunk) -> None:
    """Let gradients of two chunks be added up before they are summed over the replicas, bucket by bucket."""
    ahead = {scatter.outputs[0].bucket: scatter for scatter in _scatters(dag, before)}
    for scatter in _scatters(dag, chunk):
        first = ahead.get(scatter.outputs[0].bucket)
        users = dag.users(scatter)
        if first is None or first is scatter or len(users) != 1 or users != dag.users(first):
            continue
        (total,) = users
        where = total.inputs.index((scatter.id, 0))
        if total.inputs[where - 1] != (first.id, 0):
            continue  # between them another one is added: sums keep their order
        source = dag.nodes[first.inputs[0][0]]
        packed = scatter.inputs[0]
        if isinstance(source, Accumulate):
            dag.rewire(source, inputs=(*source.inputs, packed))
            both = source
        else:
            both = dag.add(
                Accumulate(
                    inputs=(first.inputs[0], packed),
                    outputs=source.outputs,
                    tags=scatter.tags,
                    devices=source.devices,
                    stream=source.stream,
                    origin=scatter.origin,
                    placed_by=scatter.placed_by,
                )
            )
        dag.rewire(scatter, inputs=((both.id, 0),))
        dag.rewire(total, inputs=tuple(ref for ref in total.inputs if ref != (first.id, 0)))
        dag.remove([first])


def _scatters(dag: TrainingDAG, chunk: Chunk) -> list[ReduceScatter]:
    """The sums over replicas of what a chunk alone, or a run of chunks up to it, has made."""
    found = []
    for pack in dag.users(chunk):
        if isinstance(pack, Pack):
            for user in dag.users(pack):
                follower = user if isinstance(user, ReduceScatter) else next(iter(dag.users(user)), None)
                if isinstance(follower, ReduceScatter):
                    found.append(follower)
    return found
