"""Find the joined part of a step: the nodes that work on the whole batch, because the step gathers samples
(`gather_samples`).

    x -> z -> GATHER -> logits -> loss           parts of the batch: x, z, GATHER        joined: logits, loss
    y -----------------^                         `join_batch` also puts a GATHER here

A node is joined if it reads the result of a GATHER or of a joined node, or if only joined nodes read it (see
`joined_nodes`). So a node that works on a part of the batch reads no joined value, and a joined node works
only on the whole batch. If the joined part reads a value of another node, it also gathers the rows of that
value, one row for each sample.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.annotate import META_KEY
from lightning_piper.capture.joint.operations import JOINED
from lightning_piper.capture.joint.sample_dimension import known_rows, shape_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import ADDED, PERMUTATIONS
from lightning_piper.sample_gathering import GATHER
from lightning_piper.totals import TOTAL

aten = torch.ops.aten
EMPTY: frozenset[Node] = frozenset()
# Metadata key of a gradient of the loss: the gradient belongs to a term that each part of the batch computes.
OF_PARTS = "piper_of_parts"


def after_gathers(graph: torch.fx.Graph, apart: bool = False) -> set[Node]:
    """Return the forward nodes that depend on a gathered value. A GATHER node counts only if it depends on
    another GATHER node. If the graph gathers no samples, the set is empty.

    Args:
        apart: if True, leave out additions and concatenations of a gathered value with a number that each
            part of the batch computes, and the nodes that depend on gathered values only through these
            operations. An example is a loss that adds a term for each sample and a term for the whole batch,
            because these two terms have separate weights.
    """
    found: set[Node] = set()
    if not any(node.target is GATHER for node in graph.nodes):
        return found
    forward = [node for node in graph.nodes if node.op == "call_function" and not _torch.is_backward(node)]
    varies, rows = (sampled(forward), rows_of_samples(forward)) if apart else (EMPTY, EMPTY)
    for node in forward:
        inputs = node.all_input_nodes
        if any(x in found or x.target is GATHER for x in inputs):
            numbers = [
                x
                for x in inputs
                if x in varies and x not in found and x not in rows and x.target is not GATHER
            ]
            if not (numbers and node.target in ADDED | JOINED):
                found.add(node)
    return found


def joined_nodes(forward: list[Node], shared: Collection[Node], apart: bool = False) -> set[Node]:
    """Return the forward nodes of the joined part. If the graph gathers no samples, the set is empty.

    These are the nodes that depend on a gathered value, and the nodes that only the joined part reads. A
    value with one row for each sample does not move into the joined part, because the joined part gathers its
    rows. A transposition or a mean of these rows moves, and so does a temperature that is computed from a
    parameter.

    Args:
        shared: forward nodes that belong to no region, such as views of parameters.
        apart: see `after_gathers`.
    """
    joined = after_gathers(forward[0].graph, apart) if forward else set()
    if not joined:
        return joined
    varies, live = sampled(forward), _live(forward[0].graph)
    # nodes that do not move: the joined part gathers their rows, or computes the nodes again
    stay = (rows_of_samples(forward) & varies).union(shared)
    # nodes that only the backward pass or other nodes of `kept` read, and unread nodes that are the same for
    # all samples
    kept: set[Node] = set()
    for node in reversed(forward):
        users = [x for x in node.users if x in live and x.op == "call_function"]
        reading = [x for x in users if not _torch.is_backward(x) and x not in kept]
        saved = bool(users) and not reading
        if node not in joined and not reading and (saved or node not in varies):
            kept.add(node)
        elif reading and all(x in joined for x in reading) and node not in stay and node.target is not GATHER:
            joined.add(node)
    for node in forward:
        if node in kept and any(x in joined for x in node.all_input_nodes):
            joined.add(node)
    return joined


def rows_of_samples(forward: list[Node]) -> set[Node]:
    """Return the batch's tensors and the forward nodes that have one row for each sample. If the batch has no
    tensor with dimensions, the set is empty. `forward` must not be empty.

    A node has such rows if `known_rows` returns it. A node that depends on the samples, or draws random
    numbers, also has such rows if its first dimension has the size of the batch, unless it is a
    transposition.
    """
    graph = forward[0].graph
    size = next((node.meta["val"].shape[0] for node in graph.nodes if is_sampled(node)), None)
    if size is None:
        return set()
    varies = sampled(forward) | {node for node in forward if _torch.is_random(node)}
    shaped = {node for node in varies if shape_of(node)[:1] == (size,) and node.target not in PERMUTATIONS}
    return known_rows(graph, size) | shaped


def _live(graph: torch.fx.Graph) -> set[Node]:
    """Return the nodes on which a result of the graph depends."""
    live: set[Node] = set()
    stack = [graph.output_node()]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += node.all_input_nodes
    return live


def differentiates_joined(
    backward: list[Node], joined: Collection[Node], shared: Collection[Node]
) -> Collection[Node]:
    """Return the backward nodes of the joined part: the gradients of its operations, and the sums of these
    gradients. Nodes that depend on a gradient with the mark `OF_PARTS` are left out.

    Args:
        backward: the backward operations, in the order of the graph.
        joined: the forward nodes of the joined part. If there are none, the result is empty.
        shared: forward nodes that belong to no region, such as views of parameters.
    """
    found: set[Node] = set()
    if not joined:
        return found
    first, of_parts = _first_of_number(next(iter(joined)).graph), set[Node]()
    for node in backward:
        inputs = [x for x in node.all_input_nodes if _torch.is_backward(x) or OF_PARTS in x.meta]
        merges = node.target is aten.add.Tensor and META_KEY not in node.meta.get("custom", {})
        if any(x in of_parts or OF_PARTS in x.meta for x in inputs):
            of_parts.add(node)
            continue
        # The forward operation that the node differentiates. Sums of gradients and gradients of in-place
        # operations have none. Such a node, and the gradient of a shared node, belongs to the joined part if
        # all its inputs from the backward pass do.
        own = None if merges else first.get(_torch.sequence_number(node))
        follows = own is None or own in shared
        if own in joined or (follows and inputs and all(x in found for x in inputs)):
            found.add(node)
    return found


def _first_of_number(graph: torch.fx.Graph) -> dict[Any, Node]:
    """Return sequence number -> the first forward operation with this number.

    An operation without a gradient has the number of the operation before it, so the result leaves it out.
    """
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and not _torch.is_backward(node)
            and _torch.sequence_number(node) is not None
        ):
            first.setdefault(_torch.sequence_number(node), node)
    return first


def sampled(forward: list[Node]) -> set[Node]:
    """Return the forward nodes that depend on the samples of the batch."""
    found: set[Node] = set()
    for node in forward:
        if any(x in found or is_sampled(x) for x in node.all_input_nodes):
            found.add(node)
    return found


def is_sampled(node: Node) -> bool:
    """Return whether the node is the placeholder of a tensor of the batch with at least one dimension."""
    return (
        node.op == "placeholder"
        and isinstance(node.meta.get("desc"), _torch.PlainAOTInput)
        and bool(shape_of(node))
    )


def join_batch(graph: torch.fx.Graph) -> None:
    """Change the graph in place so that the joined part reads gathered tensors of the batch.

    A value that depends only on the batch, such as a mask made of labels, gets a copy that is computed from the
    gathered tensors. Sums over the whole batch become identities in the joined part. A graph that gathers no
    samples stays unchanged.
    """
    if not (after := after_gathers(graph)):
        return
    plain = _plain(graph, after)
    forward = [node for node in graph.nodes if node.op == "call_function" and not _torch.is_backward(node)]
    joined = joined_nodes(forward, plain, apart=True)
    if not joined:
        return
    backward = [node for node in graph.nodes if node.op == "call_function" and _torch.is_backward(node)]
    differentiating = differentiates_joined(backward, joined, EMPTY)
    made: dict[Node, Node] = {}
    *_, last = (node for node in graph.nodes if node in joined)
    for node in [node for node in graph.nodes if node in joined or node in differentiating]:
        for x in [x for x in node.all_input_nodes if x in plain]:
            node.replace_input_with(x, _copied(x, node if node in joined else last, plain, made))
        if node.target is TOTAL:
            node.target = aten.clone.default


def _plain(graph: torch.fx.Graph, joined: Collection[Node]) -> set[Node]:
    """Return the placeholders of the batch's tensors with dimensions, and the forward nodes outside of `joined`
    that depend only on these tensors and on sizes.

    Such nodes do not depend on parameters, random numbers or gathered values.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if is_sampled(node):
                found.add(node)
            continue
        forward = node.op == "call_function" and not _torch.is_backward(node) and node not in joined
        repeatable = node.target not in (GATHER, TOTAL) and not _torch.is_random(node)
        if forward and repeatable and all(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _copied(node: Node, reader: Node, plain: Collection[Node], made: dict[Node, Node]) -> Node:
    """Return the copy of a plain node in the joined part. In the copy, the gathered rows replace a tensor of
    the batch.

    Args:
        reader: new copies, also of the plain nodes on which `node` depends, come before this node.
        made: plain node -> its copy. New copies are added.
    """
    graph, stack = node.graph, [node]
    while stack:
        top = stack[-1]
        missing = [x for x in top.all_input_nodes if x in plain and x not in made]
        if not missing:
            stack.pop()
            if top not in made:
                with graph.inserting_before(reader):
                    if top.op == "placeholder":
                        made[top] = graph.call_function(GATHER, (top,))
                        made[top].meta = {"val": top.meta["val"]}
                    else:
                        made[top] = graph.node_copy(top, lambda x: made.get(x, x))
                made[top].meta["custom"] = dict(reader.meta.get("custom", {}))
        stack += missing
    return made[node]
