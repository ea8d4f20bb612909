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
from lightning_piper.ir.nodes import AllGather, Chunk, Metrics, Node, Parameters, Recv, Report, Send, Update
from lightning_piper.plan.gathers import with_gathers

Priority = tuple[int, int, int, int]
_RANK = {"F": 0, "B": 1, "BI": 1, "BW": 2}


def priority(dag: TrainingDAG, node: Node) -> Priority:
    """Of nodes that could come next, the smallest does.

    Communication as soon as it can be issued, then bookkeeping, then chunks: forward before backward, by slice, by id. Nothing
    but an optimizer waits for gradients of weights (BW), so they run when no other chunk can: unless an order says otherwise,
    at the end, while devices that come later in the backward direction are still busy.
    Updates come last, for nothing in the step needs them and a tied parameter's may have to wait for another device; so do
    metrics that have to.
    """
    if isinstance(node, Send | Recv):
        return (0, 0, 0, node.id)
    if isinstance(node, Chunk):
        return (2, _RANK[node.kind], node.slice.start, node.id)
    if isinstance(node, Update) or (isinstance(node, Metrics) and _receives(dag, node)):
        return (3, 0, 0, node.id)
    return (4 if isinstance(node, Report) else 1, 0, 0, node.id)


def _receives(dag: TrainingDAG, node: Node) -> bool:
    return any(isinstance(dag.nodes[source], Recv) for source, _ in node.inputs)


def global_order(dag: TrainingDAG) -> list[Node]:
    """A topological order of the DAG by `priority` (Kahn 1962, with a heap), n log n in its nodes. Gathers of parameters, which
    wait for nothing, come where `with_gathers` puts them.

    Raises:
        VerificationError: the edges have a cycle, which is printed.
    """
    missing = {node_id: degree for node_id, degree in dag.graph.in_degree() if degree}
    order: list[Node] = list(dag.of_type(Parameters))
    gathers = list(dag.of_type(AllGather))
    for source in (*order, *gathers):
        for successor in dag.graph.successors(source.id):
            missing[successor] -= 1
            if not missing[successor]:
                del missing[successor]
    apart = {node.id for node in (*order, *gathers)}
    heap = [priority(dag, node) for node in dag.nodes.values() if node.id not in missing and node.id not in apart]
    heapq.heapify(heap)
    while heap:
        node = dag.nodes[heapq.heappop(heap)[-1]]
        order.append(node)
        for successor in dag.graph.successors(node.id):
            missing[successor] -= 1
            if not missing[successor]:
                heapq.heappush(heap, priority(dag, dag.nodes[successor]))
    if len(order) + len(gathers) < len(dag.nodes):
        cycle = [a for a, _ in nx.find_cycle(dag.graph.subgraph([i for i, degree in missing.items() if degree]))]
        shown = " -> ".join(f"%{i} {dag.nodes[i].label}" for i in [*cycle, cycle[0]])
        raise VerificationError(f"the training DAG has a cycle: {shown}")
    return with_gathers(dag, order)
