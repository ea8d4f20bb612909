"""The text form of a training DAG: one line for each node."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import GROUPS
from lightning_piper.ir.nodes import Node
from lightning_piper.ir.values import Partial, Replicated


def text_of(dag: TrainingDAG) -> str:
    """Return all nodes, in an order that respects all edges.

    For example `%4 B[PP=1,MB=0] 0:2 @1 (%1.0) -> cotangent:mm_3 float32[2,8] #2 after %3`: id, pass and tags,
    samples, devices, inputs, outputs, directive that made it, temporal predecessors.
    """
    return _text(dag, nx.lexicographical_topological_sort(dag.graph))


def listing(dag: TrainingDAG) -> str:
    """Return the lines of all nodes by id, so that two listings differ only in the lines of nodes that
    differ.

    The DAG may have a cycle.
    """
    return _text(dag, sorted(dag.nodes))


def _text(dag: TrainingDAG, order: Iterable[int]) -> str:
    kind = "forward-only" if dag.code.forward_only else "training"
    return "\n".join([f"{kind} step of {dag.size} samples", *(line_of(dag, dag.nodes[i]) for i in order)])


def line_of(dag: TrainingDAG, node: Node) -> str:
    """Return the text line of one node."""
    words = [f"%{node.id}", node.label]
    if node.details:
        words.append(node.details)
    if node.tags and node.shows_tags:
        words.append("[" + ",".join(f"{k}={v}" for k, v in node.tags.items() if k != "PASS") + "]")
    words.append("@" + (",".join(map(str, node.devices)) or "?"))
    if node.stream != "compute":
        words.append(f"stream={node.stream}")
    if node.reads:
        further = dict.fromkeys(node.reads[len(node.inputs) :])  # a bucket provides several parameters
        words.append("(" + ", ".join(f"%{i}.{k}" for i, k in (*node.inputs, *further)) + ")")
    if node.outputs:
        shown = []
        for value in node.outputs:
            kind = "" if isinstance(value.placement, Replicated) else f" {value.placement}"
            if (GROUPS, Partial()) in value.others:
                kind += f" {GROUPS}={Partial()}"
            spec = f" {value.tensors[0]}" if len(value.tensors) == 1 else f" x{len(value.tensors)}"
            shown.append(value.label + spec + kind)
        words.append("-> " + ", ".join(shown))
    if node.origin is not None:
        words.append(f"#{node.origin}")
    after = [
        f"%{i}"
        for i in sorted(dag.graph.predecessors(node.id))
        if dag.graph.edges[i, node.id]["order"] is not None
    ]
    if after:
        words.append("after " + ", ".join(after))
    return " ".join(words)
