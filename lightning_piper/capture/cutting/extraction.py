"""Extract a pass from the joint graph: its interface, and its code as a separate functional graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.fx import Node

from lightning_piper.capture.cutting.row_counts import arrives, direction_of, leaves, resize, spec_of
from lightning_piper.capture.joint.region_assignment import BORDERS
from lightning_piper.capture.joint.region_passes import PlaceholderNames, RegionPass
from lightning_piper.capture.losses.cross_sample import is_training_batch_norm
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.graph_nodes import copied_node
from lightning_piper.common.operation_families import RESHAPES
from lightning_piper.ir.boxed_code import BoxedCode
from lightning_piper.ir.regions import Code, Interface
from lightning_piper.ir.values import Kind
from lightning_piper.placements.placement_changes import CHANGE, unchanged
from lightning_piper.routing import COMBINE, COUNTS

aten = torch.ops.aten
# Kinds of values that a region sends to another region or returns from the step.
CROSSING = (Kind.ACTIVATION, Kind.COTANGENT, Kind.RESULT, Kind.ARGUMENT)


def extract(
    p: RegionPass,
    names: PlaceholderNames,
    state: frozenset[Node],
    constants: torch.nn.Module | None,
    routed: bool = False,
    rows: int | None = None,
) -> tuple[Interface, Code]:
    """Return the interface and the code of a pass. The joint graph does not change, and must not change later.

    Args:
        p: The pass, with its `inputs`, `outputs` and `reads` set.
        names: The names of the graph's placeholders.
        state: Placeholders of buffers that the step changes.
        constants: The module that holds the graph's constant tensors. None if it has no such tensors.
        routed: Whether the region receives rows by an exchange (`dispatch`, `combine`).
        rows: The number of rows that the region dispatches. None if the number of arriving rows is fixed, or
            if the region dispatches no rows.
    """
    # Each of these dicts has inputs of one kind: placeholder of the joint graph -> name or index. `current`
    # has the buffers that the step changes and that the pass does not receive from another pass.
    given = [node for nodes in p.inputs.values() for node in nodes]
    read = sorted(n for n in p.reads if n.op == "placeholder")  # in the order of the joint graph
    params = {n: names.params[n] for n in read if n in names.params}
    buffers = {n: names.buffers[n] for n in read if n in names.buffers}
    constant = {n: name for n, name in buffers.items() if n not in state}
    current = {n: name for n, name in buffers.items() if n in state and n not in given}
    batch = {n: i for n, i in names.batch.items() if n in p.reads}
    seeds = {n: term for n, term in names.tangents.items() if n in p.reads}

    arguments = (*given, *params, *constant, *current, *batch, *seeds)
    specs = tuple(
        tuple(spec_of(_dense(n) if out.kind in CROSSING else n.meta["val"], rows) for n in nodes)
        for out, nodes in p.outputs
    )
    interface = Interface(
        inputs=tuple(p.inputs),
        outputs=tuple(out for out, _ in p.outputs),
        params=tuple(params.values()),
        buffers=tuple(constant.values()),
        state=tuple(current.values()),
        batch=tuple(batch.values()),
        seeds=tuple(seeds.values()),
        random=any(_torch.is_random(n) for n in p.nodes),
        takes_statistics=any(map(is_training_batch_norm, p.nodes)),
        arrives=tuple(arrives(n[0], p) if len(n) == 1 else "" for n in p.inputs.values()) if routed else (),
        leaves=tuple(leaves(n) for _, n in p.outputs) if routed else (),
    )
    given_specs = tuple(spec_of(node.meta["val"], rows) for node in arguments)
    made = BoxedCode(partial(_graph, p, arguments, rows), constants)
    return interface, Code(made, specs, given_specs)


def _graph(p: RegionPass, arguments: Sequence[Node], rows: int | None) -> torch.fx.Graph:
    """Return the graph of a pass.

    Args:
        arguments: The nodes of the joint graph that the pass receives, in the order of its arguments.
        p, rows: See `extract`.
    """
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}
    for node in arguments:
        env[node] = graph.placeholder(node.name)
    for node in p.nodes:
        _emit(graph, env, node)
    flat: list[Node] = []
    for out, nodes in p.outputs:
        crosses = out.kind in CROSSING
        flat += [
            _crossing(graph, _emit(graph, env, n), n) if crosses else _emit(graph, env, n) for n in nodes
        ]
    graph.output(tuple(flat))
    if rows is not None:
        resize(graph, {env[n]: n.meta["val"] for n in env if _is_tensor(n) and env[n].op == "placeholder"})
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    return graph


def _emit(graph: torch.fx.Graph, env: dict[Node, Node], node: Node) -> Node:
    """Copy a node of the joint graph into `graph`, unless it was copied before. The nodes that it reads are
    copied first.

    Args:
        env: node of the joint graph -> node of `graph` with its result, for all nodes copied so far. The
            function adds to it.

    Returns:
        The node of `graph` with the result. This is the copy of the node, or the copy of its input if the
        operation needs no code in a pass.
    """
    if node not in env:
        for x in node.all_input_nodes:
            _emit(graph, env, x)
        # A detach needs no code in a pass, because autograd does not run in it. The training DAG does the
        # work of `BORDERS` between passes.
        if node.target in (aten.detach.default, *BORDERS):
            env[node] = env[node.all_input_nodes[0]]
        elif direction_of(node) is not None:
            env[node] = _arrived(graph, env, node)
        else:
            env[node] = copied_node(graph, node, env)
            if node.target in RESHAPES:
                # Some kernels and their fake versions return different strides (batch norm's backward in
                # float64), so a view that was valid in the trace may fail. A reshape copies in this case, as
                # eager autograd does.
                env[node].target = aten.reshape.default
    return env[node]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps or overlaps, in any dimension order.

    For example, a transposed matrix is dense, and an expanded or sliced one is not.
    """
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: (d[1], d[0])):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _crossing(graph: torch.fx.Graph, copied: Node, node: Node) -> Node:
    """Return a node for a dense version of a value that leaves a region, so that a transfer can keep its
    strides.

    The result is `copied` itself if the value is dense. If the placement of the value changes after the pass,
    it must even be contiguous. Any other value, such as an expanded one, becomes a contiguous copy.

    Args:
        copied: the node of `graph` with the value.
        node: the node of the joint graph with the value.
    """
    if _is_as_traced(node):
        return copied
    return graph.call_function(aten.clone.default, (copied,), {"memory_format": torch.contiguous_format})


