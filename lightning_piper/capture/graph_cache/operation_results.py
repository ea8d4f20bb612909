"""Results of operations on tensors without data, from the specs of their arguments.

    aten.addmm(specs of the arguments) --> spec of the result --> new fake tensor

torch takes about ten times as long to find a result, and layers repeat the same operations. torch also keeps results
by these specs, in memory. Piper also keeps them in a file, so that the tracing run of a later process is shorter.

Piper keeps a result only if it is a new tensor, or a view of the first argument. Torch must not know the values of the
tensors. All other operations run as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_piper import cache
from lightning_piper.capture.torch_private import _torch, _torch_calls

MANY = 2048  # the most results that a process keeps
# Types whose values are equal if their type and `repr` are equal.
_PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip
Spec = list[Any]  # shape, strides, offset, dtype, device, whether it is a view


class OperationResults:
    """The known results of operations. A process has one object.

    Args:
        versions: Identifies the versions of all code that decides results.
    """

    def __init__(self, versions: str) -> None:
        self._versions = versions
        # operation with the specs of its arguments -> [type of the result, specs]; None if it must run
        self._known: dict[str, list[Any] | None] = {}
        self._file: Path | None = None
        self._new = False

    def read(self) -> None:
        """Read the results of earlier processes, unless they were read before. Forget all results if a kernel was
        registered since."""
        name = f"{self._versions}\n{_torch_calls.registered_kernels()}"
        file = cache.folder("results") / hashlib.sha256(name.encode()).hexdigest()
        if file != self._file:
            self._file = file
            self._known = json.loads(cache.read(file) or "{}")

    def write(self) -> None:
        """Write the results, if there are new results."""
        if self._new and self._file is not None:
            self._new = False
            cache.write(self._file, json.dumps(self._known, separators=(",", ":")).encode())

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation. Run it only if the result is not known."""
        mode = _torch_calls.mode_of(args)
        key = (
            None
            if mode is None or not _torch_calls.follows_from_specs(function)
            else self._key(function, args, kwargs, mode)
        )
        if key is None:
            return function(*args, **kwargs)
        if key in self._known:
            found = self._known[key]
            return function(*args, **kwargs) if found is None else _made(found, args[0], mode)
        made = function(*args, **kwargs)
        if len(self._known) >= MANY:
            self._known.clear()
        self._known[key], self._new = _described(made, args, mode), True
        return made

    def _key(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> str | None:
        """Return an operation with the specs of its arguments as text. Return None if it has another argument."""
        words = [str(function), str(torch.get_default_dtype()), str(torch.is_grad_enabled())]
        numbers: dict[int, int] = {}  # tensors that are the same, or share memory, have the same number
        try:
            _add_words(words, args, mode, numbers)
            for name, x in kwargs.items():
                words.append(name)
                _add_words(words, (x,), mode, numbers)
        except TypeError:
            return None
        return " ".join(words)


def _add_words(words: list[str], values: Sequence[Any], mode: Any, numbers: dict[int, int]) -> None:
    """Add the words that stand for arguments.

    Raises:
        TypeError: An argument is of another type.
    """
    for x in values:
        if isinstance(x, torch.Tensor):
            if not _torch_calls.has_spec_only(x, mode):
                raise TypeError
            number = numbers.setdefault(_torch.storage_id(x), len(numbers))
            words.append(
                f"%{number}{tuple(x.shape)}{x.stride()}{x.storage_offset()}{x.dtype}{x.device}{x.requires_grad}"
            )
        elif type(x) in (list, tuple):
            words.append(f"{type(x).__name__}{len(x)}")
            _add_words(words, x, mode, numbers)
        elif type(x) in _PLAIN:
            words.append(repr(x))
        else:
            raise TypeError


def _described(made: Any, args: Sequence[Any], mode: Any) -> list[Any] | None:
    """Return a result in the form that JSON can write. Return None if it cannot be made again from this form."""
    results = made if type(made) in (list, tuple) else [made]
    whole = _torch.storage_id(args[0]) if isinstance(args[0], torch.Tensor) else None
    specs: list[Spec] = []
    for x in results:
        if not isinstance(x, torch.Tensor) or not _torch_calls.has_spec_only(x, mode) or x.requires_grad:
            return None
        shape, dtype = (
            [list(x.shape), list(x.stride()), x.storage_offset()],
            str(x.dtype).removeprefix("torch."),
        )
        specs.append([*shape, dtype, str(x.device), _torch.storage_id(x) == whole])
    found = [type(made).__name__ if results is made else "", specs]
    again = _made(found, args[0], mode)
    others = again if type(again) in (list, tuple) else [again]
    fresh = [_torch.storage_id(x) for x, spec in zip(results, specs, strict=True) if not spec[-1]]
    read = {_torch.storage_id(x) for x in _torch.tree_leaves(list(args)) if isinstance(x, torch.Tensor)}
    if len(set(fresh)) < len(fresh) or read & set(fresh):
        return None
    return found if all(map(_torch_calls.are_alike, results, others)) else None


def _made(found: list[Any], whole: Any, mode: Any) -> Any:
    """Return the result from the form that `_described` returned. The first argument is `whole`."""
    kind, specs = found
    made = [
        _torch_calls.fake_of(
            mode,
            shape,
            stride,
            offset,
            getattr(torch, dtype),
            torch.device(device),
            whole if is_view else None,
        )
        for shape, stride, offset, dtype, device, is_view in specs
    ]
    if not kind:
        return made[0]
    return tuple(made) if kind == "tuple" else made
