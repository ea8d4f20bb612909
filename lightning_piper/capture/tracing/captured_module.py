"""Contexts in which a step is traced: Piper records `self.log`, watches reads of `self.trainer`, and replaces
parameters and buffers by fake tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_piper.capture.metrics.metric_objects import intercepting_calls
from lightning_piper.capture.proxies.batch_changes import own_attributes
from lightning_piper.capture.proxies.proxy_classes import STANDS_FOR
from lightning_piper.capture.python_state.name_scan import is_users
from lightning_piper.capture.python_state.state_protection import changes
from lightning_piper.capture.python_state.state_recorder import is_library
from lightning_piper.capture.python_state.trainer_proxy import ObjectReads
from lightning_piper.capture.torch_private._torch_calls import fake_like
from lightning_piper.capture.tracing.recorded_logs import recording_logs
from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute

if TYPE_CHECKING:
    from lightning_piper.capture.tracing.step_trace import TracedStep

_OWN_CLASS = vars(object)["__class__"].__set__  # sets the class of an object whose class defines `__class__`


@contextlib.contextmanager
def as_captured(module: nn.Module, step: TracedStep) -> Iterator[None]:
    """Within this context, a subclass replaces the class of the module. Reads of `trainer` are watched. Calls of
    `self.log` go to `step`, and calls of metric objects to `step.metrics`.

    Raises:
        CaptureError: the step has set a new attribute of the module's class. Raised at the end.
    """
    cls = type(module)
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__class__": property(lambda self: cls, _OWN_CLASS),
        STANDS_FOR: cls,
    }
    stand_in = type(cls.__name__, (cls,), members)
    before = set(vars(stand_in))
    module.__class__ = stand_in
    try:
        with (
            _watching_trainer(cls, step),
            recording_logs(module, step),
            intercepting_calls(
                module, lambda metric, name, *given: step.metrics.call(metric, name, len(step.logs), *given)
            ),
        ):
            yield
    finally:
        module.__class__ = cls
    if written := set(vars(stand_in)) - before:
        raise changes(step.name, f"{cls.__name__}.{min(written)}")


@contextlib.contextmanager
def _watching_trainer(cls: type, step: TracedStep) -> Iterator[None]:
    """Within this context, the step's reads of the Trainer become inputs and guards, if the step records its reads.

    The context replaces the property `trainer` of Lightning's class, so that submodules that are LightningModules count
    as well. It also watches reads by the user's code from a Trainer that another object has, such as a callback.
    """
    attached, reads = getattr(cls, "trainer", None), step.reads
    own: Any = getattr(step.module, "_trainer", None)
    kind: Any = type(own)
    read, write = kind.__getattribute__, kind.__setattr__
    if reads is None or not isinstance(attached, property) or attached.fget is None:
        yield
        return
    get = attached.fget

    def watched(self: nn.Module) -> Any:
        trainer = ObjectReads(reads.inputs, lambda: get(self), "self.trainer", step.name, step.check_read)
        return trainer.proxy(get(self))

    def attribute(self: Any, name: str) -> Any:
        if self is own and is_users(sys._getframe(1).f_code):
            return getattr(watched(step.module), name)
        return read(self, name)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if self is own and is_users(sys._getframe(1).f_code):
            setattr(watched(step.module), name, value)  # raises an error
        write(self, name, value)

    members = {"trainer": property(watched, attached.fset)} | _loggers_of_trainer(cls)
    with contextlib.ExitStack() as stack:
        for name, member in members.items():
            owner = next(base for base in cls.__mro__ if name in vars(base))
            stack.enter_context(replaced_attribute(owner, name, member))
        if own is not None:
            stack.enter_context(replaced_attribute(kind, "__getattribute__", attribute))
            stack.enter_context(replaced_attribute(kind, "__setattr__", set_attribute))
        yield


def _loggers_of_trainer(cls: type) -> dict[str, Any]:
    """Return properties that read Lightning's `logger` and `loggers` from the watched Trainer, so that Piper
    refuses a step that calls a logger. A property that the user's class defines is not replaced."""

    def through_trainer(name: str, own: property) -> property:
        assert own.fget is not None
        get = own.fget
        return property(
            lambda self: get(self) if getattr(self, "_trainer", None) is None else getattr(self.trainer, name)
        )

    found = {name: getattr(cls, name, None) for name in ("logger", "loggers")}
    return {
        name: through_trainer(name, own)
        for name, own in found.items()
        if isinstance(own, property) and own.fget is not None and is_library(own.fget.__module__)
    }


@contextlib.contextmanager
def without_data(
    module: nn.Module, mode: Any, device: torch.device, parts: Mapping[str, int], step: str
) -> Iterator[None]:
    """Within this context, replace parameters and buffers by fake tensors on `device`, so that the trace
    neither reads nor changes the user's values.

    A parameter in `parts` gets the shape of one part along its first dimension.

    Raises:
        CaptureError: the step has set or removed a Python attribute of a parameter or buffer. Raised at the end.
    """
    divided = {
        id(x): parts[name] for name, x in module.named_parameters(remove_duplicate=False) if name in parts
    }

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor in the place of a parameter or buffer, with its Python attributes."""
        shape = list(tensor.shape)
        if id(tensor) in divided:
            shape[0] //= divided[id(tensor)]
        made = fake_like(tensor, shape, mode, device)
        vars(made).update(own_attributes(tensor))
        return made

    with replacing_tensors(module, fake):
        named = [*module.named_parameters(), *module.named_buffers()]
        before = [own_attributes(x) for _, x in named]
        yield
        for (name, x), was in zip(named, before, strict=True):
            now = own_attributes(x)
            changed = next(
                (key for key in now.keys() | was.keys() if now.get(key, was) is not was.get(key, was)), None
            )
            if changed is not None:
                raise changes(step, f"self.{name}.{changed}")


@contextlib.contextmanager
def replacing_tensors(module: nn.Module, other: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within this context, put `other(tensor)` in the place of every parameter and buffer. A tensor with
    several names gets one replacement.

    `torch.func.functional_call` would not do: it works by names, and does not restore a module that is
    registered under two names.
    """
    kept = [
        (store, name, x)
        for m in module.modules()
        for store in (m._parameters, m._buffers)
        for name, x in store.items()
        if x is not None
    ]
    replacements = {id(x): x for _, _, x in kept}
    replacements = {key: other(x) for key, x in replacements.items()}
    try:
        for store, name, tensor in kept:
            store[name] = replacements[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for store, name, tensor in kept:
            store[name] = tensor  # type: ignore[assignment]
