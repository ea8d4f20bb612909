"""Distinguish errors of the user's code from errors that occur only because a step is captured."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.torch_private import _torch
from lightning_piper.errors import PiperError

# Sub-packages of torch that run only on fake tensors, or behave differently on fake tensors. `_in_machinery`
# adds the sub-packages with a leading underscore.
_MACHINERY = ("fx", "export", "compiler")
_TORCH = Path(torch.__file__).parent
_MINE = str(Path(__file__).parents[2]) + "/"


def is_own(error: Exception, first: str) -> bool:
    """Return whether a plain Trainer would also raise the error, judged by its traceback.

    Return True if the device ran out of memory. Otherwise return False in these cases, and True in all
    others:

    - The step's code caught an error of the capture before it raised this error.
    - The step was not running, or Piper's function `first` itself raised the error.
    - Code that traces (Piper, or parts of torch) raised the error.
    - It is a RuntimeError that no `raise` or `assert` in Python raised. Errors of torch's C++ look the same
      whether the step or a fake tensor caused them.

    Args:
        error: the error, with its traceback.
        first: name of the function of Piper that calls the user's step.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    behind = error.__cause__ or error.__context__
    while behind is not None:
        if isinstance(behind, (PiperError, *_torch.WITHOUT_VALUES)):
            return False  # the user's code has caught an error of the capture, and has raised another error
        behind = behind.__cause__ or behind.__context__
    frames = list(_frames(error.__traceback__))
    calls = [i for i, frame in enumerate(frames) if _is_step_call(frame, first)]
    if not calls or calls[-1] == len(frames) - 1:
        return False
    last = frames[-1]
    if _in_machinery(last.tb_frame.f_code.co_filename):
        return False
    return not isinstance(error, RuntimeError) or _raises(last)


def _frames(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next


def _is_step_call(frame: TracebackType, first: str) -> bool:
    code = frame.tb_frame.f_code
    return code.co_name == first and code.co_filename.startswith(_MINE)


def _in_machinery(file: str) -> bool:
    """Return whether a file belongs to Piper or to the parts of torch that trace."""
    if file.startswith(_MINE):
        return True
    parts = Path(file).relative_to(_TORCH).parts if Path(file).is_relative_to(_TORCH) else ()
    return bool(parts) and (parts[0].startswith("_") or parts[0] in _MACHINERY)


def _raises(frame: TracebackType) -> bool:
    """Return whether the frame stopped at a `raise` or `assert`, not at a call of a function that is written
    in C or C++."""
    operation = dis.opname[frame.tb_frame.f_code.co_code[frame.tb_lasti]]
    return operation in ("RAISE_VARARGS", "RERAISE")


def where_kept(module: nn.Module, error: BaseException) -> str | None:
    """Return which attribute of the module holds a traced tensor that caused the error, such as
    `self.encoder.cache['h']`.

    A trace runs the step several times. A tensor that the step stores in an attribute in one of these runs
    has no values, and an error occurs if a later run reads it. Return "something outside of the module" if no
    attribute holds a traced tensor. Return None if the error has another cause. If several attributes hold
    traced tensors, the result is the first of them, which need not be the cause.
    """
    if not _torch.is_kept_tensor(error):
        return None
    found = (
        f"self.{path}.{name}{inner}".replace("self..", "self.")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers", "_modules", "_trainer", "_fabric")
        for inner in _tensors_in(value, 3)
    )
    return next(found, "something outside of the module")


def _tensors_in(value: Any, depth: int) -> Iterator[str]:
    """Yield the paths to traced tensors in a Python object, down to `depth` levels: `['h'][0]`, or "" if
    `value` is a traced tensor. Submodules are not searched."""
    if isinstance(value, torch.Tensor):
        if _torch.is_traced(value):
            yield ""
        return
    if depth == 0 or isinstance(value, nn.Module | str | bytes | type):
        return
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"[{key!r}]", x) for key, x in value.items()]
    elif isinstance(value, Sequence):
        inside = [(f"[{i}]", x) for i, x in enumerate(value)]
    else:
        with contextlib.suppress(TypeError):
            inside = [(f".{key}", x) for key, x in vars(value).items()]
    for way, x in inside:
        for rest in _tensors_in(x, depth - 1):
            yield way + rest
