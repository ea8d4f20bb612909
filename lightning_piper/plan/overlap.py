"""Overlap groups: the order of chunks that an `order` lets interleave.

The members of a group are lanes, one for each of its filters. On each device the lanes take turns, chunk by
chunk: while a chunk of one lane runs, the messages of the other lane are in flight. In each round, the chunk
with the longest chain of dependents goes first::

    lanes     F0 F2 (microbatch 0), F0 F2 (microbatch 1); region 1, between the two, is on another device
    order     F0[0]  F0[1]  F2[0]  F2[1]

Turns are a preference. If the chunk whose turn it is waits for a chunk with a later turn, the later chunk
goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk


def heights(dag: TrainingDAG) -> dict[int, int]:
    """Return for each node the number of chunks on the longest path after it, in time linear in the edges.

    Nodes of a cycle, and all nodes before it, do not have a valid height.
    """
    found: dict[int, int] = {}
    missing = dict(dag.graph.out_degree())
    ready = [node for node, degree in missing.items() if not degree]
    while ready:
        node = ready.pop()
        found.setdefault(node, 0)
        above = found[node] + isinstance(dag.nodes[node], Chunk)
        for earlier in dag.graph.predecessors(node):
            found[earlier] = max(found.get(earlier, 0), above)
            missing[earlier] -= 1
            if not missing[earlier]:
                ready.append(earlier)
    return found


class Turns:
    """A record of the chunk whose turn it is, in each overlap group on each device (or group of devices)."""

    def __init__(self, dag: TrainingDAG, height: Mapping[int, int]) -> None:
        # chunk -> the chunks of its group on its device, in their order
        self._queue: dict[int, deque[int]] = {}
        self._done: set[int] = set()
        for lanes in dag.overlaps:
            by_device: dict[tuple[int, ...], list[list[Chunk]]] = {}
            for lane in lanes:
                here: dict[tuple[int, ...], list[Chunk]] = {}
                for chunk in (dag.nodes[i] for i in lane if i in dag.nodes):
                    assert isinstance(chunk, Chunk)
                    here.setdefault(chunk.devices, []).append(chunk)
                for devices, chunks in here.items():
                    by_device.setdefault(devices, []).append(chunks)
            for found in by_device.values():
                if len(found) > 1:
                    queue = deque(_interleaved(found, height))
                    self._queue |= dict.fromkeys(queue, queue)

    def waits(self, node: int) -> bool:
        """Return whether it is another chunk's turn; False for a node outside of the overlap groups."""
        queue = self._queue.get(node)
        return queue is not None and queue[0] != node

    def done(self, node: int) -> int | None:
        """Note that a node has been issued. Returns the chunk of its group whose turn it is now. None if the
        group has no more chunks, or if the node is not in a group."""
        queue = self._queue.get(node)
        if queue is None:
            return None
        self._done.add(node)
        while queue and queue[0] in self._done:
            queue.popleft()
        return queue[0] if queue else None


def _interleaved(lanes: list[list[Chunk]], height: Mapping[int, int]) -> list[int]:
    """Return the chunks of all lanes, round by round. Round i has the i-th chunk of each lane."""

    def first(chunk: Chunk) -> tuple[int, int, int, int]:
        return (-height.get(chunk.id, 0), chunk.kind != "F", chunk.slice.start, chunk.id)

    rounds = [
        (number, *first(chunk)) for lane in lanes for number, chunk in enumerate(sorted(lane, key=first))
    ]
    return [item[-1] for item in sorted(rounds)]
