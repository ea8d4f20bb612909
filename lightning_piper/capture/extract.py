"""A pass of the joint graph -> its interface, and a functional graph of its own as code."""

from __future__ import annotations

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.code import compile_boxed
from lightning_piper.capture.passes import Names, Pass
from lightning_piper.ir.regions import Code, Interface
from lightning_piper.ir.values import TensorSpec

aten = torch.ops.aten
CROSSING = ("activation", "cotangent", "result")  # kinds of values that travel


def extract(p: Pass, names: Names, state: frozenset[Node], constants: torch.nn.Module | None) -> tuple[Interface, Code]:
    """The interface and code of a pass whose inputs are known.

    Args:
        p: the pass.
        names: what the placeholders are.
        state: placeholders of buffers that the step changes.
        constants: holds the tensors that the step makes from Python numbers.
    """
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}

    def placeholder(node: Node) -> None:
        env[node] = graph.placeholder(node.name)

    for nodes in p.inputs.values():
        for node in nodes:
            placeholder(node)
    params = {n: name for n, name in names.params.items() if n in p.reads}
    constant = {n: name for n, name in names.buffers.items() if n in p.reads and n not in state}
    current = {n: name for n, name in names.buffers.items() if n in p.reads and n in state and n not in env}
    batch = {n: i for n, i in names.batch.items() if n in p.reads}
    for group in (params, constant, current, batch):
        for node in group:
            placeholder(node)
    seeds = names.tangent is not None and names.tangent in p.reads
    if seeds:
        placeholder(names.tangent)  # type: ignore[arg-type]

    def emit(node: Node) -> Node:
        if node not in env:
            for x in node.all_input_nodes:
                emit(x)
            if node.target is aten.detach.default:
                env[node] = env[node.all_input_nodes[0]]
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
                if node.target is aten.view.default:
                    # Some kernels give other strides than their fake ones (batch norm's backward in float64), with which the
                    # view that was right while tracing is refused; a reshape copies then, as eager autograd does.
                    env[node].target = aten.reshape.default
        return env[node]

    for node in p.nodes:
        emit(node)
    flat: list[Node] = []
    specs: list[tuple[TensorSpec, ...]] = []
    for out, nodes in p.outputs:
        flat += [_crossing(graph, emit(n), n) if out.kind in CROSSING else emit(n) for n in nodes]
        specs.append(tuple(_spec(n, dense=out.kind in CROSSING) for n in nodes))
    graph.output(tuple(flat))
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    interface = Interface(
        inputs=tuple(p.inputs), outputs=tuple(out for out, _ in p.outputs), params=tuple(params.values()),
        buffers=tuple(constant.values()), state=tuple(current.values()), batch=tuple(batch.values()), seeds_gradient=seeds,
        random=any(_torch.is_random(n) for n in p.nodes),
    )  # fmt: skip
    return interface, Code(compile_boxed(graph, constants), tuple(specs), graph)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: (d[1], d[0])):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _crossing(graph: torch.fx.Graph, copied: Node, node: Node) -> Node:
    """Values that leave a region are dense, so that a transfer can keep their strides: expanded ones are written out."""
    if _is_dense(node.meta["val"]):
        return copied
    return graph.call_function(aten.clone.default, (copied,), {"memory_format": torch.contiguous_format})


def _spec(node: Node, dense: bool) -> TensorSpec:
    value = node.meta["val"]
    if dense and not _is_dense(value):
        value = value.contiguous()
    return TensorSpec.of(value)
