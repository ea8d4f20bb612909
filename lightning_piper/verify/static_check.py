"""The static check: proves in linear time, without running anything, that a training DAG computes what one
device computes.

The capture defines, for each input of a pass, which output of which pass it is. A DAG is correct under three
conditions. Every chunk gets exactly these values, of exactly its own samples, through nodes that only move,
cut, join or sum them. Every region runs once for every sample. Every gradient and metric is assembled from
all slices, each once and with its share n_i/N of the batch. Every buffer gets its value after the last slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node
from lightning_piper.ops.base import problems_with
from lightning_piper.ops.communication import all_to_all
from lightning_piper.ops.facts import Facts
from lightning_piper.verify import sharding
from lightning_piper.verify.completeness import incomplete


def check(dag: TrainingDAG, final: bool = False) -> None:
    """Check a training DAG.

    Replicas do the same work on their local batches, so the check covers one replica. It checks that each
    sample counts once. It also checks that a value that is summed over replicas was not summed before, and is
    summed before its use.

    Args:
        dag: The DAG.
        final: Whether the program is complete. Until then, gradients may wait for a directive that sums them
            over the replicas.

    Raises:
        VerificationError: Lists each problem, its node, and the directive that caused it.
    """
    _refuse(list(_problems(Facts(dag), final)))


def check_orders(dag: TrainingDAG) -> None:
    """Check only that the graph has no cycle.

    Raises:
        VerificationError: See `check`.
    """
    _refuse(list(_cycles(Facts(dag), dag.in_order())))


def _refuse(problems: list[str]) -> None:
    if problems:
        shown = "\n  ".join(problems[:10]) + (
            f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        )
        raise VerificationError(
            f"the training DAG does not compute what one device computes:\n  {shown}\nIf you wrote a directive or an "
            "operation, correct what it does to these nodes. Otherwise, report this [PIPER-V001]"
        )


def _problems(facts: Facts, final: bool) -> Iterable[str]:
    """Return the problems of a DAG. If its edges or the division of its experts are wrong, skip the other
    checks."""
    order = facts.dag.in_order()
    found = [*_structure(facts), *_cycles(facts, order), *all_to_all.division(facts)]
    if found:  # the other checks need a sound graph
        return found
    for node_id in order:
        node = facts.dag.nodes[node_id]
        found += _devices(facts, node)
        found += sharding.flat_values(facts, node)
        found += problems_with(facts, node)
    found += incomplete(facts, final)
    return found


def _structure(facts: Facts) -> Iterable[str]:
    """Yield the problems of the edges: each value that a node reads must exist and come before the node."""
    dag = facts.dag
    for node in dag.nodes.values():
        for source, index in node.reads:
            if source not in dag.nodes or not 0 <= index < len(dag.nodes[source].outputs):
                yield f"{facts.at(node)} reads %{source}.{index}, which does not exist"
            elif not dag.graph.has_edge(source, node.id):
                yield (
                    f"{facts.at(node)} reads %{source}.{index}, but no edge makes this node wait for %{source}: use "
                    "TrainingDAG.rewire"
                )


def _cycles(facts: Facts, order: Sequence[int]) -> Iterable[str]:
    """Yield a cycle of the graph, if the order of its nodes (`TrainingDAG.in_order`) shows that there is one."""
    dag = facts.dag
    if len(order) < len(dag.graph):
        steps = " -> ".join(facts.at(dag.nodes[a]) for a, _ in nx.find_cycle(dag.graph))
        yield f"nodes wait for each other in a circle: {steps}"


def _devices(facts: Facts, node: Node) -> Iterable[str]:
    """Yield a problem for each value that `node` reads from devices (`Node.reads_from`) that do not have the
    value."""
    if not node.devices or node.reads_from == "channel":
        return
    for ref in node.reads:
        source = facts.dag.nodes[ref[0]]
        if not source.devices or source.devices is node.devices:
            continue
        of_members = node.reads_from == "members"
        some, devices = (source, node) if of_members else (node, source)
        if not facts.within(some.devices, devices.devices):
            yield (
                f"{facts.at(node)} reads {facts.dag.value(ref).label} of {facts.at(source)}, but no send and "
                f"receive bring it to device {','.join(map(str, node.devices))}"
            )
