"""Write a traced graph as JSON, and read it.

The written content is data: names of operations, arguments, specs of values, and metadata of nodes. Reading
the content runs no code, and accepts only known operations. The content has a fixed name for the device of
the trace, because each process has a different device.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import operator
import zlib
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from lightning_piper.capture.torch_private import _torch, _torch_calls
from lightning_piper.capture.user_code.source import CALLED_KEY
from lightning_piper.common.graph_nodes import new_node

_LIBRARIES = ("aten", "prims", "lightning_piper")
# Operations that run the user's code, or that read files.
_NOT_DATA = (
    "lightning_piper.rest.default",
    "lightning_piper.rest_backward.default",
    "aten.from_file.default",
)
# Type whose values are attributes of `torch` -> the word that marks such a value in JSON. For example,
# `torch.float32` becomes `["dtype", "float32"]`.
_CONSTANTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory"}
# Name of a class -> the class. Its objects describe the inputs and outputs of a graph.
_DESCRIPTORS = {
    kind.__name__: kind
    for kind in (
        _torch.PlainAOTInput,
        _torch.ParamAOTInput,
        _torch.BufferAOTInput,
        _torch.TangentAOTInput,
        _torch.PlainAOTOutput,
        _torch.GradAOTOutput,
        _torch.InputMutationAOTOutput,
    )
}
_OWN = "own"  # the name of the device of the trace
_MARKS = ("partitioner_tag", "seq_nr", "custom", CALLED_KEY)  # keys of the metadata that is written as data
MANY = 1 << 20  # the largest size of a constant, in bytes


class NotSerializable(Exception):
    """Raised if a graph has an operation or value that cannot be written, or if a file's content is not a
    written graph."""


def serialize(graph: Graph, own: torch.device) -> bytes:
    """Return a traced graph as bytes.

    Args:
        own: the device of the trace.

    Raises:
        NotSerializable: the graph contains something that is not known to be data.
    """
    return _GraphWriter(graph, own).content()


def deserialize(content: bytes, own: torch.device) -> Graph:
    """Return the graph from bytes that `serialize` returned, with new fake values on the device `own`.

    Raises:
        NotSerializable: the bytes do not come from `serialize`.
    """
    try:
        return _GraphReader(own).graph(json.loads(zlib.decompress(content)))
    except NotSerializable:
        raise
    except Exception as error:
        raise NotSerializable(str(error)) from error


class _GraphWriter:
    """A writer of one graph. Its methods raise `NotSerializable` for a part of the graph that is not known to
    be data."""

    def __init__(self, graph: Graph, own: torch.device) -> None:
        self._graph, self._own = graph, own
        self._numbers: dict[Node, int] = {}  # node -> its position in the graph

    def content(self) -> bytes:
        """Return the graph as compressed JSON."""
        nodes = []
        for node in self._graph.nodes:
            about = {key: self._data(node.meta[key]) for key in _MARKS if key in node.meta}
            about |= {"desc": _descriptor(node.meta["desc"])} if "desc" in node.meta else {}
            about |= {"val": self._value(node.meta["val"])} if "val" in node.meta else {}
            nodes.append(
                [
                    node.op,
                    node.name,
                    self._target(node),
                    *map(self._data, (list(node.args), dict(node.kwargs))),
                    about,
                ]
            )
            self._numbers[node] = len(self._numbers)
        return zlib.compress(json.dumps(nodes, separators=(",", ":")).encode(), 1)

    def _target(self, node: Node) -> Any:
        """Return the target of a node in a form that JSON can write.

        Raises:
            NotSerializable: The target is not a known operation.
        """
        if node.op in ("placeholder", "output"):
            return node.target
        if node.op == "get_attr":
            return [node.target, self._constant(getattr(self._graph.owning_module, str(node.target), None))]
        if node.target is operator.getitem:
            return "getitem"
        if isinstance(node.target, torch._ops.OpOverload) and _is_known(str(node.target)):
            return str(node.target)
        raise NotSerializable(str(node.target))

    def _data(self, value: Any) -> Any:
        """Return an argument or mark as JSON. None, booleans, numbers, strings and dicts keep their JSON type.
        Any other value, also a list, becomes a list that begins with the name of its kind."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Node):
            return ["node", self._numbers[value]]
        if isinstance(value, list | tuple):
            return ["list" if isinstance(value, list) else "tuple", *map(self._data, value)]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: self._data(x) for key, x in value.items()}
        if isinstance(value, torch.device):
            return ["device", name_of(value, self._own)]
        for kind, word in _CONSTANTS.items():
            if isinstance(value, kind):
                return [word, str(value).removeprefix("torch.")]
        raise NotSerializable(f"a {type(value).__name__}")

    def _value(self, value: Any) -> Any:
        """Return the value traced for a node as JSON: a number, None, the spec of a tensor, or a list of
        these."""
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, list | tuple):
            return ["list" if isinstance(value, list) else "tuple", *map(self._value, value)]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise NotSerializable(f"a {type(value).__name__}")
        if not all(type(x) is int for x in (*value.shape, *value.stride())):
            raise NotSerializable("a symbol")
        return [
            "tensor",
            list(value.shape),
            list(value.stride()),
            str(value.dtype).removeprefix("torch."),
            name_of(value.device, self._own),
        ]

    def _constant(self, value: Any) -> Any:
        """Return a tensor that the step makes from Python numbers as JSON: [shape, dtype, elements in
        base64]."""
        if not is_constant(value):
            raise NotSerializable(f"a {type(value).__name__}")
        return [list(value.shape), str(value.dtype).removeprefix("torch."), bytes_of(value)]


