"""Tells the errors of the user's code from those that are raised only because a step is captured."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import _torch
from lightning_piper.errors import PiperError

# Parts of torch that run only, or otherwise, on tensors without data; those with a leading underscore are added by `_in_machinery`.
_MACHINERY = ("fx", "export", "compiler")
_TORCH = Path(torch.__file__).parent
_MINE = str(Path(__file__).parent.parent) + "/"


def is_own(error: Exception, first: str) -> bool:
    """Would a plain Trainer raise it as well? It was raised in the step, by a `raise` outside of what traces, or by Python itself.

    An error of torch's C++ looks the same whether it is the step's fault or that of tensors without data, so it is not taken for
    the step's own: it is a RuntimeError that no `raise` in Python raised.

    Args:
        error: with its traceback.
        first: name of the function that calls the user's step.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    behind = error.__cause__ or error.__context__
    while behind is not None:
        if isinstance(behind, (PiperError, *_torch.WITHOUT_VALUES)):
            return False  # the user's code has caught what the capture said, and said it in other words
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
    if file.startswith(_MINE):
        return True
    parts = Path(file).relative_to(_TORCH).parts if Path(file).is_relative_to(_TORCH) else ()
    return bool(parts) and (parts[0].startswith("_") or parts[0] in _MACHINERY)


def _raises(frame: TracebackType) -> bool:
    """Does the frame stand in a `raise` (or an `assert`), and not in a call of something that is no Python?"""
    operation = dis.opname[frame.tb_frame.f_code.co_code[frame.tb_lasti]]
    return operation in ("RAISE_VARARGS", "RERAISE")


def where_kept(module: nn.Module, error: BaseException) -> str | None:
    """If the step reads a tensor that the run of it before has kept: where it is.

    A trace runs the step several times, and what is left from one of these runs has no values.
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
    """The ways to tensors of a trace in a Python object."""
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
