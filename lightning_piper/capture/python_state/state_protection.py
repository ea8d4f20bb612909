"""Protect the module's Python state during a trace: raise an error for a step that changes this state, and
undo the changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_piper.capture.proxies.arrays import converted
from lightning_piper.capture.proxies.deferred_numbers import call, is_deferred
from lightning_piper.capture.proxies.shared_memory import check_shared_memory, returned_argument
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.source import marking_line
from lightning_piper.common.user_lines import member, user_frame, user_line
from lightning_piper.errors import CaptureError

_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict, set)
_ABSENT = object()  # form of an attribute that does not exist
_COMPARED = (type(None), bool, int, float, str, torch.Tensor)
T = TypeVar("T")
# (path of the module or a submodule, this module, name of the attribute, its value, form of the value). Two
# equal forms mean an unchanged value.
Attribute = tuple[str, nn.Module, str, Any, Any]


def attributes(module: nn.Module) -> list[Attribute]:
    """Return the attributes of the module and its submodules. Parameters and buffers are among them.
    Submodules, and attributes for the own use of torch, such as hooks, are not.

    Lists, dicts, sets, numbers, texts and None are compared by content, and other values by identity. A parameter is
    also compared by `requires_grad` and whether it has gradient hooks."""
    found: list[Attribute] = []
    for path, part in module.named_modules():
        skipped = {"_parameters", "_buffers", "_modules", "training"} | _torch.recomputed(part)
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items():
            if name in skipped or name.startswith(("_forward", "_backward")):
                continue
            # A counter ignores the order, because the order of a set may change when the set is filled again.
            form: Any
            kind = type(value)  # `isinstance` does not see that a placeholder replaces a list
            if kind in weakref.ProxyTypes:  # the object may no longer exist
                form = id(value)
            elif issubclass(kind, set):
                form = Counter(_entry(x) for x in value)
            elif issubclass(kind, list | deque):
                form = [_entry(x) for x in value]
            elif issubclass(kind, dict):
                form = [(k, _entry(v)) for k, v in value.items()]
            elif isinstance(value, nn.Parameter):
                form = (id(value), value.requires_grad, _torch.has_gradient_hooks(value))
            elif is_deferred(value) or isinstance(value, torch.Tensor):
                form = id(value)
            elif isinstance(value, _COMPARED):
                form = value
            else:
                form = ("object", id(value))
            found.append((path, part, name, value, form))
    return found


def _entry(value: Any) -> Any:
    """Return the form of a container's entry: the value for numbers, texts and None, and the class for other
    objects. All tensors are equal, because torch's RNNs replace the tensors in the lists of their weights."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if is_deferred(value):
        return type(value)
    return value if isinstance(value, _COMPARED) else type(value)


def check_unchanged(module: nn.Module, before: list[Attribute], step: str) -> None:
    """Check that the step has not set, changed or removed an attribute in `attributes(module)` since
    `before`.

    Args:
        before: the result of `attributes` from before the step.
        step: the name of the step.

    Raises:
        CaptureError: an attribute has changed. The message names it.
    """
    known = {(id(part), name): (value, form) for _, part, name, value, form in before}
    ids = {
        id(value)
        for _, _, _, value, _ in before
        if type(value) not in weakref.ProxyTypes and isinstance(value, _CONTAINERS)
    }
    now = attributes(module)
    names = {(id(part), name) for _, part, name, _, _ in now}
    parts = {id(part) for _, part, *_ in before}
    created = next((path for path, part, *_ in now if id(part) not in parts), None)
    if created is not None:
        raise CaptureError(
            f"{step} creates the submodule {member(created)}, but a captured step has only the submodules from before "
            "the step. Create it in __init__ [PIPER-C003]"
        )
    for path, part, name, _, _ in before:
        if (id(part), name) not in names:
            raise changes(step, member(f"{path}.{name}" if path else name))
    for path, part, name, value, form in now:
        was, old = known.get((id(part), name), (None, _ABSENT))
        shared = value is not was and id(value) in ids  # `self.a = self.b`, which may have equal content
        if (form is old or form == old) and not shared:  # `is`, because a NaN is not equal to itself
            continue
        where = member(f"{path}.{name}" if path else name)
        if old is _ABSENT and isinstance(getattr(type(part), name, None), functools.cached_property):
            raise CaptureError(
                f"{step} computes the cached property {where} for the first time, and so sets an attribute, which a "
                "captured step would not do again. Read it once before, in __init__ or on_fit_start [PIPER-C003]"
            )
        if name in part._parameters and was is None:
            raise CaptureError(
                f"{step} creates the parameter {where}, but a captured step has only the parameters from before the "
                "step. Create it in __init__ [PIPER-C003]"
            )
        if name in part._parameters and value is was:
            raise CaptureError(
                f"{step} changes requires_grad of the parameter {where}, or registers a gradient hook on it, but later "
                "steps would not repeat this. Do it in a hook, such as on_train_batch_start [PIPER-C003]"
            )
        if name in part._parameters:
            raise CaptureError(
                f"{step} replaces the parameter {where}, but in a captured step only the optimizer changes parameters. "
                "Change its values in place in a hook, such as on_train_batch_start [PIPER-C003]"
            )
        if name in part._buffers:
            alike = [x.shape for x in (was, value) if isinstance(x, torch.Tensor)] == [
                getattr(value, "shape", None)
            ] * 2
            fix = "Write" if alike else "Register it as a tensor of its final shape, and write"
            raise CaptureError(
                f"{step} replaces the buffer {where}, but a captured step keeps its buffers. {fix} into the buffer "
                f"instead: {where}.copy_(...) [PIPER-C003]"
            )
        raise changes(step, where)


