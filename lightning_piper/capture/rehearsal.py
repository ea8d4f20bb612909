"""What a step does, written down without tracing it: it runs once, forward and backward, on tensors without data.

A trace makes a graph of the operations that the step's code calls, and takes a hundred times as long as calling them. So each
operation is noted with its arguments, marks and results, and a digest of these notes stands for the graph: the same operations
on the same tensors, under the same versions, are the same graph. What the code reads in Python decides which operations it calls,
and what it is guarded by is recorded meanwhile, as in a trace. So nothing has to be known of the code itself.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.fx import Graph

from lightning_piper.capture import _torch, _torch_calls
from lightning_piper.capture.calls import Calls, NotPlain
from lightning_piper.capture.source import line_in_backward
from lightning_piper.capture.written import bytes_of, is_constant, name_of

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


class Unknown(Exception):
    """The step does something of which no note can be made."""


def notes_of(step: nn.Module, inputs: Sequence[torch.Tensor], own: torch.device) -> tuple[str, Graph | None]:
    """Run a step once, and return a digest of all that it does; and its graph, where that is what it does (`calls.py`).

    Args:
        step: gives its results, the loss first where it has a backward pass.
        inputs: what it is given besides its parameters and buffers.
        own: the device for which it is traced, whose number says nothing.

    Raises:
        Unknown: something of it cannot be noted. What the step itself raises stays what it is.
    """
    joint = torch.is_grad_enabled()
    notes = _Notes(own, step, inputs, joint)
    gradients: dict[int, torch.Tensor | None] = {}
    with _torch_calls.as_traced(), notes:
        for named in (step.named_parameters, step.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                notes.enter(name, tensor)
        for tensor in inputs:
            notes.enter("input", tensor)
        before = [x.grad for x in step.parameters()]
        with _torch.exporting(), fx_traceback.preserve_node_meta():
            results = step(*inputs)
            if any(x.grad is not was for x, was in zip(step.parameters(), before, strict=True)):
                notes.leave_graph()  # a backward pass of the step's own has put something there, which no graph says
            notes.say("results", results)
            if joint:
                trained = [x for x in step.parameters() if x.requires_grad]
                tangent = notes.goes_back(results)
                found = torch.autograd.grad(results[0], trained, tangent, allow_unused=True)
                notes.say("gradients", found)
                gradients = {id(x): gradient for x, gradient in zip(trained, found, strict=True)}
    return notes.digest(), notes.graph(results, gradients)


class _Notes(_torch.TorchDispatchMode):
    def __init__(self, own: torch.device, step: nn.Module, inputs: Sequence[torch.Tensor], joint: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Calls | None = None
        with contextlib.suppress(NotPlain):
            self._calls = Calls(step, inputs, joint)
        self._own, self._goes_back = own, False
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._storages: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no other one gets its identity

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo notes, of code that it meets meanwhile, that it is never to be compiled

    def digest(self) -> str:
        return self._hash.hexdigest()

    def enter(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor is there before the step."""
        self._numbers.setdefault(id(tensor), len(self._kept))
        self._kept.append(tensor)
        self.say(name, tensor)

    def goes_back(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """The backward pass begins. The gradient of the loss, which stands before the step."""
        loss, self._goes_back = results[0], True
        with _torch.with_data(), loss.fake_mode:  # type: ignore[attr-defined]
            tangent = torch.empty_strided(loss.shape, loss.stride(), dtype=loss.dtype, device=loss.device)
        self.enter("tangent", tangent)
        if self._calls is not None and not any(x.requires_grad for x in results[1:]):
            self._calls.goes_back(loss, tangent)
        else:
            self._calls = None
        return tangent

    def leave_graph(self) -> None:
        """The operations are not all that the step does."""
        self._calls = None

    def graph(self, results: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor | None]) -> Graph | None:
        """The graph, if it is known. `gradients`: as for `Calls.graph`."""
        try:
            return None if self._calls is None else self._calls.graph(results, gradients)
        except NotPlain:
            return None

    def say(self, what: str, about: Any) -> None:
        self._hash.update(f"{what}({','.join(self._shown(about))})\n".encode())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch_calls.only_asks(function):  # about a tensor of which all is noted
            return function(*args, **kwargs)
        called = line_in_backward() if self._goes_back else ""
        self.say(f"{function} {torch.is_grad_enabled()} {fx_traceback.current_meta.get('custom')} {called}", (args, kwargs))
        made = function(*args, **kwargs)
        for x in _torch.tree_leaves(made):
            if isinstance(x, torch.Tensor) and id(x) not in self._numbers:
                self._numbers[id(x)] = len(self._kept)
                self._kept.append(x)
        self.say("gives", made)
        if self._calls is not None:
            try:
                self._calls.note(function, args, kwargs, made)
            except NotPlain:
                self._calls = None
        return made

    def _shown(self, value: Any) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            yield self._tensor(value)
        elif isinstance(value, list | tuple):
            yield f"{type(value).__name__}["
            for x in value:
                yield from self._shown(x)
            yield "]"
        elif isinstance(value, dict):
            for key, x in value.items():
                yield f"{key}="
                yield from self._shown(x)
        elif isinstance(value, torch.device):
            yield name_of(value, self._own)
        elif type(value) in _PLAIN:
            yield repr(value)
        else:
            raise Unknown(f"a {type(value).__name__}")

    def _tensor(self, x: torch.Tensor) -> str:
        number = self._numbers.get(id(x))
        if number is None:
            if not is_constant(x):
                raise Unknown("a tensor that was made elsewhere")
            return f"constant {x.dtype}{tuple(x.shape)}{bytes_of(x)}"
        if x.layout is not torch.strided:
            return f"%{number} {x.layout}"
        address = _torch.storage_id(x)
        storage, device = self._storages.setdefault(address, len(self._storages)), name_of(x.device, self._own)
        return f"%{number} of {storage} {tuple(x.shape)} {x.stride()} {x.storage_offset()} {x.dtype} {device} {x.requires_grad}"
