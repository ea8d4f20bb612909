"""Build the graph of a step from the operations that a tracing run records.

Usually these operations determine the graph, so no full trace is needed. The run only notes them
(`OperationNotes`), because the graph may be known already: to make its nodes takes as long as a fifth of the
run.

    operation, arguments, results --> node            add_(x, 1) on memory without another alias --> add(x, 1)

A full trace runs a step twice, with each operation under several wrappers, to find operations that change
aliased memory, and to rewrite them as operations without side effects. Most steps have no such operations, so
their operations already are the graph. A step with such an operation is traced in full. Both ways give the
same graph, node by node (`tests/capture/test_graph_builder.py` checks this).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.fx import Graph, GraphModule, Node

from lightning_piper.capture.graph_cache.serialization import is_constant
from lightning_piper.capture.torch_private import _torch, _torch_calls
from lightning_piper.capture.user_code.source import CALLED_KEY

FORWARD, BACKWARD = "is_forward", "is_backward"
aten = torch.ops.aten


class NotBuildable(Exception):
    """Raised if the recorded operations do not determine the graph. The step is then traced in full."""


class _Marks(NamedTuple):
    """The metadata that a trace would give to a node that it makes now.

    Attributes:
        number: autograd's sequence number.
        custom: a copy of the open annotations; None if there are none.
        merges: whether the backward pass adds gradients of one value.
        called: the line of the function that the backward pass runs, or "" (`line_in_backward`).
    """

    number: int
    custom: dict[str, Any] | None
    merges: bool
    called: str


class NotedOperation(NamedTuple):
    """An operation that has run.

    Attributes:
        function, args, kwargs: the operation, and its arguments.
        target: the operation of the graph: the functional variant, if `function` changes its first argument.
        made: its result.
        changed: storage of the changed argument; None if the operation does not change an argument.
        storages: storages of the tensors in `made`, in their order.
        marks: the metadata of its nodes.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    made: Any
    changed: int | None
    storages: tuple[int, ...]
    marks: _Marks


@dataclass(frozen=True)
class BlockNotes:
    """The operations of a block that ran alone (`block_replay.py`).

    Attributes:
        tensors: The block's parameters, buffers and inputs.
        forward, backward: The operations.
        made: The result of the block.
        tangent: The gradient of the result; None if the result does not need a gradient.
        gradients: For each of `tensors`, its gradient; None if it does not have one.
        first, last: autograd's sequence number before and after the forward pass.
    """

    tensors: Sequence[torch.Tensor]
    forward: Sequence[NotedOperation]
    backward: Sequence[NotedOperation]
    made: torch.Tensor
    tangent: torch.Tensor | None
    gradients: Sequence[torch.Tensor | None]
    first: int
    last: int


@dataclass(eq=False)
class NotedBlock:
    """A block that repeats the operations of `notes`.

    Attributes:
        tensors: Its parameters, buffers and inputs.
        customs: The annotations of its forward operations.
        before, base: The sequence numbers that stand for `notes.first` in operations without and with a gradient.
        end: The sequence number of operations that add gradients.
        made, tangent, gradients: Its result, the gradient of the result, and the gradients of `tensors`.
        nodes, names: As in `_GraphBuilder`, but with tensors of `notes`.
    """

    notes: BlockNotes
    tensors: Sequence[torch.Tensor]
    customs: Sequence[dict[str, Any] | None]
    before: int
    base: int
    end: int = 0
    made: torch.Tensor | None = None
    tangent: torch.Tensor | None = None
    gradients: Sequence[torch.Tensor | None] = ()
    nodes: dict[int, Node] = field(default_factory=dict)
    names: dict[int, set[int]] = field(default_factory=dict)

    def marks(self, marks: _Marks, at: int | None) -> _Marks:
        """Return the marks of an operation of the block, from those in `notes`. `at` is the index of a forward
        operation, or None."""
        first = self.notes.first
        number = self.before if marks.number == first else self.base + marks.number - first
        if at is None:
            return marks._replace(number=self.end if marks.merges else number)
        return marks._replace(number=number, custom=self.customs[at])


