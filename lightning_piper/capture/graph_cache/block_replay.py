"""Note the operations of repeated blocks once. A block that makes the same calls as an earlier block gets the
operations of that block.

    first block: runs alone, forward and backward --> its calls, its operations
    other block: each call equals the noted call   --> an empty tensor, the noted operations

The Python code of every block runs, with its hooks, attributes and closures, so Piper records guards as in every
run, and assumes nothing about the code. Only the operations do not run. This gives the same graph, because:

- Each call must have the same function, arguments, line and global state as the noted call. An argument that is a
  tensor must be the same parameter, buffer, input or earlier result of the block, with an equal spec.
- The calls must be functions of torch that change nothing. The block must read no tensor from outside, and must
  return one new tensor. Its arguments must not be lists or dicts, and no tensor may have attributes of the user,
  because the block gets copies of its arguments when it runs alone.
- No mode of the user may be active, because it could change the operations of each block.
- No other code reads a parameter or an input of the block that needs a gradient. Autograd runs later operations
  first. So it runs the backward operations of a block one after another, in the order in which it runs
  them for the block alone.

In any other case, the run raises `BlocksDiffer`, and the caller runs the step again without this file.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_piper.capture.graph_cache.graph_builder import BlockNotes, NotedOperation
from lightning_piper.capture.graph_cache.serialization import is_constant
from lightning_piper.capture.torch_private import _torch, _torch_calls
from lightning_piper.common.user_lines import user_frame

# With fewer blocks, it takes a few seconds at most to note every block. So a rule with so many conditions is not worth it.
FEWEST = 32
# Names of calls whose result follows from the spec of a tensor.
_PROPERTIES = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "size", "dim", "stride",
    "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous", "__len__",
})  # fmt: skip
_PLAIN = (
    type(None), bool, int, float, complex, str, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


class BlocksDiffer(Exception):
    """Raised if a block cannot be noted alone, or does not repeat the noted block."""


@dataclass(frozen=True)
class _Numbered:
    """A tensor of a block: parameters, buffers and inputs have the first numbers, then come results of calls."""

    number: int


@dataclass(frozen=True)
class _BlockCall:
    """A call of a function of torch.

    Attributes:
        key: Identifies the function, its arguments, and the state in which it runs.
        result: Its result, in which `_Numbered` replaces tensors.
        operations: The number of operations that were noted up to its end.
    """

    key: Any
    result: Any
    operations: int


class _BlockCalls(TorchFunctionMode):
    """A mode that numbers the tensors of a block. The block must not change torch's global state.

    Args:
        tensors: The parameters, buffers and inputs of the block.

    Attributes:
        annotations: The open annotations at each call.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)
        self.numbers = {id(x): i for i, x in enumerate(tensors)}
        self.annotations: list[dict[str, Any] | None] = []
        self._before, self.differs = _torch_calls.global_state(), False

    @abstractmethod
    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of a function of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.differs:  # the user's code restores torch's state
            return function(*args, **(kwargs or {}))
        try:
            return self.call(function, args, kwargs or {})
        except BlocksDiffer:
            self.differs = True
            raise

    def key(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return what identifies a call. Note the open annotations.

        Raises:
            BlocksDiffer: The function is not torch's or may set torch's state, or an argument is unknown. Such a
                function has not run. If a context had called it, the error would keep the context from ending.
        """
        name = _name(function)
        if not _torch_calls.is_of_torch(function) or name.lstrip("_").startswith("set"):
            raise BlocksDiffer(name)
        custom = fx_traceback.current_meta.get("custom")
        self.annotations.append(None if custom is None else dict(custom))
        if _torch_calls.global_state() != self._before:
            raise BlocksDiffer("the block changes the state of torch")
        return function, user_frame(), self.shown(args), self.shown(kwargs)

    def shown(self, value: Any) -> Any:
        """Return an argument, or a value that the block returns, in a form that can be compared."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.numbers:
                raise BlocksDiffer("a tensor from outside of the block")
            return _Numbered(self.numbers[id(value)])
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.shown, value))
        if isinstance(value, slice):
            return slice, self.shown([value.start, value.stop, value.step])
        if isinstance(value, dict):
            return dict, tuple((key, self.shown(x)) for key, x in value.items())
        if not isinstance(value, _PLAIN):
            raise BlocksDiffer(f"a {type(value).__name__}")
        return type(value), repr(value)

    def add(self, made: torch.Tensor) -> None:
        self.numbers[id(made)] = len(self.tensors)
        self.tensors.append(made)


