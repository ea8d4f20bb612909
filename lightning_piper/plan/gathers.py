"""When a value is brought that waits for nothing new: a gather of sharded parameters, a fetch from the host.

It could be issued as soon as what it reads is there: but then the value would lie there unused. Instead it is issued some chunks
before the one that reads it, and has their time to arrive. Of gathers two buckets are in flight at once, the one in use and the
next one; `ops.gather` issues them on the stream that reads them, so that it is the same on a device that falls behind its host.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Turn

Group = tuple[int, ...]


def with_gathers(dag: TrainingDAG, order: Sequence[Node]) -> list[Node]:
    """The nodes in `order`, and those among them whose turn is `AHEAD`: `Node.ahead` chunks of the same devices before the first
    reader, or before what an edge without data puts behind them; but not before what they read is there. n log n in the edges."""
    index: dict[int, int] = {}
    chunks: dict[Group, list[int]] = {}  # of each group, where they are in the order
    before: dict[int, list[Node]] = {}  # what is issued before a node
    issued: set[int] = set()
    for i, node in enumerate(order):
        index[node.id] = i
        own = chunks.setdefault(node.devices, [])
        for source, ahead in _brought(dag, node):
            if source.id not in issued:
                issued.add(source.id)
                there = max((bisect(own, index[p]) for p in dag.graph.predecessors(source.id)), default=0)
                place = max(len(own) - ahead, there)
                before.setdefault(order[own[place]].id if place < len(own) else node.id, []).append(source)
        if isinstance(node, Chunk):
            own.append(i)
    result: list[Node] = []
    for node in order:
        result += [*before.get(node.id, ()), node]
    return result


def _brought(dag: TrainingDAG, node: Node) -> Iterator[tuple[Node, int]]:
    """What is to be brought before a node, and how many chunks ahead of it."""
    read = dict.fromkeys(ref[0] for ref in node.reads)
    for source in (*read, *sorted(set(dag.graph.predecessors(node.id)) - read.keys())):
        found = dag.nodes[source]
        if found.turn is Turn.AHEAD:
            yield found, found.ahead if source in read else 0
