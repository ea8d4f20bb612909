"""One order for the whole training DAG.

Every device takes its instructions from the same topological order of the global graph. All work that a
device waits for is earlier in this order, on any device. The device at the earliest position of the order can
therefore always proceed, and no plan can deadlock.
"""

from __future__ import annotations

import heapq

import networkx as nx

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN
from lightning_piper.ir.nodes import Chunk, IssuePriority, Node
from lightning_piper.plan.gathers import with_gathers
from lightning_piper.plan.overlap import Turns, heights

Priority = tuple[int, int, int, int]  # the smallest comes first; the last entry is the node's id
_CHUNKS = 2  # the first entry of the priority of chunks
_RANK = {"F": 0, "B": 1, "BI": 1, "BW": 2}  # kind of a pass -> its rank among chunks; the lowest comes first


def priority(dag: TrainingDAG, node: Node, height: int) -> Priority:
    """Return the sort key of a node among the nodes that could come next. The smallest key comes first:

    1. Communication as soon as it can be issued; first the communication with the longest chain of chunks
       after it (`height`, see `overlap.heights`).
    2. Sums over replicas that no chunk waits for, and bookkeeping. Then early updates, some chunks later than they
       could run, because their gradients are summed over replicas while these chunks run.
    3. Chunks: forward before backward, then by slice, then by id. A recomputed forward pass comes with the
       backward pass that it serves, because its outputs stay in memory until then. Only an optimizer waits
       for gradients of weights (BW), so these chunks run when no other chunk can. Without an `order`
       directive, this is at the end of the step, while devices of earlier stages still run backward passes.
       The nodes `Weights` (weights of the loss's terms) come after the forward passes, which do not need
       them.
    4. Updates and results, because no node needs them, and because a device may have to wait for another
       device before it can run them. Bookkeeping that has to wait for another device comes here too.
    5. The report.
    """
    turn = node.turn
    if isinstance(node, Chunk):
        again = node.tags.get("PASS") == AGAIN
        served = [_RANK[user.kind] for user in dag.users(node) if isinstance(user, Chunk)] if again else []
        return (_CHUNKS, min(served, default=_RANK[node.kind]), node.slice.start, node.id)
    if turn is IssuePriority.CRITICAL_COMM or (turn is IssuePriority.ON_DEMAND and height):
        return (0, -height, 0, node.id)
    if turn is IssuePriority.AFTER_FORWARD:
        return (_CHUNKS, _RANK["F"], dag.local_batch_size, node.id)
    if turn is IssuePriority.DEFERRED or (
        turn is IssuePriority.LOCAL_BOOKKEEPING
        and any(dag.nodes[source].reads_from == "channel" for source, _ in node.inputs)
    ):
        return (3, 0, 0, node.id)
    if turn is IssuePriority.DELAYED:
        return (1, 1, 0, node.id)
    return (4 if turn is IssuePriority.LAST else 1, 0, 0, node.id)


