"""Joint graph -> one functional graph for each pass of each region, and the interfaces between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.code import compile_boxed
from lightning_piper.capture.regions import Assignment, assign, gradient_terms
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import LOSS, Code, Interface, Output, PassKey, Region
from lightning_piper.ir.values import TensorSpec

aten = torch.ops.aten
OutputRef = tuple[int, str, int]  # (region, pass, output index)


@dataclass
class _Pass:
    """One pass while it is put together. `inputs` maps a bundle to the nodes it brings."""

    key: PassKey
    nodes: list[Node] = field(default_factory=list)
    outputs: list[tuple[Output, list[Node]]] = field(default_factory=list)
    reads: dict[Node, None] = field(default_factory=dict)  # placeholders and values from elsewhere, in order of use


@dataclass(frozen=True)
class _Names:
    """What the placeholders of the joint graph are."""

    params: Mapping[Node, str]
    buffers: Mapping[Node, str]
    batch: Mapping[Node, int]
    tangent: Node | None

    @classmethod
    def of(cls, graph: torch.fx.Graph, canonical: Mapping[str, str]) -> _Names:
        params, buffers, batch, tangent = {}, {}, {}, None
        for node in graph.nodes:
            desc = node.meta.get("desc") if node.op == "placeholder" else None
            if isinstance(desc, _torch.ParamAOTInput):
                params[node] = canonical[desc.target.removeprefix("module.")]
            elif isinstance(desc, _torch.BufferAOTInput):
                buffers[node] = canonical[desc.target.removeprefix("module.")]
            elif isinstance(desc, _torch.PlainAOTInput):
                batch[node] = desc.idx
            elif isinstance(desc, _torch.TangentAOTInput):
                tangent = node
        return cls(params, buffers, batch, tangent)


def cut(
    graph: torch.fx.Graph, canonical: Mapping[str, str], log_keys: tuple[str, ...]
) -> tuple[tuple[Region, ...], dict[PassKey, Interface], dict[PassKey, Code]]:
    """Cut a joint graph into passes.

    Args:
        graph: as `trace` gives it.
        canonical: every name of a parameter or buffer -> the one name it goes by.
        log_keys: names of the logged tensors, in the order of the graph's plain outputs after the loss.
    """
    names = _Names.of(graph, canonical)
    results = graph.output_node()
    described = list(zip(results.args[0], results.meta["desc"], strict=True))  # type: ignore[arg-type]
    changed = {
        canonical[d.mutated_input.target.removeprefix("module.")]: x
        for x, d in described
        if isinstance(d, _torch.InputMutationAOTOutput) and isinstance(d.mutated_input, _torch.BufferAOTInput)
    }
    _refuse_changed_parameters(described, canonical)
    state = frozenset(n for n, name in names.buffers.items() if name in changed)
    placed = assign(graph, state)
    passes = {(r.index, p): _Pass((r.index, p)) for r in placed.regions for p in "FB"}
    for node in graph.nodes:
        if node in placed.of and node not in placed.shared:
            passes[placed.of[node], "B" if _torch.is_backward(node) else "F"].nodes.append(node)

    _results(described, names, changed, placed, passes, log_keys)
    forward = {key for key, p in passes.items() if key[1] == "F" and p.nodes}
    _drop_unused(passes)
    _connect(placed, names, passes, state)
    passes = {key: p for key, p in passes.items() if p.nodes or p.outputs or key in forward}
    interfaces, code = {}, {}
    for key, p in passes.items():
        interfaces[key], code[key] = _extract(p, passes, placed, names, state, graph.owning_module)
    return placed.regions, interfaces, code


def _refuse_changed_parameters(described: list[tuple[Node | None, Any]], canonical: Mapping[str, str]) -> None:
    for _, desc in described:
        if isinstance(desc, _torch.InputMutationAOTOutput) and isinstance(desc.mutated_input, _torch.ParamAOTInput):
            name = canonical[desc.mutated_input.target.removeprefix("module.")]
            raise CaptureError(
                f"training_step changes the parameter {name} in place; in a captured step only the optimizer changes parameters. "
                "Do it in a hook such as on_train_batch_start, or keep the value in a buffer"
            )


def _results(
    described: list[tuple[Node | None, Any]],
    names: _Names,
    changed: Mapping[str, Node],
    placed: Assignment,
    passes: Mapping[PassKey, _Pass],
    log_keys: tuple[str, ...],
) -> None:
    """Give every result of the step to the pass that makes it: loss, logged values, new buffers, parameter gradients."""
    buffers: dict[int, dict[str, Node]] = {}
    grads: dict[int, dict[str, list[Node]]] = {}
    for node, desc in described:
        if node is None:
            continue
        if isinstance(desc, _torch.PlainAOTOutput):
            kind = Output("loss", (LOSS,)) if desc.idx == 0 else Output("log", (log_keys[desc.idx - 1],))
            passes[_home(node, placed), "F"].outputs.append((kind, [node]))
        elif isinstance(desc, _torch.GradAOTOutput):
            param = next(name for x, name in names.params.items() if x.meta["desc"] == desc.grad_of)
            for term in gradient_terms(node, placed.of):
                grads.setdefault(_home(term, placed), {}).setdefault(param, []).append(term)
    for name, node in changed.items():
        buffers.setdefault(_home(node, placed), {})[name] = node
    for region, by_name in buffers.items():
        passes[region, "F"].outputs.append((Output("buffer", tuple(by_name)), list(by_name.values())))
    users: dict[str, set[int]] = {}
    for region, by_param in grads.items():
        for param in by_param:
            users.setdefault(param, set()).add(region)
    for region, by_param in grads.items():
        # Parameters that the same regions share travel in one bundle, so that a tied one does not delay the others.
        bundles: dict[tuple[int, ...], list[str]] = {}
        for param in by_param:
            bundles.setdefault(tuple(sorted(users[param])), []).append(param)
        for params in bundles.values():
            merged = [_sum(by_param[param], passes[region, "B"], placed) for param in params]
            passes[region, "B"].outputs.append((Output("grad", tuple(params)), merged))


def _home(node: Node, placed: Assignment) -> int:
    """Region of a result; what belongs to none (a placeholder, a view, a constant) is handed out by the last one."""
    return placed.of.get(node, len(placed.regions) - 1)


def _sum(terms: list[Node], into: _Pass, placed: Assignment) -> Node:
    """Terms of one parameter in one region (used under two names) -> one node."""
    total = terms[0]
    for term in terms[1:]:
        graph = total.graph
        with graph.inserting_after(max(total, term)):
            added = graph.call_function(aten.add.Tensor, (total, term))
        added.meta = {"val": total.meta["val"], "partitioner_tag": "is_backward"}
        placed.of[added] = into.key[0]  # type: ignore[index]
        into.nodes.append(added)
        total = added
    return total


def _drop_unused(passes: Mapping[PassKey, _Pass]) -> None:
    """Drop nodes that lead to no result, so that nothing is sent for them: the additions of gradients that `_results` took
    apart (the gradient of a tied weight would cross with every microbatch), and work of the user's that nothing uses."""
    used: set[Node] = set()
    stack = [node for p in passes.values() for _, nodes in p.outputs for node in nodes]
    while stack:
        node = stack.pop()
        if node not in used:
            used.add(node)
            stack += node.all_input_nodes
    for p in passes.values():
        p.nodes = [node for node in p.nodes if node in used]


