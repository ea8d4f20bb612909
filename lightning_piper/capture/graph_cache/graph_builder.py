"""Build the graph of a step from the operations that a tracing run records.

Usually these operations determine the graph, so no full trace is needed. The run only notes them
(`OperationNotes`), because the graph may be known already: to make its nodes takes as long as a fifth of the
run.

    operation, arguments, results --> node        y = x.view(-1); x.add_(1); y * 2 --> add(x, 1).view(-1) * 2

A full trace runs a step twice, with each operation under several wrappers, to rewrite operations that change memory
as operations without side effects. The builder applies the same rules as the trace. After a change, each other
tensor on this memory is made again from the changed value, with the operations of its view. The new value of a
buffer is an output of the graph. A step with other changes, such as the change of a view that has a gradient, is
traced in full. Both ways give the same graph, node by node (`tests/capture/test_graph_builder.py` checks this).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from lightning_piper.capture.graph_cache.functional_variants import functional_variant, without_defaults
from lightning_piper.capture.graph_cache.serialization import is_constant
from lightning_piper.capture.torch_private import _torch, _torch_calls
from lightning_piper.capture.user_code.source import CALLED_KEY
from lightning_piper.common.graph_nodes import new_node

FORWARD, BACKWARD = "is_forward", "is_backward"
aten = torch.ops.aten
# Operation that makes a view -> operation that puts a changed view back.
_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}


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
        made: the result of `target`. The changed arguments stand for their new values in a tuple of results.
        changed: The changed arguments, each with its storage.
        storages: The storages of the tensors in `made`, in their order.
        marks: The metadata of its nodes.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    made: Any
    changed: tuple[tuple[torch.Tensor, int], ...]
    storages: tuple[int, ...]
    marks: _Marks


class _ViewOperation(NamedTuple):
    """An operation that makes a view, with its arguments after the tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(eq=False)
class _Memory:
    """The memory of one or more tensors.

    Attributes:
        node: The node of its current content.
        whole: The tensor that has all of it.
        may_change: Whether a graph can express a change.
        changes: The number of changes up to now.
    """

    node: Node
    whole: torch.Tensor
    may_change: bool
    changes: int = 0