class _Ready:
    """A priority queue of the nodes that could come next.

    A chunk of an overlap group waits for its turn as long as any other node could come next. A node of
    `IssuePriority.DELAYED` waits for chunks of its devices as long as any chunk could come next.
    """

    def __init__(self, dag: TrainingDAG) -> None:
        self._dag, self._height = dag, heights(dag)
        self._turns = Turns(dag, self._height)
        self._heap: list[Priority] = []  # the nodes that may come next
        self._back: list[Priority] = []  # chunks that were added when it was another chunk's turn
        self._standing: set[int] = set()  # the chunks of `_back` that still wait for their turn
        # Node that waits for chunks of its devices -> how many.
        self._delayed: dict[int, int] = {}

    def add(self, node_id: int) -> None:
        node = self._dag.nodes[node_id]
        entry = priority(self._dag, node, self._height.get(node_id, 0))
        if node.turn is IssuePriority.DELAYED:
            self._delayed[node_id] = node.delay
        elif self._turns.waits(node_id):
            self._standing.add(node_id)
            heapq.heappush(self._back, entry)
        else:
            heapq.heappush(self._heap, entry)

    def pop(self) -> Node | None:
        """Return the next node to run, and remove it; None if no node is ready. If only chunks that wait for
        their turn are ready, return the first of them."""
        while not self._heap and self._standing:
            node_id = heapq.heappop(self._back)[-1]
            if node_id in self._standing:
                self._step_forward(node_id)
        if self._delayed and (not self._heap or self._heap[0][0] > _CHUNKS):
            self._end_delay(list(self._delayed))
        if not self._heap:
            return None
        node_id = heapq.heappop(self._heap)[-1]
        following = self._turns.done(node_id)
        if following in self._standing:
            self._step_forward(following)
        node = self._dag.nodes[node_id]
        if isinstance(node, Chunk) and self._delayed:
            here = set(node.devices)
            for each in self._delayed:
                self._delayed[each] -= not here.isdisjoint(self._dag.nodes[each].devices)
            self._end_delay([each for each, chunks in self._delayed.items() if chunks == 0])
        return node

    def _end_delay(self, nodes: list[int]) -> None:
        """Move nodes that wait for chunks to the nodes that may come next."""
        for node_id in nodes:
            del self._delayed[node_id]
            node = self._dag.nodes[node_id]
            heapq.heappush(self._heap, priority(self._dag, node, self._height.get(node_id, 0)))

    def _step_forward(self, node_id: int) -> None:
        """Move a chunk that waits for its turn to the nodes that may come next."""
        self._standing.discard(node_id)
        heapq.heappush(
            self._heap, priority(self._dag, self._dag.nodes[node_id], self._height.get(node_id, 0))
        )


def global_order(dag: TrainingDAG) -> list[Node]:
    """Return a topological order of the DAG by `priority`. `with_gathers` inserts the nodes that are issued ahead
    of their readers.

    Raises:
        VerificationError: The edges have a cycle, which the message shows.
    """
    return with_gathers(dag, order_without_gathers(dag))


def order_without_gathers(dag: TrainingDAG) -> list[Node]:
    """Return the nodes of `global_order` that `with_gathers` does not insert, in the same order (Kahn 1962, with a
    heap), in n log n time. Chunks of overlap groups take turns (see `overlap`).

    Raises:
        VerificationError: The edges have a cycle, which the message shows.
    """
    missing = dict(dag.graph.in_degree())
    order = [node for node in dag.nodes.values() if node.turn is IssuePriority.FIRST]
    ready, apart = _Ready(dag), 0

    def come(node_id: int) -> int:
        """Handle a node whose predecessors are done. Return the number of nodes left to `with_gathers`.

        Such nodes are treated as done, because `with_gathers` inserts them early enough.
        """
        turn = dag.nodes[node_id].turn
        if turn is IssuePriority.PREFETCH:
            return 1 + done(node_id)
        if turn is not IssuePriority.FIRST:
            ready.add(node_id)
        return 0

    def done(node_id: int) -> int:
        """Handle the nodes that can come after this node. Return the number of nodes left to `with_gathers`."""
        apart = 0
        for successor in dag.graph.successors(node_id):
            missing[successor] -= 1
            if not missing[successor]:
                apart += come(successor)
        return apart

    sources = [node_id for node_id, degree in missing.items() if not degree]
    for node in order:
        apart += done(node.id)
    for node_id in sources:
        apart += come(node_id)
    while (following := ready.pop()) is not None:
        order.append(following)
        apart += done(following.id)
    if len(order) + apart < len(dag.nodes):
        cycle = [
            a for a, _ in nx.find_cycle(dag.graph.subgraph([i for i, degree in missing.items() if degree]))
        ]
        shown = " -> ".join(f"%{i} {dag.nodes[i].label}" for i in [*cycle, cycle[0]])
        raise VerificationError(
            f"the training DAG has a cycle: {shown}. If you wrote a directive, check the edges that it adds. "
            "Otherwise, report this [PIPER-D008]"
        )
    return order
