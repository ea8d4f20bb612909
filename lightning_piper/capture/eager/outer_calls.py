"""Find the module calls that a step's own code makes. A call that a called module makes does not count.

If Piper cannot capture a step as a whole, it can still capture the module calls in which regions are
annotated (`partial_step`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_piper.annotate import opened
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.caught_refusals import recording_refusals

# (name of a module, number of calls of this module that the step's own code made before). The second call of
# `self.encoder` is `("encoder", 1)`.
Key = tuple[str, int]


@dataclass(frozen=True)
class ModuleCall:
    """One finished call of a module by the step's own code.

    Attributes:
        key: identifies the call.
        tags, marks: How often the call has entered an annotation, and how often it has called a repeated
            block.
        has: All names of the parameters and buffers of the called module. If the step's module itself was
            called, names of the parameters and buffers that the call read.
        handed_on: Whether the result has tensors, and in the traced part of the step only other annotated calls
            read them. An annotated call is one with `tags` or `marks`. Only `ModuleCallLog.captured`
            sets this; otherwise it is False.
    """

    key: Key
    tags: int
    marks: int
    has: frozenset[str]
    handed_on: bool = False


def replacing_outermost(
    module: nn.Module, handle: Callable[[Key, Callable[[], Any], tuple[Any, ...], Mapping[str, Any]], Any]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `handle` replaces each outermost call of `module` or of one of its submodules.

    A call that a called module makes is not outermost, and runs as usual. The context replaces
    `nn.Module.__call__` in the whole process. It can be entered once, because it counts the calls.

    Args:
        handle: called with (key, call, args, kwargs), where `call()` makes the original call. The caller of
            the module gets the result of `handle`.
    """
    names = {id(part): name for name, part in module.named_modules()}
    turns: dict[str, int] = {}  # name of a module -> number of its outermost calls so far
    depth = 0

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Pass an outermost call to `handle`. Make any other call."""
        nonlocal depth
        name = names.get(id(self))
        if depth or name is None:
            return original(self, *args, **kwargs)
        key = name, turns.get(name, 0)
        turns[name] = key[1] + 1
        depth += 1
        try:
            return handle(key, lambda: original(self, *args, **kwargs), args, kwargs)
        finally:
            depth -= 1

    original: Any = nn.Module.__call__

    @contextlib.contextmanager
    def standing() -> Iterator[None]:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    return standing()


@dataclass
class ModuleCallLog:
    """A log of the module calls that a step's own code has made. `following` fills it, and `captured` chooses
    the calls that Piper captures.

    Attributes:
        calls: the finished calls, in order. `handed_on` is False in all of them.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    _made: list[list[torch.Tensor]] = field(default_factory=list)  # the tensors that each call returned
    # Ids of the tensors that torch functions outside of annotated calls received.
    _read: set[int] = field(default_factory=set)
    # Ids of the tensors that annotated calls received as arguments.
    _handed: set[int] = field(default_factory=set)

    @property
    def captured(self) -> list[ModuleCall]:
        """The calls that Piper captures, in order: the calls with annotations or, if no call has any, the calls
        with repeated blocks. Empty if no call has either."""
        tagged = any(call.tags for call in self.calls)
        found = []
        for call, made in zip(self.calls, self._made, strict=True):
            if call.tags if tagged else call.marks:
                handed_on = bool(made) and all(
                    id(x) in self._handed and id(x) not in self._read for x in made
                )
                found.append(ModuleCall(call.key, call.tags, call.marks, call.has, handed_on))
        return found

    @contextlib.contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Within this context, record the module calls of the step's code. Earlier records are dropped.

        A call that raises an error is not recorded. After the step's code has caught an error of the trace,
        no more calls are recorded.
        """
        self.calls, self._made, self._read, self._handed = [], [], set(), set()
        reads = _ReadTensors()

        def handle(
            key: Key, call: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> Any:
            """Make the call, and record it with its annotations and with the tensors that it has read."""
            before, outside = (opened().tags, opened().marks), reads.found
            reads.found = set()
            try:
                made = call()
            except BaseException:  # the step's code may catch the error
                reads.found |= outside
                raise
            # If the step's code has caught an error of the trace, it may now run code that does not run on a device.
            if next(caught(), None) is not None:
                reads.found |= outside
                return made
            tags, marks = opened().tags - before[0], opened().marks - before[1]
            state = [
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ]
            has = frozenset(
                name
                for name, x in state
                if (name.startswith(f"{key[0]}.") if key[0] else id(x) in reads.found)
            )
            if tags or marks:
                self._handed |= _ids((args, kwargs))
                reads.found = outside
            else:
                reads.found |= outside
            self.calls.append(ModuleCall(key, tags, marks, has))
            self._made.append([x for x in _torch.tree_flatten(made)[0] if isinstance(x, torch.Tensor)])
            return made

        try:
            with recording_refusals() as caught, replacing_outermost(module, handle), reads:
                yield
        finally:
            self._read = reads.found


class _ReadTensors(TorchFunctionMode):
    """A mode that adds to `found` the ids of the tensors that torch functions receive. Attribute getters do
    not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # a getter reads an attribute, such as the shape
            self.found |= _ids((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _ids(nested: Any) -> set[int]:
    """Return the ids of the tensors in nested values."""
    return {id(x) for x in _torch.tree_flatten(nested)[0] if isinstance(x, torch.Tensor)}
