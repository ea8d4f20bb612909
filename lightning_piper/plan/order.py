"""One order for the whole training DAG.

Every device takes its instructions from the same topological order of the global graph. Whatever a device waits for is
therefore earlier in that order, on whichever device it is made: the device that is furthest behind can always go on, and no
plan can deadlock.
"""

from __future__ import annotations

import heapq

import networkx as nx

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN
from lightning_piper.ir.nodes import Chunk, Node, Turn
from lightning_piper.plan.gathers import with_gathers
from lightning_piper.plan.overlap import Turns, heights

Priority = tuple[int, int, int, int]
_RANK = {"F": 0, "B": 1, "BI": 1, "BW": 2}


def priority(dag: TrainingDAG, node: Node, height: int) -> Priority:
    """Of nodes that could come next, the smallest does.

    Communication as soon as it can be issued, what most chunks wait for first (`height`, see `overlap.heights`); sums over
    replicas, for which no chunk waits, and bookkeeping after it; then chunks: forward before backward, by slice, by id; a forward
    pass that runs again comes with the backward pass that it serves, for what it makes lies there until then. Nothing
    but an optimizer waits for gradients of weights (BW), so they run when no other chunk can: unless an order says otherwise,
    at the end, while devices that come later in the backward direction are still busy.
    Weights come behind forward passes, which do not need them. Updates and results come last, for nothing in the step needs them
    and they may have to wait for another device; so does bookkeeping that has to.
    """
    turn = node.turn
    if isinstance(node, Chunk):
        again = node.tags.get("PASS") == AGAIN
        served = [_RANK[user.kind] for user in dag.users(node) if isinstance(user, Chunk)] if again else []
        return (2, min(served, default=_RANK[node.kind]), node.slice.start, node.id)
    if turn is Turn.AT_ONCE or (turn is Turn.WHEN_NEEDED and height):
        return (0, -height, 0, node.id)
    if turn is Turn.BEHIND_FORWARD:
        return (2, _RANK["F"], dag.local_batch_size, node.id)
    if turn is Turn.LATE or (turn is Turn.IF_HERE and any(dag.nodes[source].reads_from == "channel" for source, _ in node.inputs)):
        return (3, 0, 0, node.id)
    return (4 if turn is Turn.LAST else 1, 0, 0, node.id)


class _Ready:
    """Nodes that could come next, by priority. Chunks of an overlap group whose turn has not come stand back as long as there is
    anything else."""

    def __init__(self, dag: TrainingDAG) -> None:
        self._dag, self._height = dag, heights(dag)
        self._turns = Turns(dag, self._height)
        self._heap: list[Priority] = []
        self._back: list[Priority] = []
        self._standing: set[int] = set()

    def add(self, node_id: int) -> None:
        entry = priority(self._dag, self._dag.nodes[node_id], self._height.get(node_id, 0))
        if self._turns.waits(node_id):
            self._standing.add(node_id)
            heapq.heappush(self._back, entry)
        else:
            heapq.heappush(self._heap, entry)

    def pop(self) -> Node | None:
        while not self._heap and self._standing:
            node_id = heapq.heappop(self._back)[-1]
            if node_id in self._standing:
                self._step_forward(node_id)
        if not self._heap:
            return None
        node_id = heapq.heappop(self._heap)[-1]
        following = self._turns.done(node_id)
        if following in self._standing:
            self._step_forward(following)
        return self._dag.nodes[node_id]

    def _step_forward(self, node_id: int) -> None:
        self._standing.discard(node_id)
        heapq.heappush(self._heap, priority(self._dag, self._dag.nodes[node_id], self._height.get(node_id, 0)))


def global_order(dag: TrainingDAG) -> list[Node]:
    """A topological order of the DAG by `priority` (Kahn 1962, with a heap), n log n in its nodes. Chunks of overlap groups take
    turns, see `overlap`. What is brought ahead of its readers comes where `with_gathers` puts it.

    Raises:
        VerificationError: the edges have a cycle, which is printed.
    """
    missing = dict(dag.graph.in_degree())
    order = [node for node in dag.nodes.values() if node.turn is Turn.FIRST]
    ready, apart = _Ready(dag), 0

    def come(node_id: int) -> int:
        """A node waits for nothing more. Returns how many are put off: what is brought ahead of its readers is as good as there."""
        turn = dag.nodes[node_id].turn
        if turn is Turn.AHEAD:
            return 1 + done(node_id)
        if turn is not Turn.FIRST:
            ready.add(node_id)
        return 0

    def done(node_id: int) -> int:
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
        cycle = [a for a, _ in nx.find_cycle(dag.graph.subgraph([i for i, degree in missing.items() if degree]))]
        shown = " -> ".join(f"%{i} {dag.nodes[i].label}" for i in [*cycle, cycle[0]])
        raise VerificationError(f"the training DAG has a cycle: {shown}")
    return with_gathers(dag, order)
