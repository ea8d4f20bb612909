"""The parts of a certificate that do not depend on plans: the step on one device, and the code of its passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import Code, Interface, Output, PassKey
from lightning_piper.ir.values import Kind, Placement, Slice, TensorSpec
from lightning_piper.ops.metrics import metric_names
from lightning_piper.placements.placement_changes import PLACEMENTS

CodeKey = tuple[int, str, int, tuple[int, ...], bool]  # region, pass, samples, degrees, of one member


def text_of(value: Any) -> Any:
    """Return a value of an instruction or of an operation's arguments as JSON."""
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if value == value and abs(value) != float("inf") else str(value)
        case Slice():
            return [value.start, value.stop]
        case Node():
            return f"%{value.name}"
        case list() | tuple():
            return [text_of(each) for each in value]
        case slice():
            return ["slice", text_of(value.start), text_of(value.stop), text_of(value.step)]
        case TensorSpec():
            return str(value)
    return str(value)


def mesh_of(mesh: Mesh) -> dict[str, Any]:
    return {"axes": list(mesh.axes), "shape": list(map(int, mesh.shape)), "ranks": list(mesh.group_ranks)}


def bucket_of(bucket: Bucket) -> dict[str, Any]:
    return {
        "names": list(bucket.names),
        "tensors": [str(spec) for spec in bucket.tensors],
        "offsets": list(bucket.offsets),
        "shard": bucket.shard,
        "dtype": str(bucket.dtype).removeprefix("torch."),
        "mesh": mesh_of(bucket.mesh),
        "along": list(bucket.along),
    }


def held_of(pairs: Iterable[tuple[str, Placement]]) -> dict[str, str]:
    """Return axis -> placement, without the axes along which the value is replicated."""
    return {axis: text for axis, placement in pairs if (text := placement_text(placement)) != "R"}


def placement_text(placement: Placement) -> str:
    """Return a placement as certificates name it: R, P, S(dimension), S(dimension,runs), with +turn."""
    return "P" if str(placement) == "P(sum)" else str(placement)


def program_of(dag: TrainingDAG) -> dict[str, Any]:
    """Return the step on one device: its passes with their inputs, outputs and operations for the whole batch, its
    parameters and the weights of its loss and logged values."""
    code = dag.code
    keys: list[PassKey] = [*code.interfaces, *code.split_passes]
    wanted = {Kind.GRAD, Kind.BUFFER}
    trained = {
        n for i in code.interfaces.values() for out in i.outputs if out.kind in wanted for n in out.names
    }
    return {
        "samples": dag.size,
        "mean_of_replicas": dag.mean_of_replicas,
        "regions": [
            {"label": region.label, "joined": region.joined, "line": region.source} for region in code.regions
        ],
        "passes": {name_of(key): _pass(dag, key, code.interface_of(key)) for key in keys},
        "graphs": {name_of(key): _graph(code.code_of(key)) for key in keys},
        "parameters": {
            name: {"tensor": str(info.spec), "updated": name in trained}
            for name, info in dag.step.params.items()
        },
        "buffers": {
            name: {"tensor": str(spec), "updated": name in trained, "passes_on": code.goes_on(name)}
            for name, spec in dag.step.buffers.items()
        },
        "batch": [
            {"tensor": str(spec), "divided": code.samples(i, Slice(0, 1)) is not None}
            for i, spec in enumerate(code.batch_specs)
        ],
        "metrics": list(metric_names(code)),
        "terms": [
            {
                "weight": str(term.weighing),
                "guarded": term.denominator is not None and term.denominator.guarded,
            }
            for term in code.terms
        ],
        "linear": code.nonlinear is None or code.weighs_gradients,
    }


def name_of(key: PassKey) -> str:
    return f"{key[0]}.{key[1]}"


def output_name(key: tuple[int, str, int]) -> str:
    return ".".join(map(str, key))


def _pass(dag: TrainingDAG, key: PassKey, interface: Interface) -> dict[str, Any]:
    """Return the interface of a pass. Each output of BI and BW names the output of B that it is."""
    return {
        "inputs": list(map(output_name, interface.inputs)),
        "outputs": [
            _output(out) | {"is": output_name(dag.code.whole(*key, i))}
            for i, out in enumerate(interface.outputs)
        ],
        "parameters": list(interface.params),
        "buffers": list(interface.buffers),
        "state": list(interface.state),
        "batch": list(interface.batch),
        "terms": list(interface.seeds),
        "random": interface.random,
        "arrives": list(interface.arrives),
    }


def _output(out: Output) -> dict[str, Any]:
    return {
        "kind": str(out.kind),
        "names": list(out.names),
        "term": out.term,
        "whole_batch": "sum" if out.partial else out.exchange,
        "held": held_of(out.held),
        "changes": [
            [each.axis, placement_text(each.before), placement_text(each.after)] for each in out.changes
        ],
    }


def _graph(code: Code) -> dict[str, Any]:
    """Return the operations of a pass in order, each with its tensors and their placements."""
    return {
        "inputs": list(map(str, code.inputs)),
        "outputs": [list(map(str, specs)) for specs in code.outputs],
        "nodes": nodes_of(code.graph, code.sizes),
    }


def nodes_of(graph: Graph, sizes: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """Return the nodes of a graph. A size that varies between shapes is a number here."""
    found = []
    known = {}
    for node in graph.nodes:
        if not isinstance(node.target, str) and not isinstance(node.target, torch._ops.OpOverload):
            op = getattr(node.target, "__name__", str(node.target))
        else:
            op = "input" if node.op == "placeholder" else str(node.target)
        if op == "getitem" and node.args[0].op == "placeholder" and node.args[0].name == "sizes":
            known[node] = sizes[node.args[1]]
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: known.get(x, x))
        value = node.meta.get("val")
        found.append(
            {
                "name": node.name,
                "op": op,
                "args": text_of(args[0]),
                "more": {name: text_of(each) for name, each in args[1].items()},
                "makes": _tensors(value),
                "held": held_of(node.meta.get(PLACEMENTS, ())),
            }
        )
    return found


def _tensors(value: Any) -> Any:
    """Return the texts of an operation's tensors: one, a list, or None for other values."""
    if isinstance(value, torch.Tensor):
        shape = ",".join(str(int(n)) for n in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    return [_tensors(each) for each in value] if isinstance(value, list | tuple) else None


def code_key(dag: TrainingDAG, chunk: Chunk) -> CodeKey:
    """Return the key of the code that a chunk runs."""
    joined = dag.regions[chunk.region].joined
    samples = dag.size if joined else len(chunk.slice)
    return *chunk.key, samples, dag.degrees_of(chunk.region), bool(dag.member_axes)


def code_name(key: CodeKey) -> str:
    region, kind, samples, degrees, member = key
    return (
        f"{region}.{kind}@{samples}" + (f"/{max(degrees)}" if degrees else "") + ("/member" if member else "")
    )


def codes_of(dag: TrainingDAG) -> dict[str, Any]:
    """Return the code of all chunks, by `code_name`."""
    found: dict[str, Any] = {}
    for chunk in dag.of_type(Chunk):
        name = code_name(code_key(dag, chunk))
        if name not in found:
            found[name] = _graph(dag.code_of(chunk))
    return found
