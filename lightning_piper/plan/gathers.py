"""When sharded parameters are gathered.

A gather depends on nothing that the step makes, so it could be the first thing in a plan: but then its bucket would lie there
unused. Instead it is issued before the chunk that runs before the one that reads it, and has that chunk's time to arrive: two
buckets are in flight at once, the one in use and the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node

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
