"""Record the calls of Lightning's `log` and `log_dict` while a step is traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

if TYPE_CHECKING:
    from lightning_piper.capture.tracing.step_trace import TracedStep

Argument = tuple[str, Any]  # name and value


@contextlib.contextmanager
def recording_logs(module: nn.Module, step: TracedStep) -> Iterator[None]:
    """Within this context, calls of Lightning's `log` and `log_dict` with `module` go to `step`. A `log` that the
    user's class defines runs as a part of the step.

    The context replaces both functions in Lightning's class. Lightning's own `log` still runs for another module, or if
    the user's code has read it before. It then raises a `CaptureError`, because it would log tensors without values.
    """

    def log(name: Argument, value: Argument, *others: Argument) -> None:
        step.log(name[1], value[1], dict(others))

    def log_dict(values: Argument, *others: Argument) -> None:
        """Record the result of a metric collection as one value, or each entry of any other dict."""
        if (known := step.metrics.known(values[1])) is not None:
            step.metrics.log(None, known, dict(others), len(step.logs))
            return
        logging: Any = module
        for name, value in values[1].items():
            logging.log(name=name, value=value, **dict(others))

    with contextlib.ExitStack() as stack:
        stack.enter_context(refusing_own_log(module, step.name))
        for record in (log, log_dict):
            if (owner := _library_class(type(module), record.__name__)) is not None:
                recording = _recording(vars(owner)[record.__name__], module, record)
                stack.enter_context(replaced_attribute(owner, record.__name__, recording))
        yield


def refusing_own_log(module: nn.Module, step: str) -> contextlib.AbstractContextManager[None]:
    """Within this context, Lightning's own `log` raises a `CaptureError`, because Piper does not record its value."""

    def refuse(results: Callable[[], Any], own: bool) -> None:
        raise refusal(step, own)

    return replacing_results(module, refuse)


@contextlib.contextmanager
def replacing_results(module: nn.Module, replace: Callable[[Callable[[], Any], bool], Any]) -> Iterator[None]:
    """Within this context, Lightning's own `log` gets another object for the Trainer's collection of logged values.

    Args:
        replace: Returns this object. It gets a function that returns the collection, and whether `log` logs for `module`.
    """
    trainer = type(getattr(module, "_trainer", None))
    results = inspect.getattr_static(trainer, "_results", None)
    if not isinstance(results, property):
        yield
        return
    replaced = functools.partial(_results, results, library_method(type(module), "log"), module, replace)
    with replaced_attribute(trainer, "_results", property(replaced)):
        yield


class RecordedResults:
    """Stands for the Trainer's collection of logged values in Lightning's own `log`.

    Args:
        results: The collection.
        record: Gets the name, the value and the keyword arguments of `log`. Returns whether it has recorded the value.
            If not, the collection gets it.
    """

    def __init__(self, results: Any, record: Callable[[str, Any, Mapping[str, Any]], bool]) -> None:
        self.reset, self._log, self._record = results.reset, results.log, record

    def log(self, hook: str, name: str, value: Any, **kwargs: Any) -> None:
        given = {key: x for key, x in kwargs.items() if key not in ("sync_dist_fn", "metric_attribute")}
        if not self._record(name, value, given):
            self._log(hook, name, value, **kwargs)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor with one number."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def refusal(step: str, own: bool) -> CaptureError:
    """Return the error for a call of Lightning's own `log`.

    Args:
        own: Whether it logs for the module of the step.
    """
    how = "the log method of another LightningModule"
    if own:
        how = "a log method that was read before the step, such as self.log in __init__ or a class attribute"
    return CaptureError(
        f"{user_line()}: {step} calls {how}. A captured step records only calls of its own self.log and "
        "self.log_dict. Call self.log(...) in the step [PIPER-C007]"
    )


def library_method(cls: type, name: str) -> Any:
    """Return Lightning's method, even if the user's class overrides it. Return None if no class defines it."""
    owner = _library_class(cls, name)
    return None if owner is None else vars(owner)[name]


def _library_class(cls: type, name: str) -> type | None:
    """Return the last of a class and its bases that defines `name`."""
    return next((base for base in reversed(cls.__mro__) if name in vars(base)), None)


def _recording(own: Callable[..., Any], module: nn.Module, record: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that passes (name, value) of each argument of a call with `module` to `record`. A call with
    another module runs `own`."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return own(self, *args, **kwargs)
        return record(*[*signature.bind(self, *args, **kwargs).arguments.items()][1:])

    return call


def _results(
    own: property,
    log: Any,
    module: nn.Module,
    replace: Callable[[Callable[[], Any], bool], Any],
    trainer: Any,
) -> Any:
    """Return the Trainer's collection of logged values, or for Lightning's `log` the result of `replace`."""
    caller, found = sys._getframe(1), functools.partial(own.__get__, trainer)
    while caller.f_globals["__name__"].startswith("lightning_piper.") and caller.f_back is not None:
        caller = caller.f_back  # Piper watches reads of the Trainer
    if caller.f_code is not getattr(log, "__code__", None):
        return found()
    return replace(found, caller.f_locals.get("self") is module)