def changes(step: str, where: str) -> CaptureError:
    """Return the error for a step that changes Python state.

    Args:
        step: the name of the step.
        where: the expression that a user would write for the state, such as "self.count".
    """
    phase = step.removesuffix("_step").replace("training", "train")
    return CaptureError(
        f"{step} changes {where}. Python code runs only while the step is captured, so later steps would not "
        f"repeat the change. Change it in a hook, such as on_{phase}_batch_end. If it is a tensor that the step computes, "
        "write it into a buffer instead (register_buffer, copy_) [PIPER-C003]"
    )


def preserving_tensors(module: nn.Module, run: Callable[[], T]) -> T:
    """Return the result of `run`. Afterwards put the same tensors back as the module's parameters and buffers,
    because a tracer replaces tensors that have two names. Their values are not restored."""
    kept = [(store, dict(store)) for part in module.modules() for store in (part._parameters, part._buffers)]
    try:
        return run()
    finally:
        for store, tensors in kept:
            store.update(tensors)  # type: ignore[arg-type]


@contextlib.contextmanager
def restoring_attributes(module: nn.Module) -> Iterator[None]:
    """At the end of this context, undo changes of the Python attributes of the module and its submodules, and
    of lists, deques, dicts and sets in these attributes, so that no fake tensor remains."""
    kept = [(vars(part), dict(vars(part))) for part in module.modules()]
    containers: dict[int, Any] = {}
    waiting = [x for _, entries in kept for x in entries.values()]
    while waiting:
        value = waiting.pop()
        if type(value) in _CONTAINERS and id(value) not in containers:
            containers[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    contents = [(value, copy.copy(value)) for value in containers.values()]
    try:
        yield
    finally:
        for current, entries in kept:
            current.clear()
            current.update(entries)
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)


class RefusalMode(TorchFunctionMode):
    """A mode that marks each operation with the user's line that calls it, and that raises a `CaptureError`
    for calls that a captured step could not repeat.

    These calls read the gradient of a parameter or buffer, write to its `data`, or pass a generator
    (`generator=`). All other calls accept deferred numbers and arrays of the batch.

    Args:
        module, step: the module, and the name of its step.
    """

    def __init__(self, module: nn.Module, step: str) -> None:
        super().__init__()
        self._step = step
        self._names = {id(x): name for name, x in [*module.named_parameters(), *module.named_buffers()]}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raise the error for a call that is not allowed. Otherwise return the result of the call."""
        kwargs = kwargs or {}
        name = self._names.get(id(args[0])) if args else None
        attribute = getattr(function, "__self__", None)
        if name is not None and attribute is torch.Tensor.grad and function.__name__ == "__get__":
            raise CaptureError(
                f"{user_line()}: {self._step} reads the gradient of {name}, which belongs to the previous "
                "step. Read gradients in a hook, such as on_before_optimizer_step [PIPER-C004]"
            )
        if name is not None and attribute is torch.Tensor.data and function.__name__ == "__set__":
            raise CaptureError(
                f"{user_line()}: {self._step} replaces the values of {name}. A captured step would do this "
                "only once, while Piper captures it. Do it in a hook, such as on_train_batch_start. "
                "If the program shards the parameter, change the shards in trainer.optimizers[0].param_groups there "
                "[PIPER-C003]"
            )
        generator = kwargs.get("generator")
        if generator is torch.default_generator:  # torch's own functions pass it, such as `random_split`
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        elif isinstance(generator, torch.Generator):
            raise CaptureError(
                f"{user_line()}: {self._step} draws from its own torch.Generator, but a captured step draws "
                "from the step's seed. Leave generator= out [PIPER-C005]"
            )
        check_shared_memory(function, self._step)
        with marking_line(user_frame()):
            found = converted(function, args, kwargs)
            made = call(function, args, kwargs) if found is None else found
        argument = returned_argument(function, args, kwargs)
        return made if argument is None else argument
