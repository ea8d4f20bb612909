"""Issues operations into a queue. Their outputs exist immediately, filled with poison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_piper.accelerators._torch_dispatch import schema_of
from lightning_piper.accelerators.conflicts import Note, accesses_of
from lightning_piper.accelerators.memory import StorageBlock, TensorLayout
from lightning_piper.accelerators.queues import QueuedWork
from lightning_piper.errors import ExecutionError

if TYPE_CHECKING:
    from lightning_piper.accelerators.simulated_device import Simulated

# Stands for the specs of an operation that returns a view although its schema does not say so.
_VIEW = object()


class _Kind(NamedTuple):
    """A description of an operation.

    Attributes:
        at_once: Whether the operation computes nothing: it returns a view, or changes the layout of a
            tensor in its memory.
        read: Whether the host waits for the operation, because the result depends on the values of tensors:
            it is a number, or its shape depends on them.
        random: Whether the operation draws random numbers.
        returns: For each result, the name of the argument that is returned as this result; None if the result
            is new.
        changes: Names of the arguments that the operation changes.
        names: Names of the operation's arguments, in order.
    """

    at_once: bool
    read: bool
    random: bool
    returns: tuple[str | None, ...]
    changes: frozenset[str]
    names: tuple[str, ...]

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield each tensor among the arguments of a call of the operation, and whether the operation changes
        it."""
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            yield from ((x, name in self.changes) for x in _tensors([value]))

    def new(self, found: Any) -> list[Any]:
        """Return the new tensors in `found`, the results of a call of the operation."""
        return [
            x
            for x, name in zip(found if len(self.returns) > 1 else (found,), self.returns, strict=True)
            if name is None
        ]