def _arrived(graph: torch.fx.Graph, env: dict[Node, Node], node: Node) -> Node:
    """Return the node of the pass's graph that stands for the result of the exchange `node`.

    The exchange itself runs between passes. So the result is the input of the exchange, already copied to
    `env`, with two exceptions. Counts from several devices become their sum. An input that is not contiguous
    becomes a contiguous copy if the exchange keeps its shape, because the result of an exchange is
    contiguous.
    """
    source = node.all_input_nodes[0]
    before, after = source.meta["val"], node.meta["val"]
    if direction_of(node) == COUNTS and before.shape != after.shape:
        # The input has the counts of each sending device, and the pass needs their sum.
        return graph.call_function(aten.sum.dim_IntList, (env[source], [0]), {"dtype": before.dtype})
    if before.shape == after.shape and not before.is_contiguous():
        return graph.call_function(
            aten.clone.default, (env[source],), {"memory_format": torch.contiguous_format}
        )
    return env[source]


def _source(node: Node) -> Node:
    """Return the node of the joint graph whose value the pass computes for the output `node`.

    Usually this is `node`. If `node` changes a placement, or is a combine that changes the shape, the
    training DAG does this work after the pass. Then the result is the node before it.
    """
    node = unchanged(node)
    divided = (
        direction_of(node) == COMBINE and node.meta["val"].shape != node.all_input_nodes[0].meta["val"].shape
    )
    return node.all_input_nodes[0] if divided else node


def _dense(node: Node) -> torch.Tensor:
    """Return a fake tensor for an output, with the strides that the output has when it leaves the region."""
    value: torch.Tensor = _source(node).meta["val"]
    return value if _is_as_traced(node) else value.contiguous()


def _is_as_traced(node: Node) -> bool:
    """Return whether an output leaves the region with its strides in the trace, so without a copy."""
    value: torch.Tensor = _source(node).meta["val"]
    return value.is_contiguous() if node.target is CHANGE else _is_dense(value)
