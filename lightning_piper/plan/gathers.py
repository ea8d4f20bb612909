"""When to issue gathers of sharded parameters and fetches from the host, whose inputs exist early.

Such work could start as soon as its inputs are there, but the result would then stay in memory unused. So a
plan issues the work a few chunks before its reader, and the result arrives while these chunks run. At most two
gathered buckets are in memory: the bucket in use and the next bucket. `ops.communication.gather` issues gathers on the
stream that reads them, so the limit also holds on a device that is slower than its host.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, IssuePriority, Node

Group = tuple[int, ...]  # devices of a node


def with_gathers(dag: TrainingDAG, order: Sequence[Node]) -> list[Node]:
    """Insert the nodes with turn `PREFETCH` into `order`, in n log n time in the edges.

    The function inserts each of these nodes `Node.ahead` chunks of its devices before its first reader, or
    directly before a node that an order puts after it, but never before its inputs are made.
    """
    index: dict[int, int] = {}
    chunks: dict[Group, list[int]] = {}  # group -> positions of its chunks in the order
    before: dict[int, list[Node]] = {}  # node -> nodes to issue directly before it
    issued: set[int] = set()
    for i, node in enumerate(order):
        index[node.id] = i
        own = chunks.setdefault(node.devices, [])
        for source, ahead in _brought(dag, node):
            if source.id not in issued:
                issued.add(source.id)
                there = max((bisect(own, index[p]) for p in dag.graph.predecessors(source.id)), default=0)
                position = max(len(own) - ahead, there)
                before.setdefault(order[own[position]].id if position < len(own) else node.id, []).append(
                    source
                )
        if isinstance(node, Chunk):
            own.append(i)
    result: list[Node] = []
    for node in order:
        result += [*before.get(node.id, ()), node]
    return result


def _brought(dag: TrainingDAG, node: Node) -> Iterator[tuple[Node, int]]:
    """Yield the nodes to issue before a node, each with the number of chunks between the two."""
    read = dict.fromkeys(ref[0] for ref in node.reads)
    for source in (*read, *sorted(set(dag.graph.predecessors(node.id)) - read.keys())):
        found = dag.nodes[source]
        if found.turn is IssuePriority.PREFETCH:
            yield found, found.ahead if source in read else 0
