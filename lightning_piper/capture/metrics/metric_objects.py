"""Metric objects in a step: the trace records their calls, and the graph outputs their tensor arguments.

A metric object is a submodule with `update`, `compute` and `reset`, like the metrics of torchmetrics. A
metric object is not traced, because it computes with values and keeps state. During the trace, a subclass
replaces the object's class. The methods of this subclass record their calls, and return placeholders for
results. After the step has run, Piper repeats the calls on the object itself (`session/metric_objects.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Node
from torchmetrics import Metric, MetricCollection

from lightning_piper.capture.metrics.sample_dicts import stack_dicts
from lightning_piper.capture.proxies.batch import flatten
from lightning_piper.capture.proxies.metric_values import MetricValueProxy
from lightning_piper.capture.proxies.proxy_classes import STANDS_FOR
from lightning_piper.capture.user_code.replaced_attribute import checked_calls
from lightning_piper.common.limits import kind_of, shown
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError, PiperError
from lightning_piper.ir.metric_calls import Later, MetricCall, MetricCalls, MetricLog, MetricResult
from lightning_piper.ir.regions import Output
from lightning_piper.ir.values import Kind

aten = torch.ops.aten
METHODS = ("forward", "update", "compute", "reset")  # methods of a metric object whose calls are recorded
_LINKING = ("items", "values", "__getitem__")  # methods of a MetricCollection that return its metrics
# arguments of `self.log` that Piper leaves out when it repeats a log
NOT_REPEATED = ("sync_dist", "sync_dist_group", "enable_graph")


def is_metric_object(part: nn.Module) -> bool:
    """Return whether a submodule is a metric object, which is updated and computed outside of the graph.

    A submodule that is neither a metric nor a metric collection of torchmetrics is a metric object only if it
    has no parameters and buffers, because the graph contains parameters and buffers.
    """
    if not all(callable(getattr(type(part), name, None)) for name in METHODS[1:]):
        return False
    known = hasattr(type(part), "add_state") or hasattr(type(part), "compute_groups")
    return known or not [*part.parameters(), *part.buffers()]


def metric_objects(module: nn.Module) -> dict[str, nn.Module]:
    """Return name -> metric object for all metric objects among a module's submodules, at any depth. The module
    itself does not count."""
    return {name: part for name, part in module.named_modules() if name and is_metric_object(part)}


def object_of(argument: str) -> str:
    """Return the name of the metric object that receives an argument. `argument` is the argument's name: the
    name of the object and a number. The object of `"acc 3"` is `"acc"`."""
    return argument.rpartition(" ")[0]


class MetricRecorder:
    """A recorder of the calls and logs of metric objects while a step is traced.

    Args:
        module: has the metric objects.
        step: name of the step in errors.

    Attributes:
        tensors: copies of the tensor arguments of all calls.
    """

    def __init__(self, module: nn.Module, step: str) -> None:
        self._step = step
        self._names = {id(part): name for name, part in metric_objects(module).items()}
        self.clear()

    def clear(self, samples: int = 0) -> None:
        """Forget all calls, and prepare for a batch of this number of samples."""
        self._samples = samples
        self._events: list[MetricCall | MetricLog] = []
        self._calls = 0  # number of recorded calls
        self._used: set[int] = set()  # numbers of the calls whose results the step itself uses
        self._tensor_names: list[str] = []  # for each of `tensors`; see `object_of`
        self.tensors: list[torch.Tensor] = []

    @property
    def outputs(self) -> Iterator[Output]:
        """The entries of `tensors` as outputs of the step."""
        return (Output(Kind.ARGUMENT, (name,)) for name in self._tensor_names)

    @property
    def made(self) -> MetricCalls:
        """All recorded calls and logs. The fields `terms` and `whole` of the result are not set."""
        return MetricCalls(tuple(self._events), used=frozenset(self._used))

    def call(self, metric: nn.Module, method: str, after: int, args: Any, kwargs: Any) -> Any:
        """Record a call of a metric object.

        Args:
            method: one of `METHODS`, or `values` for an access to the metrics of a collection.
            after: see `MetricCall`.
            args, kwargs: the arguments of the call.

        Returns:
            A placeholder for the result of `forward` or `compute`. For a metric collection, it is a dict of
                placeholders. None for any other method.

        Raises:
            CaptureError: an argument holds a value that a captured step does not support.
        """
        name = self._names[id(metric)]
        args = tuple(stack_dicts(x, self._samples) for x in args)
        kwargs = {key: stack_dicts(x, self._samples) for key, x in kwargs.items()}
        leaves, spec = flatten((args, kwargs), f"call of self.{name}")
        names = tuple(f"{name} {len(self.tensors) + i}" for i in range(len(leaves)))  # see `object_of`
        # Clone the tensors, because the step may write into them later.
        self.tensors += [x.detach().clone() for x in leaves]
        self._tensor_names += names
        self.use(spec.computed)
        self._events.append(MetricCall(name, method, spec.rebuild, names, after, user_line(), spec.entries))
        computed = MetricResult(self._calls)
        self._calls += 1
        if method not in ("forward", "compute"):
            return None
        value = MetricValueProxy(computed, self._refuse)
        if not isinstance(metric, MetricCollection):
            return value
        return MetricResults(value, map(str, metric.keys(keep_base=False)), partial(self._refuse_key, name))

    def known(self, value: Any) -> str | Later | None:
        """Return the name of a metric object if `value` is that object, or a description of the result if
        `value` is the placeholder of a result. Return None for any other value, and for a dict of results that
        the step has changed."""
        if isinstance(value, MetricValueProxy):
            return value.computed
        if isinstance(value, MetricResults):
            return value.whole.computed if value.untouched else None
        return self._names.get(id(value)) if isinstance(value, nn.Module) else None

    def log(self, name: str | None, value: str | Later, kwargs: Mapping[str, Any], after: int) -> None:
        """Record a `self.log` of a value for which `known` returned `value`. If `name` is None, record a
        `self.log_dict`."""
        # Lightning ignores `batch_size` if `value` is a metric object. When Piper repeats the log, the
        # default of `batch_size` is the size of the whole batch.
        needless = isinstance(value, str) or kwargs.get("batch_size") == self._samples
        kept = {
            k: x for k, x in kwargs.items() if k not in NOT_REPEATED and not (k == "batch_size" and needless)
        }
        self._events.append(MetricLog(name, value, kept, after))
        self.use([value] if isinstance(value, Later) else [])

    def use(self, computed: Iterable[Later]) -> None:
        """Mark the calls whose results the step itself uses."""
        self._used.update(*(x.calls for x in computed))

    def logged(self, name: str) -> bool:
        return any(isinstance(event, MetricLog) and event.name == name for event in self._events)

    def _refuse(self, computed: Later) -> NoReturn:
        calls = [event for event in self._events if isinstance(event, MetricCall)]
        returned = "" if self._step == "training_step" else " or return it"
        raise CaptureError(
            f"{user_line()}: {self._step} computes with the result of "
            f"self.{calls[min(computed.calls)].metric}, which is not known before the step has run. Log it "
            f"(self.log, self.log_dict){returned}, either unchanged or after arithmetic with numbers. To "
            "compute with a tensor, use the metric's function (torchmetrics.functional) [PIPER-C008]"
        )

    def _refuse_key(self, name: str, key: object, known: Iterable[str]) -> NoReturn:
        raise CaptureError(
            f"{user_line()}: {self._step} asks for the key {shown(key)} in the result of self.{name}. Before the step has "
            f"run, only the keys of its metrics are known: {', '.join(known)}. A metric that returns a dict has other "
            "keys. Log the whole result (self.log_dict), or call such a metric outside of the collection [PIPER-C008]"
        )


class MetricResults(dict[str, Any]):
    """A dict of placeholders for the results of a metric collection, one for each metric. A metric that returns a dict
    gives the real result other keys, so the step may not ask for a key that this dict does not have.

    Args:
        whole: the placeholder for the whole dict.
        keys: the keys of the metrics.
        refuse: raises the error for an unknown key, from this key and the known keys.

    Attributes:
        whole: the placeholder for the whole dict.
        untouched: whether the step has not changed the dict.
    """

    def __init__(
        self,
        whole: MetricValueProxy,
        keys: Iterable[str],
        refuse: Callable[[object, Iterable[str]], NoReturn],
    ) -> None:
        super().__init__({key: whole[key] for key in keys})
        self.whole, self._refuse = whole, refuse
        self._made = dict(self)

    def __missing__(self, key: object) -> NoReturn:
        self._refuse(key, self._made)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._refuse(key, self._made)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    @property
    def untouched(self) -> bool:
        return self.keys() == self._made.keys() and all(self[key] is x for key, x in self._made.items())


@contextlib.contextmanager
def intercepting_calls(module: nn.Module, call: Callable[[nn.Module, str, Any, Any], Any]) -> Iterator[None]:
    """Within this context, each call of a metric object's method runs `call` instead, with the object, the
    method's name, and the positional and keyword arguments."""
    found = [(part, type(part)) for part in metric_objects(module).values()]
    classes = {kind: _noting(kind, call) for _, kind in found}
    for part, kind in found:
        part.__class__ = classes[kind]
    try:
        yield
    finally:
        for part, kind in found:
            part.__class__ = kind