def _connect(placed: Assignment, names: _Names, passes: Mapping[PassKey, _Pass], state: frozenset[Node]) -> None:
    """Find what each pass reads from elsewhere and make the passes that have it hand it out."""
    crossing: dict[tuple[Node, PassKey], set[PassKey]] = {}
    for p in passes.values():
        own = set(p.nodes)
        seen: set[Node] = set()
        stack = [x for n in reversed(p.nodes) for x in reversed(n.all_input_nodes)]
        stack = [x for _, nodes in reversed(p.outputs) for x in reversed(nodes)] + stack
        while stack:
            node = stack.pop()
            if node in own or node in seen:
                continue
            seen.add(node)
            if node in placed.shared:
                stack.extend(reversed(node.all_input_nodes))
            else:
                p.reads[node] = None
    # Backward passes take what their own forward made or was given; forward passes take from the forward that made it.
    saved: dict[int, list[Node]] = {}
    for (region, kind), p in passes.items():
        for node in p.reads:
            if kind == "B" and _saved_by(node, region, passes, placed, state):
                saved.setdefault(region, []).append(node)
            elif node in placed.of:
                source = (placed.of[node], "B" if _torch.is_backward(node) else "F")
                crossing.setdefault((node, source), set()).add((region, kind))
    order = {node: i for i, node in enumerate(placed.of)}
    for node, source in sorted(crossing, key=lambda item: order[item[0]]):
        kind = "cotangent" if source[1] == "B" else "activation"
        passes[source].outputs.append((Output(kind, (node.name,)), [node]))
    for region, nodes in saved.items():
        passes[region, "F"].outputs.append((Output("saved", ()), nodes))