class Issuing:
    """The object that issues a program's operations to one simulated accelerator."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self._kinds: dict[Any, _Kind] = {}
        self._made: dict[Any, Any] = {}  # (operation, its arguments by `_key`) -> the result of `_specs`

    def issue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue an operation, and return its results. `Host.inside` must be set.

        Views run immediately. Operations whose results the host reads run when the current stream is done.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.at_once or _is_meta(kwargs.get("device")):
            return func(*args, **kwargs)
        if kind.read or _chooses(func, args):
            self._simulated.wait_for_current()
            self._simulated.read(str(func), accesses_of(kind.tensors(args, kwargs)))
            return func(*args, **kwargs)
        specs = self._specs(func, args, kwargs, kind) if None in kind.returns else []
        if specs is _VIEW:
            return func(*args, **kwargs)
        touched: list[StorageBlock] = []  # all blocks of memory that the work reads or writes
        given = _mapped(
            (args, kwargs),
            lambda x: self._simulated.of_work(x, touched) if isinstance(x, torch.Tensor) else x,
        )
        graph = self._simulated.host.captured
        if graph is not None and kind.random:
            raise ExecutionError(
                f"{func} draws random numbers during a capture, so each replay would draw the same ones. Leave this "
                "work out of the capture [PIPER-X001]"
            )
        state = torch.get_rng_state() if kind.random else None
        if state is not None:
            _tried(func, args, kwargs)  # advances the generator, so that the program's next draw differs
        into: list[StorageBlock | None] = []
        made = _mapped(
            specs, lambda spec: self._new(spec, into, str(func)) if isinstance(spec, TensorLayout) else spec
        )
        touched += [block for block in into if block is not None]
        queue = self._simulated.host.current.queue
        comes_to = [*kind.tensors(args, kwargs), *((x, True) for x in _tensors(made))]
        accesses = accesses_of(comes_to)

        def run(note: Note) -> None:
            self._run(note, func, kind, given, into, touched, state)

        if graph is not None:
            graph.add(str(func), accesses, run, list(_tensors(made)))
        else:
            note = self._simulated.note(str(func), queue, accesses)
            queue.issue(QueuedWork(str(func), lambda: run(note)))
        return _returned(func, kind, args, kwargs, made)

    def _new(self, spec: TensorLayout, into: list[StorageBlock | None], made: str) -> torch.Tensor:
        """Return a new tensor of poison. Its block of memory, or None, is appended to `into`."""
        tensor, block = self._simulated.memory.new(spec, self._simulated.host.current.queue, made)
        into.append(block)
        return tensor

    def _run(
        self,
        note: Note,
        func: Any,
        kind: _Kind,
        given: Any,
        into: list[StorageBlock | None],
        touched: list[StorageBlock],
        state: torch.Tensor | None,
    ) -> None:
        """Run issued work, and copy its new tensors into the blocks `into`. If the operation fails, add a
        fault.

        The program's random state is the same afterwards, because the work may run at any point of the
        program.

        Args:
            given: The operation's arguments and keyword arguments, with tensors from `Simulated.of_work`.
            touched: The blocks of memory that the work uses.
            state: The random state when the program issued the work; None if it draws no numbers.
        """
        simulated, before = self._simulated, None if state is None else torch.get_rng_state()
        simulated.check(note, touched)
        try:
            if state is not None:
                torch.set_rng_state(state)
            with torch.no_grad():
                found = func(*given[0], **given[1])
            if into:
                for block, x in zip(into, _tensors(kind.new(found)), strict=True):
                    if block is not None:
                        block.storage.copy_(x.untyped_storage())
        except Exception as error:  # for example indexing with poison
            simulated.faults.append(f"{note.what} failed: {error}")
        finally:
            if before is not None:
                torch.set_rng_state(before)

    def _specs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: _Kind) -> Any:
        """Return the specs of an operation's new tensors, found by running it on zeros of the same shapes.

        Return `_VIEW` if its new tensors are views of its arguments. If the operation fails on zeros, wait
        for the current stream and run it on its arguments.
        """
        key = (func, _key(args), _key(kwargs))
        if key not in self._made:
            state = torch.get_rng_state()
            try:
                found, theirs = _tried(func, args, kwargs)
            except Exception:
                # The operation reads values and fails on zeros, so its specs may depend on values.
                self._simulated.wait_for_current()
                with torch.no_grad():
                    return _mapped(kind.new(func(*args, **kwargs)), _spec)
            finally:
                torch.set_rng_state(state)
            new = kind.new(found)
            view = any(x.numel() and x.untyped_storage().data_ptr() in theirs for x in _tensors(new))
            self._made[key] = _VIEW if view else _mapped(new, _spec)
        return self._made[key]


def _kind_of(func: Any) -> _Kind:
    """Return how an operation is issued, according to its schema and tags."""
    schema, tags = schema_of(func), set(func.tags)
    infos = [r.alias_info for r in schema.returns]
    view = bool(infos) and all(info is not None and not info.is_write for info in infos)
    names: list[str | None] = []
    for info in infos:
        same = [
            a.name
            for a in schema.arguments
            if info and a.alias_info and a.alias_info.before_set == info.before_set
        ]
        names.append(same[0] if same else None)
    open_shape = torch.Tag.dynamic_output_shape in tags and func.name() != "aten::index.Tensor"
    read = torch.Tag.data_dependent_output in tags or open_shape
    at_once = view or torch.Tag.inplace_view in tags or func.name().startswith("aten::set_.")
    changes = frozenset(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    arguments = tuple(a.name for a in schema.arguments)
    return _Kind(at_once, read, torch.Tag.nondeterministic_seeded in tags, tuple(names), changes, arguments)


def _is_meta(device: Any) -> bool:
    """Return whether tensors on this device have no data."""
    return device is not None and torch.device(device).type == "meta"


def _chooses(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call indexes by a mask. The size of its result depends on the values of the mask."""
    return func is torch.ops.aten.index.Tensor and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


def _tried(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, set[int]]:
    """Return the results of an operation on zeros of the same shapes, and the addresses of these zeros."""
    theirs: set[int] = set()

    def other(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        like = torch.zeros(size, dtype=x.dtype).as_strided(x.shape, x.stride())
        theirs.add(like.untyped_storage().data_ptr())
        return like

    like = _mapped((args, kwargs), other)
    with torch.no_grad():
        return func(*like[0], **like[1]), theirs


def _spec(x: Any) -> Any:
    return TensorLayout.of(x) if isinstance(x, torch.Tensor) else x


def _returned(func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Any]) -> Any:
    """Return the results of an operation as the operation does: one result, a tuple of them, or None.

    Args:
        made: The results that are new. The other results are arguments of the call.
    """
    new = iter(made)
    names = [a.name for a in schema_of(func).arguments]
    found = [
        next(new) if name is None else kwargs[name] if name in kwargs else args[names.index(name)]
        for name in kind.returns
    ]
    return tuple(found) if len(found) > 1 else found[0] if found else None


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and dicts with `change` applied to each item that is none of these."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(x, change) for x in value)
    if isinstance(value, dict):
        return {name: _mapped(x, change) for name, x in value.items()}
    return change(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for x in value:
        if isinstance(x, torch.Tensor):
            yield x
        elif type(x) in (list, tuple):
            yield from _tensors(x)


def _key(value: Any) -> Any:
    """Return arguments as a key of a dict, with (shape, stride, dtype) instead of tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if type(value) in (list, tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(x)) for name, x in value.items())
    return (type(value), "nan" if isinstance(value, float) and math.isnan(value) else value)
