"""The graph of one device in the DOT language. `dot -Tsvg` or any viewer of DOT files shows it."""

from __future__ import annotations

import networkx as nx

from lightning_piper.common.limits import integer, kind_of, shown
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.viz.colors import BOOKKEEPING, COMMUNICATION, color


def dot_graph(dag: TrainingDAG, device: int) -> str:
    """Return the nodes of a device, and the edges between these nodes, as DOT text.

    Solid edges carry data. Dashed edges only order nodes. An edge that orders nodes for a directive has the
    index of the directive as its label.

    Raises:
        PiperError: `dag` is not a DAG, or it does not have this device.
    """
    if not isinstance(dag, TrainingDAG):
        raise PiperError(
            f"dot_graph: the DAG is {kind_of(dag)}. Give compiled.dag, where compiled is the result of piper.compile "
            "[PIPER-A001]"
        )
    if integer(device) not in dag.devices():
        raise PiperError(
            f"dot_graph: the training DAG has no device {shown(device)}. Give one of "
            f"{', '.join(map(str, dag.devices()))} [PIPER-A002]"
        )
    lines = [
        f'digraph "device {device}" {{',
        "  rankdir=LR;",
        '  node [shape=box, style=filled, fontname="sans-serif"];',
    ]
    order = [i for i in nx.lexicographical_topological_sort(dag.graph) if device in dag.nodes[i].devices]
    for i in order:
        node = dag.nodes[i]
        lines.append(f'  n{i} [label="{_quoted(_label(node, device))}", fillcolor="{_fill(node)}"];')
    present = set(order)
    for i in order:
        for source in sorted(present & set(dag.graph.predecessors(i))):
            edge = dag.graph.edges[source, i]
            by = "" if edge["order"] is None else f'label="directive {edge["order"]}"'
            style = ", ".join(x for x in ("" if edge["data"] else "style=dashed", by) if x)
            lines.append(f"  n{source} -> n{i}{f' [{style}]' if style else ''};")
    return "\n".join([*lines, "}"]) + "\n"


def _label(node: Node, device: int) -> str:
    """Return the label of a node, with one fact a line.

    The lines are: its id and name; the samples of a chunk, or the other device of a message; its stream,
    except `compute`; the directive that made the node, if any.
    """
    lines = [f"%{node.id} {node.label}"]
    if isinstance(node, Chunk):
        lines.append(f"samples {node.slice}")
    elif isinstance(node, Send | Recv):
        peer = node.peers[node.devices.index(device)]
        lines.append(f"{'to' if isinstance(node, Send) else 'from'} device {peer}")
    if node.stream != "compute":
        lines.append(f"stream {node.stream}")
    if node.origin is not None:
        lines.append(f"directive {node.origin}")
    return "\n".join(lines)


def _fill(node: Node) -> str:
    if isinstance(node, Chunk):
        return color(node.kind)
    return COMMUNICATION if node.stream != "compute" else BOOKKEEPING


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