def _saved_by(node: Node, region: int, passes: Mapping[PassKey, _Pass], placed: Assignment, state: frozenset[Node]) -> bool:
    """Does the region's own forward keep this value for its backward?"""
    if _torch.is_backward(node):
        return False
    if node in placed.of:
        return placed.of[node] == region or node in passes[region, "F"].reads
    return node in state  # the value before this step's change


def _extract(
    p: _Pass, passes: Mapping[PassKey, _Pass], placed: Assignment, names: _Names, state: frozenset[Node],
    constants: torch.nn.Module | None,
) -> tuple[Interface, Code]:  # fmt: skip
    region, kind = p.key
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}

    def placeholder(node: Node) -> None:
        env[node] = graph.placeholder(node.name)

    # A bundle comes whole, also when only a part of it is read.
    bundles: dict[OutputRef, list[Node]] = {}
    for node in p.reads:
        if kind == "B" and _saved_by(node, region, passes, placed, state):
            ref = next((region, "F", i) for i, (out, _) in enumerate(passes[region, "F"].outputs) if out.kind == "saved")
        elif node in placed.of:
            ref = _find_output(node, passes[placed.of[node], "B" if _torch.is_backward(node) else "F"])
        else:
            continue
        bundles.setdefault(ref, passes[ref[0], ref[1]].outputs[ref[2]][1])
    # In a fixed order, not in that of use: a batch of one sample may take other operations, which read in another order.
    bundles = dict(sorted(bundles.items()))
    for nodes in bundles.values():
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
        flat += [_crossing(graph, emit(n), n) if out.kind in ("activation", "cotangent") else emit(n) for n in nodes]
        specs.append(tuple(_spec(n, dense=out.kind in ("activation", "cotangent")) for n in nodes))
    graph.output(tuple(flat))
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    interface = Interface(
        inputs=tuple(bundles), outputs=tuple(out for out, _ in p.outputs), params=tuple(params.values()),
        buffers=tuple(constant.values()), state=tuple(current.values()), batch=tuple(batch.values()), seeds_gradient=seeds,
        random=any(_torch.is_random(n) for n in p.nodes),
    )  # fmt: skip
    return interface, Code(compile_boxed(graph, constants), tuple(specs), graph)


def _find_output(node: Node, source: _Pass) -> OutputRef:
    for i, (out, nodes) in enumerate(source.outputs):
        if out.kind in ("activation", "cotangent") and nodes[0] is node:
            return (*source.key, i)
    raise AssertionError(f"{node} is read across regions, but its pass {source.key} does not hand it out")


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