class _GraphReader:
    """A reader of one graph, which checks that the content has only known operations. For damaged content,
    its methods raise errors of any class."""

    def __init__(self, own: torch.device) -> None:
        self._own = own
        self._mode = _torch.FakeTensorMode()
        self._nodes: list[Node] = []  # the nodes read so far, by position
        self._constants = GraphModule({}, Graph())  # holds the graph's constant tensors
        self._values: dict[str, torch.Tensor] = {}  # spec as text -> fake tensor

    def graph(self, found: Any) -> Graph:
        """Return the graph that is described by the JSON `found`, which `_GraphWriter.content` wrote."""
        graph = Graph(self._constants)
        for op, name, target, args, kwargs, about in found:
            given = tuple(self._data(args)), self._data(kwargs)
            node = new_node(graph, op, self._target(op, target), *given, name)
            node.meta.update((key, self._data(about[key])) for key in _MARKS if key in about)
            if "desc" in about:
                node.meta["desc"] = _described(about["desc"])
            if "val" in about:
                node.meta["val"] = self._value(about["val"])
            self._nodes.append(node)
        graph.lint()
        return graph

    def _target(self, op: str, target: Any) -> Any:
        """Return the operation that a node calls, or the name of its placeholder or attribute. A constant is
        also stored in `_constants`.

        Raises:
            NotSerializable: The operation is not known.
        """
        if op in ("placeholder", "output"):
            return str(target)
        if op == "get_attr":
            setattr(self._constants, target[0], _constant_of(*target[1]))
            return str(target[0])
        if op != "call_function":
            raise NotSerializable(op)
        if target == "getitem":
            return operator.getitem
        library, packet, overload = target.split(".")
        found = getattr(getattr(getattr(torch.ops, library), packet), overload) if _is_known(target) else None
        if not isinstance(found, torch._ops.OpOverload):
            raise NotSerializable(target)
        return found

    def _data(self, value: Any) -> Any:
        """Return the argument or mark that a JSON value stands for.

        Raises:
            NotSerializable: An attribute of `torch` is not of the kind that the JSON value states.
        """
        if isinstance(value, dict):
            return {key: self._data(x) for key, x in value.items()}
        if not isinstance(value, list):
            return value
        word, *rest = value
        if word in ("list", "tuple"):
            return (list if word == "list" else tuple)(map(self._data, rest))
        if word == "node":
            return self._nodes[rest[0]]
        if word == "device":
            return self._device(rest[0])
        kind = next(kind for kind, known in _CONSTANTS.items() if known == word)
        if not isinstance(found := getattr(torch, rest[0]), kind):
            raise NotSerializable(rest[0])
        return found

    def _value(self, value: Any) -> Any:
        """Return the traced value of a node from its JSON. Equal specs share one fake tensor, because fake
        tensors have no data."""
        if not isinstance(value, list):
            return value
        word, *rest = value
        if word != "tensor":
            return (list if word == "list" else tuple)(map(self._value, rest))
        if (key := str(rest)) not in self._values:
            shape, stride, dtype, device = rest
            self._values[key] = _torch_calls.fake_of(
                self._mode, shape, stride, 0, getattr(torch, dtype), self._device(device), None
            )
        return self._values[key]

    def _device(self, name: str) -> torch.device:
        return self._own if name == _OWN else torch.device(name)


def name_of(device: torch.device, own: torch.device) -> str:
    """Return the text for a device in a written graph: "own" for the device `own` of the trace, and otherwise
    its name, such as "cpu". So a process whose device has another index can read the graph."""
    return _OWN if device == own else str(device)


def _is_known(target: str) -> bool:
    return target.partition(".")[0] in _LIBRARIES and target not in _NOT_DATA


def _descriptor(desc: Any) -> Any:
    """Return the descriptor of an input or output of the graph as JSON. For the output node, return a
    list."""
    if isinstance(desc, list | tuple):
        return [_descriptor(x) for x in desc]
    if desc is None:  # a missing gradient
        return None
    if type(desc).__name__ not in _DESCRIPTORS:
        raise NotSerializable(f"a {type(desc).__name__}")
    fields = {field.name: getattr(desc, field.name) for field in dataclasses.fields(desc)}
    return {"is": type(desc).__name__} | {
        key: x if type(x) in (int, str) else _descriptor(x) for key, x in fields.items()
    }


def _described(found: Any) -> Any:
    """Return the descriptor, or the list of descriptors, from the JSON that `_descriptor` returned."""
    if isinstance(found, list):
        return [_described(x) for x in found]
    if found is None:
        return None
    fields = {key: _described(x) if isinstance(x, dict) else x for key, x in found.items() if key != "is"}
    return _DESCRIPTORS[found["is"]](**fields)


def is_constant(value: Any) -> bool:
    """Return whether the value is a plain tensor or parameter on the CPU with data that can be written into a
    graph: contiguous, and of at most `MANY` bytes."""
    plain = (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
    )
    return (
        plain
        and value.is_contiguous()
        and not _torch.is_traced(value)
        and value.numel() * value.element_size() <= MANY
    )


def bytes_of(value: torch.Tensor) -> str:
    """Return the elements of a constant in base64."""
    with _torch.with_data(), torch.no_grad():
        return base64.b64encode(
            value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        ).decode()


def _constant_of(shape: list[int], dtype: str, elements: str) -> torch.Tensor:
    """Return the tensor that the writer encoded as shape, dtype and base64 bytes."""
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if made.numel():
        made.copy_(
            torch.frombuffer(bytearray(base64.b64decode(elements, validate=True)), dtype=made.dtype).reshape(
                shape
            )
        )
    return made