class OperationNotes:
    """The operations of a run, in their order, with all that the run alone shows about them.

    The caller calls `note` for each operation of the forward pass, `goes_back`, `note` for each operation of
    the backward pass, and at last `build`, which makes the graph. It keeps all tensors of the run alive,
    because the graph knows them by `id`. After a `NotBuildable`, the notes must not be used.

    Args:
        module: the module that runs. Its parameters and buffers are the first inputs of the graph.
        inputs: the arguments of the module.
        joint: whether the graph has a backward pass.

    Raises:
        NotBuildable: two inputs are one tensor.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor], joint: bool) -> None:
        self.joint = joint
        self.start = _torch_calls.sequence_now()  # autograd's sequence number before the first operation
        self.forward: list[NotedOperation | NotedBlock] = []
        self.backward: list[NotedOperation | NotedBlock] = []
        self.tangent: torch.Tensor | None = None  # the gradient of the loss, when the backward pass has begun
        # the inputs, each with its descriptor
        self.primals: list[tuple[torch.Tensor, Any]] = [
            *((x, _torch.ParamAOTInput(name)) for name, x in module.named_parameters(remove_duplicate=False)),
            *((x, _torch.BufferAOTInput(name)) for name, x in module.named_buffers(remove_duplicate=False)),
            *((x, _torch.PlainAOTInput(i)) for i, x in enumerate(inputs)),
        ]
        if len({id(x) for x, _ in self.primals}) < len(self.primals):
            raise NotBuildable("a tensor of two names")
        self.storages = [_torch.storage_id(x) for x, _ in self.primals]

    def goes_back(self, loss: torch.Tensor, tangent: torch.Tensor) -> None:
        """Begin the backward pass: all operations that `note` gets from now on are backward operations.

        Args:
            loss: the only result that has a gradient.
            tangent: the gradient of the loss.
        """
        _torch_calls.number_backward(loss)
        self.tangent = tangent

    def note(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any, called: str
    ) -> None:
        """Note an operation that has run.

        Args:
            function, args, kwargs: the operation, and its arguments.
            made: its result: a tensor, None, or a list or tuple of both.
            called: the line of the function that the backward pass runs (`line_in_backward`).

        Raises:
            NotBuildable: the graph cannot have this operation. For example, a trace would decompose it, or it
                returns a number.
        """
        if not isinstance(function, torch._ops.OpOverload):
            raise NotBuildable(str(function))
        if _torch_calls.is_taken_apart(function, args, kwargs):
            raise NotBuildable(str(function))
        results = made if isinstance(made, list | tuple) else [made]
        if not all(x is None or isinstance(x, torch.Tensor) for x in results):
            raise NotBuildable(f"{function} gives a {type(made).__name__}")
        target, changed = function, None
        if function._schema.is_mutable:
            target, changed = _without_change(function, args, kwargs), _torch.storage_id(args[0])
        storages = tuple(_torch.storage_id(x) for x in results if x is not None)
        calls = self.forward if self.tangent is None else self.backward
        calls.append(
            NotedOperation(function, args, kwargs, target, made, changed, storages, self.marks(called))
        )

    def marks(self, called: str = "") -> _Marks:
        """Return the metadata of a node that is made now."""
        custom = fx_traceback.current_meta.get("custom")
        merges = self.tangent is not None and _torch_calls.merges_gradients()
        return _Marks(_torch_calls.sequence_now(), None if custom is None else dict(custom), merges, called)

    def build(
        self, results: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor | None]
    ) -> Callable[[], Graph]:
        """End the notes, and return a function that makes the graph, without operations on which no output
        depends. The outputs of the graph are the results and, if there is a backward pass, one entry for each
        input: the gradient or None.

        Args:
            results: the results of the step.
            gradients: `id` of an input that needs a gradient -> its gradient. The gradient is None if the
                loss does not depend on the input.

        Raises:
            NotBuildable: (by the returned function) the graph cannot have one of the operations, for example
                because it changes memory with an alias. Or a result or a gradient comes from an operation
                that was not noted.
        """
        return partial(_GraphBuilder(self).graph, results, gradients, self.marks())


class _GraphBuilder:
    """A builder of a graph from the operations of a run.

    Args:
        notes: the operations.
    """

    def __init__(self, notes: OperationNotes) -> None:
        self._notes, self._phase = notes, FORWARD
        # of the step, or of the block that is being added:
        self._nodes: dict[int, Node] = {}  # `id` of a tensor -> the node of its current value
        self._names: dict[int, set[int]] = {}  # id of a storage -> ids of the tensors that share it
        # `id` of the previous operation's result if it is a newly created tensor: the operation read no
        # tensors, or only the properties of one (`zeros_like`). Otherwise None.
        self._fresh: int | None = None
        # `id` of the tensor that the previous operation changed in place. None if it did not change a tensor.
        self._changed: int | None = None
        self._constants = 0  # the number of constants

    def graph(
        self,
        results: Sequence[torch.Tensor],
        gradients: Mapping[int, torch.Tensor | None],
        marks: _Marks,
    ) -> Graph:
        """Return the graph; see `OperationNotes.build`. Call it once.

        Args:
            results, gradients: see `OperationNotes.build`.
            marks: the metadata of a constant that is a result.
        """
        self._graph, notes, joint = Graph(GraphModule({}, Graph())), self._notes, self._notes.joint
        for i, ((x, desc), storage) in enumerate(zip(notes.primals, notes.storages, strict=True), 1):
            self._input(x, storage, f"primals_{i}" if joint else f"arg{i - 1}_1", desc)
        for call in notes.forward:
            self._add(call)
        if (tangent := notes.tangent) is not None:
            self._phase = BACKWARD
            with self._graph.inserting_after(self._nodes[id(notes.primals[-1][0])]):
                desc = _torch.TangentAOTInput(_torch.PlainAOTOutput(0))
                self._input(tangent, _torch.storage_id(tangent), "tangents_1", desc)
        for call in notes.backward:
            self._add(call)
        outputs: list[Any] = [self._node(x, marks) for x in results]
        about: list[Any] = [_torch.PlainAOTOutput(i) for i in range(len(results))]
        for x, desc in notes.primals if joint else ():
            gradient = gradients.get(id(x))
            outputs.append(None if gradient is None else self._node(gradient, marks))
            about.append(_torch.GradAOTOutput(desc) if id(x) in gradients else None)
        end = self._graph.output(outputs if joint else tuple(outputs))
        end.meta["desc"] = about
        self._mark_backward()
        self._graph.eliminate_dead_code()
        return self._graph

    def _input(self, x: torch.Tensor, storage: int, name: str, desc: Any) -> None:
        """Add the placeholder of an input with this name and descriptor."""
        node = self._graph.placeholder(name)
        node.meta = {"desc": desc, "val": x, "seq_nr": self._notes.start}
        if self._notes.joint:
            node.meta["partitioner_tag"] = self._phase
        self._made(node, x, storage)

    def _add_block(self, block: NotedBlock) -> None:
        """Add the nodes of a block, in the current pass.

        Raises:
            NotBuildable: see `_add`.
        """
        notes, outer, names = block.notes, self._nodes, self._names
        forward = self._phase == FORWARD
        read = zip(notes.tensors, block.tensors, strict=True) if forward else [(notes.tangent, block.tangent)]
        made = [(notes.made, block.made)] if forward else zip(notes.gradients, block.gradients, strict=True)
        block.nodes |= {id(x): outer[id(own)] for x, own in read}
        self._nodes, self._names = block.nodes, block.names
        for i, call in enumerate(notes.forward if forward else notes.backward):
            self._add(call._replace(marks=block.marks(call.marks, i if forward else None)))
        self._nodes, self._names = outer, names
        for x, own in made:
            if own is not None:
                self._made(block.nodes[id(x)], own, _torch.storage_id(own))

    def _add(self, call: NotedOperation | NotedBlock) -> None:
        """Add the node of an operation. A detach directly after the creation of a tensor gets no node.

        Raises:
            NotBuildable: the graph cannot have this operation.
        """
        if isinstance(call, NotedBlock):
            self._add_block(call)
            return
        function, args, kwargs, target, made, storages = *call[:5], call.storages
        fresh, changed, self._fresh, self._changed = self._fresh, self._changed, None, None
        if function is aten.detach.default and changed == id(args[0]):
            raise NotBuildable("a result that a backward pass needs was made in place")
        if function is aten.detach.default and fresh == id(args[0]):
            # torch detaches each newly created tensor, but a trace does not record this.
            self._made(self._nodes[fresh], made, *storages)
            return
        leaves = _torch.tree_leaves((args, kwargs))
        nodes = {id(x): self._node(x, call.marks) for x in leaves if isinstance(x, torch.Tensor)}
        if call.changed is not None:
            self._check_names(call, call.changed)
        target = aten.lift_fresh_copy.default if target is aten.lift_fresh.default else target
        arguments, named = _torch.tree_map(
            lambda x: nodes[id(x)] if isinstance(x, torch.Tensor) else x,
            _without_defaults(function, args, kwargs),
        )
        name = self._graph._target_to_str(target.overloadpacket.__name__)
        node = self._graph.create_node("call_function", target, arguments, named, name)
        self._mark(node, made, call.marks)
        if call.changed is not None:
            # The new node is the value of every tensor that shares the changed memory.
            self._nodes |= dict.fromkeys(self._names[call.changed], node)
            self._changed = id(args[0])
        elif isinstance(made, torch.Tensor):
            self._made(node, made, *storages)
            if not nodes or function.overloadpacket.__name__.endswith("_like"):
                self._fresh = id(made)
        else:
            # a gradient that was not requested is None
            items = ((i, x) for i, x in enumerate(made or ()) if x is not None)
            for (i, x), storage in zip(items, storages, strict=True):
                item = self._graph.call_function(operator.getitem, (node, i))
                self._mark(item, x, call.marks)
                self._made(item, x, storage)

    def _check_names(self, call: NotedOperation, storage: int) -> None:
        """Check that an operation changes only its first argument.

        Raises:
            NotBuildable: the argument is an input or constant of the graph, or has aliases.
        """
        node = self._nodes[id(call.args[0])]
        if node.op != "call_function" or any(self._nodes[x] is not node for x in self._names[storage]):
            raise NotBuildable(f"{call.function} of what has other names")

    def _mark_backward(self) -> None:
        """Copy annotations and lines from the forward pass to the backward pass. The first forward operation
        with a sequence number gives its own to the backward operations with the same number, except to
        additions of gradients."""
        first: dict[int, Node] = {}
        for node in self._graph.nodes:
            number = node.meta.get("seq_nr")
            if node.meta.get("partitioner_tag") != BACKWARD:
                first.setdefault(number, node)
            elif number in first and not node.meta.pop("merges", False) and "custom" in first[number].meta:
                node.meta["custom"] = node.meta.get("custom", {}) | first[number].meta["custom"]

    def _mark(self, node: Node, made: Any, marks: _Marks) -> None:
        """Set the metadata of a new node: its value, autograd's sequence number, the pass, the open
        annotations, and the user's line."""
        node.meta = {"val": made, "seq_nr": marks.number}
        if self._notes.joint:
            node.meta["partitioner_tag"] = self._phase
        if marks.custom is not None:
            node.meta["custom"] = dict(marks.custom)
        if marks.merges:
            node.meta["merges"] = True
        if marks.called:
            node.meta[CALLED_KEY] = marks.called

    def _made(self, node: Node, x: torch.Tensor, storage: int) -> None:
        """Record that a tensor is the value of a node."""
        self._nodes[id(x)] = node
        self._names.setdefault(storage, set()).add(id(x))

    def _node(self, x: torch.Tensor, marks: _Marks) -> Node:
        """Return the node of a tensor. A constant without a node gets a new node with this metadata.

        Raises:
            NotBuildable: The tensor is not a constant, and no operation of the graph made it.
        """
        node = self._nodes.get(id(x))
        if node is None:
            if not is_constant(x):
                raise NotBuildable("a tensor that was made elsewhere")
            name, self._constants = f"_tensor_constant{self._constants}", self._constants + 1
            setattr(self._graph.owning_module, name, x)
            node = self._nodes[id(x)] = self._graph.create_node("get_attr", name)
            self._mark(node, x, marks)
        return node