def _noting(kind: type[nn.Module], call: Callable[[nn.Module, str, Any, Any], Any]) -> type[nn.Module]:
    """Return a subclass of `kind` whose methods pass their calls to `call`."""

    def method(name: str, metric: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(metric, name, args, kwargs)

    members: dict[str, Any] = {
        "__call__": lambda self, *args, **kwargs: method("forward", self, *args, **kwargs)
    }
    # These members are properties, because torchmetrics sets the methods as instance attributes, and a
    # property takes precedence.
    members |= {name: property(partial(partial, method, name)) for name in METHODS}
    if hasattr(kind, "compute_groups"):
        members |= {name: _linking(getattr(kind, name), call) for name in _LINKING}
    return type(kind.__name__, (kind,), members | {"__module__": kind.__module__, STANDS_FOR: kind})


def _linking(own: Callable[..., Any], call: Callable[[nn.Module, str, Any, Any], Any]) -> Callable[..., Any]:
    """Wrap a method that gives access to the metrics of a collection.

    At each access, torchmetrics copies the states that several metrics of the collection share. The wrapper
    prevents this copy during the trace. It records the access as a call of `values`, so that torchmetrics
    makes the copy when Piper repeats the calls.

    Args:
        own: the method of the collection's class.
    """

    def way(collection: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call(collection, "values", (), {})
        before = dict(vars(collection))
        try:
            return own(collection, *args, **{**kwargs, "copy_state": False})
        finally:
            vars(collection).update(before)

    return way


def foreign_updates_refused(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context for code of a step that runs only in some processes. In it, an update of a metric object of
    torchmetrics raises a `PiperError` if the object is neither a submodule nor made by this code, because hooks of the
    other processes would see no update."""
    known = [*module.modules()]

    def check(metric: Metric, name: str, value: Any) -> None:
        if name != "_update_count":
            return
        if name not in vars(metric):  # the constructor sets the count for the first time
            known.append(metric)
        elif value and not any(metric is each for each in known):
            raise PiperError(
                f"{user_line()}: training_step updates {kind_of(metric)}, which is not a submodule, in code that runs only "
                "in the processes of one stage. Hooks of the other processes would see no update. Keep the metric object "
                "as an attribute of the module (self.acc = ...), or in an nn.ModuleList or nn.ModuleDict [PIPER-C022]"
            )

    return checked_calls(Metric, "__setattr__", check)


def uncopied(node: Node) -> Node:
    """Return the node whose value `node` copies by clones and detaches, or `node` itself.

    A graph does not change tensors in place, so several metric objects may share a tensor.
    """
    while node.target in (aten.clone.default, aten.detach.default) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