@dataclass(eq=False)
class _Value:
    """A tensor of the run in the graph.

    Attributes:
        node: The node of its value when its memory had been changed `changes` times.
        memory: Its memory.
        marks: The metadata of nodes that make the tensor again. None for the tensors that a block gets or returns.
        views: The operations that make the tensor from the whole memory. None if they are not known.
    """

    node: Node
    memory: _Memory
    marks: _Marks | None = None
    views: tuple[_ViewOperation, ...] | None = ()
    changes: int = 0


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
        values, memory: As in `_GraphBuilder`, but with tensors of `notes`.
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
    values: dict[int, _Value] = field(default_factory=dict)
    memory: dict[int, _Memory] = field(default_factory=dict)

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
        inputs: The arguments of the module.
        joint: Whether the graph has a backward pass.
        is_block: Whether the module is a repeated block, which must not change its inputs.

    Raises:
        NotBuildable: two inputs are one tensor.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], joint: bool, is_block: bool = False
    ) -> None:
        self.joint, self._is_block = joint, is_block
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
        target: Any = function
        changes: tuple[Any, ...] = ()
        if function is aten._native_batch_norm_legit.default:
            target, changes = aten._native_batch_norm_legit_functional.default, args[3:5]
            made = (*made, *changes)
        elif function._schema.is_mutable:
            if (variant := functional_variant(function, args, kwargs)) is None:
                raise NotBuildable(str(function))
            (target, made), changes = variant, args[:1]
        changed = tuple((x, _torch.storage_id(x)) for x in changes)
        for x, storage in changed:
            of_input = storage in self.storages
            # A batch norm does not give a gradient to its statistics.
            differentiable = len(changes) == 1 and _is_differentiable(args, kwargs)
            if (of_input and self._is_block) or (differentiable and (of_input or x._is_view())):
                raise NotBuildable(f"{function} of an input or of a view with a gradient")
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
                because it changes a tensor of the batch. Or a result or a gradient comes from an operation
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
        self._values: dict[int, _Value] = {}  # by `id` of the tensor
        self._memory: dict[int, _Memory] = {}  # by id of the storage
        # `id` of the previous operation's result if it is a newly created tensor: the operation read no
        # tensors, or only the properties of one (`zeros_like`). Otherwise None.
        self._fresh: int | None = None
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
        self._inputs: list[Node] = []
        for i, ((x, desc), storage) in enumerate(zip(notes.primals, notes.storages, strict=True), 1):
            self._input(x, storage, f"primals_{i}" if joint else f"arg{i - 1}_1", desc)
        for call in notes.forward:
            self._add(call)
        if (tangent := notes.tangent) is not None:
            self._phase = BACKWARD
            with self._graph.inserting_after(self._inputs[-1]):
                desc = _torch.TangentAOTInput(_torch.PlainAOTOutput(0))
                self._input(tangent, _torch.storage_id(tangent), "tangents_1", desc)
        for call in notes.backward:
            self._add(call)
        changed = [(x, desc) for x, desc in notes.primals if self._values[id(x)].memory.changes]
        outputs: list[Any] = [self._current(x).node for x, _ in changed]
        outputs += [self._node(x, marks) if is_constant(x) else self._current(x).node for x in results]
        about: list[Any] = [_torch.InputMutationAOTOutput(desc) for _, desc in changed]
        about += [_torch.PlainAOTOutput(i) for i in range(len(results))]
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
        memory = self._memory.setdefault(storage, _Memory(node, x, isinstance(desc, _torch.BufferAOTInput)))
        memory.may_change &= memory.whole is x
        self._values[id(x)] = _Value(node, memory, _Marks(self._notes.start, None, False, ""))
        self._inputs.append(node)

    def _add_block(self, block: NotedBlock) -> None:
        """Add the nodes of a block, in the current pass.

        Raises:
            NotBuildable: see `_add`.
        """
        notes, outer, memory = block.notes, self._values, self._memory
        forward = self._phase == FORWARD
        read = zip(notes.tensors, block.tensors, strict=True) if forward else [(notes.tangent, block.tangent)]
        made: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(notes.made, block.made)]
        if not forward:
            made = list(zip(notes.gradients, block.gradients, strict=True))
        for x, own in read:
            assert x is not None and own is not None
            known = self._current(own)
            storage = _torch.storage_id(x)
            block.memory.setdefault(storage, _Memory(known.node, x, may_change=False))
            block.values[id(x)] = _Value(known.node, block.memory[storage], None, None)
        self._values, self._memory = block.values, block.memory
        for i, call in enumerate(notes.forward if forward else notes.backward):
            self._add(call._replace(marks=block.marks(call.marks, i if forward else None)))
        nodes = [None if x is None else self._current(x).node for x, _ in made]
        self._values, self._memory = outer, memory
        for node, (_, own) in zip(nodes, made, strict=True):
            if node is not None and own is not None:
                self._made(node, own, _torch.storage_id(own))

    def _add(self, call: NotedOperation | NotedBlock) -> None:
        """Add the node of an operation. A detach directly after the creation of a tensor gets no node.

        Raises:
            NotBuildable: the graph cannot have this operation.
        """
        if isinstance(call, NotedBlock):
            self._add_block(call)
            return
        function, args, kwargs, target, made = call[:5]
        fresh, self._fresh = self._fresh, None
        if function is aten.detach.default and fresh == id(args[0]):
            # torch detaches each newly created tensor, but a trace does not record this.
            self._values[id(made)] = replace(self._values[fresh])
            return
        nodes: list[Node] = []

        def entered(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            nodes.append(self._node(x, call.marks))
            return nodes[-1]

        arguments, named = map_aggregate(without_defaults(function, args, kwargs), entered)
        for x, _ in call.changed:
            self._check_change(x)
        target = aten.lift_fresh_copy.default if target is aten.lift_fresh.default else target
        node = self._call(target, arguments, named, made, call.marks)
        if call.changed and isinstance(made, torch.Tensor):
            self._change(args[0], node, call.marks)
        elif isinstance(made, torch.Tensor):
            views = self._views(call, target, arguments, named)
            self._made(node, made, call.storages[0], call.marks, views)
            if not nodes or function.overloadpacket.__name__.endswith("_like"):
                self._fresh = id(made)
        else:
            self._add_items(call, node)

    def _add_items(self, call: NotedOperation, node: Node) -> None:
        """Add the nodes of the tensors that an operation returns in a list or tuple."""
        changed = {id(x) for x, _ in call.changed}
        storages = iter(call.storages)
        for i, x in enumerate(call.made or ()):
            item = self._graph.call_function(operator.getitem, (node, i))
            self._mark(item, x, call.marks)
            if id(x) in changed:
                self._change(x, item, call.marks)
            elif x is not None:  # a gradient that was not requested is None
                self._made(item, x, next(storages), call.marks)

    def _call(self, target: Any, args: Any, kwargs: Any, made: Any, marks: _Marks) -> Node:
        """Add the node of an operation with this result."""
        name = self._graph._target_to_str(target.overloadpacket.__name__)
        node = new_node(self._graph, "call_function", target, args, dict(kwargs), name)
        self._mark(node, made, marks)
        return node

    def _views(
        self, call: NotedOperation, target: Any, args: Any, kwargs: Any
    ) -> tuple[_ViewOperation, ...] | None:
        """Return the operations that make the result of an operation from the memory of its first argument. None if
        they are not known, or if the result has memory of its own."""
        known = self._values.get(id(call.args[0])) if call.args else None
        if known is None or known.views is None or known.memory is not self._memory.get(call.storages[0]):
            return None
        return (*known.views, _ViewOperation(target, args[1:], kwargs))

    def _check_change(self, x: torch.Tensor) -> None:
        """Check that the graph can express a change of a tensor.

        Raises:
            NotBuildable: It cannot.
        """
        known = self._values[id(x)]
        of_view = known.views is None or len(known.views) > 1 or any(
            view.target not in _SCATTERS for view in known.views
        )  # fmt: skip
        if of_view or not known.memory.may_change:
            raise NotBuildable("a change of an input, or of a view of a view")

    def _change(self, x: torch.Tensor, node: Node, marks: _Marks) -> None:
        """Record that a node is the new value of a tensor, and so changes the memory of the tensor."""
        known = self._values[id(x)]
        memory = known.memory
        for view in known.views or ():
            args = (memory.node, node, *view.args)
            node = self._call(_SCATTERS[view.target], args, view.kwargs, memory.whole, marks)
        memory.node, memory.changes = node, memory.changes + 1
        self._node(x, marks)

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

    def _made(
        self, node: Node, x: torch.Tensor, storage: int, marks: _Marks | None = None,
        views: tuple[_ViewOperation, ...] | None = None,
    ) -> None:  # fmt: skip
        """Record that a tensor is the value of a new node with this metadata. If its memory is known, `views` make it
        from there."""
        if (memory := self._memory.get(storage)) is None:
            memory, views = self._memory.setdefault(storage, _Memory(node, x, may_change=True)), ()
        elif memory.changes and views is None:
            raise NotBuildable("one of several views of memory that has changed")
        self._values[id(x)] = _Value(node, memory, marks, views)

    def _current(self, x: torch.Tensor) -> _Value:
        """Return what is known of a tensor.

        Raises:
            NotBuildable: An operation has changed its memory since, or no operation of the graph made it.
        """
        known = self._values.get(id(x))
        if known is None or known.changes != known.memory.changes:
            raise NotBuildable("a tensor that was made elsewhere, or whose memory has changed")
        return known

    def _node(self, x: torch.Tensor, marks: _Marks) -> Node:
        """Return the node of the current value of a tensor. If the memory of the tensor has changed, add the nodes
        that make it again, with this metadata. Also add the node of a constant that does not have one.

        Raises:
            NotBuildable: The tensor is not a constant, and no operation of the graph made it. Or the graph
                cannot make it again.
        """
        known = self._values.get(id(x))
        if known is None:
            if not is_constant(x):
                raise NotBuildable("a tensor that was made elsewhere")
            name, self._constants = f"_tensor_constant{self._constants}", self._constants + 1
            setattr(self._graph.owning_module, name, x)
            node = self._graph.create_node("get_attr", name)
            self._mark(node, x, marks)
            self._values[id(x)] = _Value(node, _Memory(node, x, may_change=False))
            return node
        if known.changes != known.memory.changes:
            if known.views is None or known.marks is None:
                raise NotBuildable("a tensor whose memory has changed")
            known.node, known.changes = known.memory.node, known.memory.changes
            for i, view in enumerate(known.views, 1):
                # The run keeps only the last view.
                made = x if i == len(known.views) else _made_by(view, known.node.meta["val"])
                args = (known.node, *view.args)
                known.node = self._call(view.target, args, view.kwargs, made, known.marks)
        return known.node


def _is_differentiable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether autograd records an operation with these arguments."""
    leaves = _torch.tree_leaves((args, kwargs))
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)


def _made_by(view: _ViewOperation, x: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor without data."""
    made: torch.Tensor = view.target(x, *view.args, **view.kwargs)
    return made
