"""The nodes that only the last batch of a gradient accumulation runs: sums of gradients over replicas.

The batches before it run as under `no_sync` of DistributedDataParallel.
"""

from __future__ import annotations

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node
from lightning_piper.ir.values import Kind
from lightning_piper.ops.early_update import EarlyUpdate
from lightning_piper.ops.update import Accumulate, Update


def sync_only(dag: TrainingDAG) -> frozenset[int]:
    """Return the nodes that only the last batch of a gradient accumulation runs.

    These nodes are the sums of gradients over replicas, and all nodes that read these sums. The batches
    before add their terms to the gradient accumulation buffer instead. Early updates need the gradients of all
    batches, so they always wait for the last batch.

    Sharded gradients are summed in every batch, because keeping whole gradients would need the memory that
    sharding saves. If gradients of a parameter from several regions are added up, either the sums of all these
    gradients wait for the last batch, or none of the sums waits.
    """
    totals = [node for node in dag.nodes.values() if node.sums]
    # sum that waits -> all nodes that read its result
    waiting = {node.id: _followers(dag, node) for node in totals if _may_wait(dag, node)}
    sums: dict[int, set[int]] = {}  # update -> the waiting sums that it reads
    for source, followers in waiting.items():
        for node in followers:
            if isinstance(node, Update):
                sums.setdefault(node.id, set()).add(source)
    changed = True
    while changed:
        changed = False
        for update, sources in sums.items():
            if not all(_comes_from(dag, ref[0], waiting) for ref in dag.nodes[update].inputs):
                for source in sources & waiting.keys():
                    del waiting[source]
                    changed = True
    early = (node.id for node in dag.of_type(EarlyUpdate))
    return frozenset(
        n for source, followers in waiting.items() for n in (source, *(node.id for node in followers))
    ).union(early)


def _may_wait(dag: TrainingDAG, node: Node) -> bool:
    """Return whether the result of a sum over replicas is a bucket of gradients that no `Accumulate` node adds
    to other gradients."""
    value = node.outputs[0]
    return (
        value.kind == Kind.GRAD
        and value.bucket is not None
        and not any(isinstance(user, Accumulate) for user in dag.users(node))
    )


def _followers(dag: TrainingDAG, node: Node) -> list[Node]:
    """Return all nodes that read the output of a node, directly or through other nodes."""
    found: dict[int, Node] = {}
    stack = [node]
    while stack:
        for user in dag.users(stack.pop()):
            if user.id not in found:
                found[user.id] = user
                stack.append(user)
    return list(found.values())


def _comes_from(dag: TrainingDAG, node: int, sources: dict[int, list[Node]]) -> bool:
    """Return whether nodes with one input each lead from a sum in `sources` to this node's output."""
    while not dag.nodes[node].sums:
        if len(dag.nodes[node].inputs) != 1:
            return False
        node = dag.nodes[node].inputs[0][0]
    return node in sources