def _without_change(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the functional variant of an operation that has changed its first argument: `aten.add.Tensor`
    for `aten.add_.Tensor`.

    Raises:
        NotBuildable: there is no such variant, or its result has another layout than the argument.
    """
    name = function.overloadpacket.__name__
    writes = [x.alias_info is not None and x.alias_info.is_write for x in function._schema.arguments]
    packet = (
        getattr(aten, name[:-1], None)
        if function.namespace == "aten" and name[-1:] == "_" != name[-2:-1]
        else None
    )
    target = getattr(packet, function._overloadname, None)
    if target is None or target._schema.is_mutable or writes != [True] + [False] * (len(writes) - 1):
        raise NotBuildable(str(function))
    made = target(*args, **kwargs)
    if not isinstance(made, torch.Tensor) or _layout(made) != _layout(args[0]):
        raise NotBuildable(f"{target} makes another tensor than {function}")
    return target


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _without_defaults(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as torch passes them to a tracer: without arguments that equal their defaults,
    wherever possible."""
    arguments = function._schema.arguments
    placed, named = list(args), dict(kwargs)
    by_position = [x for x in arguments if not x.kwarg_only]
    for x in by_position[len(placed) :]:
        if x.name not in named and not x.has_default_value():
            break
        placed.append(named.pop(x.name, x.default_value))
    while placed and _is_default(by_position[len(placed) - 1], placed[-1]):
        placed.pop()
    return tuple(placed), {
        x.name: named[x.name] for x in arguments if x.name in named and not _is_default(x, named[x.name])
    }


def _is_default(argument: Any, given: Any) -> bool:
    if not argument.has_default_value() or isinstance(given, torch.Tensor):
        return False
    default = argument.default_value
    return type(given) is type(default) and bool(given == default)