class _Recording(_BlockCalls):
    """A mode that notes the calls of a block.

    Args:
        operations: Returns the number of operations that were noted up to now.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], operations: Callable[[], int]) -> None:
        super().__init__(tensors)
        self.calls: list[_BlockCall] = []
        self._operations = operations

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        key, before = self.key(function, args, kwargs), self._operations()
        if before != (self.calls[-1].operations if self.calls else 0):
            raise BlocksDiffer("an operation outside of a call")
        made = function(*args, **kwargs)
        name, silent = _name(function), self._operations() == before
        if not isinstance(made, torch.Tensor | list | tuple) and name not in _PROPERTIES:
            raise BlocksDiffer(name)
        if silent and name.endswith("_") and not name.endswith("__"):  # for example `requires_grad_`
            raise BlocksDiffer(name)
        self.calls.append(_BlockCall(key, self._numbered(made), self._operations()))
        return made

    def _numbered(self, made: Any) -> Any:
        """Return the result of a call with `_Numbered` in the place of tensors, which get numbers."""
        if isinstance(made, torch.Tensor):
            if id(made) not in self.numbers:
                self.add(made)
            return _Numbered(self.numbers[id(made)])
        if type(made) in (list, tuple):
            return type(made)(map(self._numbered, made))
        if not isinstance(made, (*_PLAIN, torch.Size)):
            raise BlocksDiffer(f"a {type(made).__name__}")
        return made


class _Matching(_BlockCalls):
    """A mode that compares the calls of a block with the noted calls, and returns tensors of the noted specs.

    Args:
        template: The noted block.
    """

    def __init__(self, template: Template, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._template = template

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        key, at = self.key(function, args, kwargs), len(self.annotations) - 1
        if at >= len(self._template.calls) or key != self._template.calls[at].key:
            raise BlocksDiffer(_name(function))
        return self._result(self._template.calls[at].result)

    def _result(self, noted: Any) -> Any:
        if isinstance(noted, _Numbered):
            while noted.number >= len(self.tensors):
                self.add(self._template.specs[len(self.tensors)].fake())
            return self.tensors[noted.number]
        return type(noted)(map(self._result, noted)) if type(noted) in (list, tuple) else noted


@dataclass(frozen=True)
class Template:
    """A block that was noted alone.

    Attributes:
        notes, digest: Its operations.
        calls: Its calls of functions of torch.
        specs: The specs of its tensors, by their numbers.
        returned: `_BlockCalls.shown` of the value that it returned.
        structure: The value that it returned, with None in the place of the tensor.
        extras: Each forward operation's annotations besides those that were open at its call.
    """

    notes: BlockNotes
    digest: str
    calls: Sequence[_BlockCall]
    specs: Sequence[_torch_calls.FakeSpec]
    returned: Any
    structure: Any
    extras: Sequence[dict[str, Any] | None]


class Blocks:
    """The repeated blocks of a step in one run.

    Args:
        modules: The blocks.
        log: The log of the run (`tracing_run._OperationLog`).
    """

    def __init__(self, modules: Sequence[nn.Module], log: Any) -> None:
        self._modules, self._log = {id(x): x for x in modules}, log
        self._templates: list[tuple[Any, Template]] = []
        self._inside = False

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Within this context, the log gets one entry for each call of a block."""
        original: Any = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or id(module) not in self._modules:
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                return self._call(module, original, args, kwargs)
            except BlocksDiffer:
                self._log.differs = True  # the user's code may catch the error
                raise
            finally:
                self._inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _call(self, block: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        """Run a block, let the log note its operations, and return its result."""
        named = [
            *block.named_parameters(remove_duplicate=False),
            *block.named_buffers(remove_duplicate=False),
        ]
        inputs = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        tensors, before = [*(x for _, x in named), *inputs], _torch_calls.sequence_now()
        _check_inputs(tensors, inputs, (args, *kwargs.values()))
        key = (
            type(block),
            [name for name, _ in named],
            _torch_calls.specs_of(tensors),
            _torch_calls.global_state(),
        )
        template = next((found for other, found in self._templates if other == key), None)
        if template is None:
            template, annotations = self._note(block, run, args, kwargs, len(named))
            self._templates.append((key, template))
        else:
            with (mode := _Matching(template, tensors)):
                returned = run(block, *args, **kwargs)
            _check_plain([*inputs, *_torch.tree_leaves(returned)])
            same = mode.shown(returned) == template.returned and len(mode.annotations) == len(template.calls)
            if mode.differs or not same:
                raise BlocksDiffer("the block returns another value")
            annotations = mode.annotations
        customs: list[dict[str, Any] | None] = []
        for call, opened in zip(template.calls, annotations, strict=True):
            for extra in template.extras[len(customs) : call.operations]:
                customs.append(None if extra is None and opened is None else (opened or {}) | (extra or {}))
        made = self._log.note_block(template, tensors, customs, before)
        return _torch.tree_map(lambda x: made if isinstance(x, torch.Tensor) else x, template.structure)

    def _note(
        self, block: nn.Module, run: Any, args: Any, kwargs: Any, count: int
    ) -> tuple[Template, list[dict[str, Any] | None]]:
        """Run a block alone, on detached inputs. Return it as a template, and the annotations at each call.

        Args:
            count: The number of its parameters and buffers.
        """
        first = _torch_calls.sequence_now()
        with self._log.muted():
            args, kwargs = _torch.tree_map(_detached, (args, kwargs))
            inputs = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            log = self._log.alone(block, inputs)
            with log:
                tensors = log.enter_all(block, inputs)
                with (recording := _Recording(tensors, log.operations)):
                    returned = run(block, *args, **kwargs)
                last, shown = _torch_calls.sequence_now(), recording.shown(returned)
                _check_plain([*inputs, *_torch.tree_leaves(returned)])
                made = [x for x in _torch.tree_leaves(returned) if isinstance(x, torch.Tensor)]
                memory = {_torch.storage_id(x) for x in tensors}
                if len(made) != 1 or made[0].storage_offset() or _torch.storage_id(made[0]) in memory:
                    raise BlocksDiffer("the block does not return one new tensor")
                log.say("returns", made)
                found = log.differentiate(made[0], tensors) if made[0].requires_grad else {}
            if (
                recording.differs
                or (notes := log.notes) is None
                or log.operations() != recording.calls[-1].operations
            ):
                raise BlocksDiffer("the operations do not determine the graph")
        forward, backward = (
            [x for x in noted if isinstance(x, NotedOperation)] for noted in (notes.forward, notes.backward)
        )
        _check([*forward, *backward], tensors, notes.tangent)
        gradients = [found.get(id(x)) for x in tensors]
        structure = _torch.tree_map(lambda x: x, returned)
        template = Template(
            BlockNotes(tensors, forward, backward, made[0], notes.tangent, gradients, first, last),
            log.digest(),
            recording.calls,
            [_torch_calls.FakeSpec.of(x) for x in recording.tensors],
            shown,
            structure,
            _extras(forward, recording),
        )
        return template, recording.annotations


def _detached(x: Any) -> Any:
    """Return a leaf in the place of a tensor. Return any other value unchanged."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _check_inputs(tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], args: Any) -> None:
    """Check that a block can run with copies of its arguments, in the modes that are active now.

    Args:
        tensors: The parameters, buffers and inputs of the block.
        inputs: The tensors in its arguments.
        args: Its arguments.

    Raises:
        BlocksDiffer: It cannot.
    """
    if _torch_calls.has_modes_of_user():
        raise BlocksDiffer("a mode of the user")
    if len({id(x) for x in tensors}) < len(tensors):
        raise BlocksDiffer("a tensor that is two inputs")
    if not _is_fixed(args):
        raise BlocksDiffer("a container that the block may change")
    _check_plain(inputs)


def _is_fixed(value: Any) -> bool:
    """Return whether a copy of an argument has no container that the block may change."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    leaves = _torch.tree_leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def _check_plain(leaves: Sequence[Any]) -> None:
    """Check that tensors do not have attributes of the user, which copies would not have.

    Raises:
        BlocksDiffer: A tensor has such an attribute.
    """
    if any(isinstance(x, torch.Tensor) and _torch_calls.has_attributes_of_user(x) for x in leaves):
        raise BlocksDiffer("an attribute of a tensor")


def _check(
    operations: Sequence[NotedOperation], tensors: Sequence[torch.Tensor], tangent: torch.Tensor | None
) -> None:
    """Check that the operations of a block read only its own tensors, change none that it got, and run no code of
    the user in the backward pass.

    Raises:
        BlocksDiffer: They do not.
    """
    known, memory = {id(x) for x in (*tensors, tangent)}, {_torch.storage_id(x) for x in tensors}
    for noted in operations:
        read = [x for x in _torch.tree_leaves((noted.args, noted.kwargs)) if isinstance(x, torch.Tensor)]
        changed = any(storage in memory for _, storage in noted.changed)
        if changed or noted.function.namespace != "aten" or noted.marks.called:
            raise BlocksDiffer(str(noted.function))
        # Arguments of calls are tensors of the block. So a call or its gradient makes each constant.
        if any(id(x) not in known and not is_constant(x) for x in read):
            raise BlocksDiffer("a tensor from outside of the block")
        known |= {id(x) for x in _torch.tree_leaves(noted.made)}


def _extras(forward: Sequence[NotedOperation], recording: _Recording) -> list[dict[str, Any] | None]:
    """Return the annotations of forward operations besides those that were open at their calls."""
    extras: list[dict[str, Any] | None] = []
    for call, opened in zip(recording.calls, recording.annotations, strict=True):
        for noted in forward[len(extras) : call.operations]:
            custom, before = noted.marks.custom, opened or {}
            if any((custom or {}).get(key, extras) != x for key, x in before.items()):
                raise BlocksDiffer("annotations that a call removes")
            extras.append(
                None if custom is None else {key: x for key, x in custom.items() if key not in before}
            )
    return extras


def _name(function: Any) -> str:
    """Return the name of a function. For the getter of an attribute, return the attribute's name."""
    name = str(getattr(function, "__name__", function))
    return str(getattr(function.__self__, "__name__", name)) if name == "__get__" else name
