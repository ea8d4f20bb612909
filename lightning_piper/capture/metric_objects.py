"""Metric objects in a step: while it is traced, their calls are noted, and their tensor arguments are outputs of the graph.

A metric object is a submodule with `update`, `compute` and `reset`, as those of torchmetrics. What it does depends on values, and
it keeps state, so it is not traced. Meanwhile it has another class, whose methods note the call and give a `Awaited`. When the
step has run, the calls are repeated on the object itself (`session/metric_objects.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Node

from lightning_piper.capture.batch import flatten
from lightning_piper.capture.computed import Awaited
from lightning_piper.capture.each_sample import stacked
from lightning_piper.capture.source import user_line
from lightning_piper.errors import CaptureError
from lightning_piper.ir.metric_calls import Computed, Later, MetricCall, MetricCalls, MetricLog
from lightning_piper.ir.regions import Output
from lightning_piper.ir.values import Kind

aten = torch.ops.aten
METHODS = ("forward", "update", "compute", "reset")
_LINKING = ("items", "values", "__getitem__")  # of a MetricCollection
NOT_REPEATED = ("sync_dist", "sync_dist_group", "enable_graph")


def is_metric_object(part: nn.Module) -> bool:
    """Is it updated and computed outside of the graph? Without torchmetrics' `add_state`, only if it has no tensors of a module,
    which a graph takes care of."""
    if not all(callable(getattr(type(part), name, None)) for name in METHODS[1:]):
        return False
    known = hasattr(type(part), "add_state") or hasattr(type(part), "compute_groups")
    return known or not [*part.parameters(), *part.buffers()]


def metric_objects(module: nn.Module) -> dict[str, nn.Module]:
    """Those of a module, by name; also those inside of others."""
    return {name: part for name, part in module.named_modules() if name and is_metric_object(part)}


def object_of(argument: str) -> str:
    """Which metric object a tensor is an argument of."""
    return argument.rpartition(" ")[0]


class Recording:
    """Takes down what a step does with metric objects while it is traced.

    Attributes:
        tensors: the arguments.
    """

    def __init__(self, module: nn.Module, step: str) -> None:
        self._step = step
        self._names = {id(part): name for name, part in metric_objects(module).items()}
        self.clear()

    def clear(self, samples: int = 0) -> None:
        """Begin anew, with a batch of so many samples."""
        self._samples = samples
        self._events: list[MetricCall | MetricLog] = []
        self._calls = 0
        self._used: set[int] = set()
        self._tensor_names: list[str] = []
        self.tensors: list[torch.Tensor] = []

    @property
    def outputs(self) -> Iterator[Output]:
        """What the tensors are among the step's outputs."""
        return (Output(Kind.ARGUMENT, (name,)) for name in self._tensor_names)

    @property
    def made(self) -> MetricCalls:
        """All of it, without the terms."""
        return MetricCalls(tuple(self._events), used=frozenset(self._used))

    def call(self, metric: nn.Module, method: str, after: int, args: Any, kwargs: Any) -> Any:
        """A call of a metric object."""
        name = self._names[id(metric)]
        args = tuple(stacked(x, self._samples) for x in args)
        kwargs = {key: stacked(x, self._samples) for key, x in kwargs.items()}
        leaves, spec = flatten((args, kwargs), f"call of self.{name}")
        names = tuple(f"{name} {len(self.tensors) + i}" for i in range(len(leaves)))  # see `object_of`
        self.tensors += [x.detach().clone() for x in leaves]  # as they are now: the step may write into them
        self._tensor_names += names
        self.use(spec.computed)
        self._events.append(MetricCall(name, method, spec.rebuild, names, after, user_line()))
        computed = Computed(self._calls)
        self._calls += 1
        if method not in ("forward", "compute"):
            return None
        value = Awaited(computed, self._refuse)
        keys = getattr(metric, "keys", None)
        return Values(value, keys(keep_base=False)) if keys is not None else value

    def known(self, value: Any) -> str | Later | None:
        """The name of a metric object, or what is given by one; None for anything else."""
        if isinstance(value, Awaited):
            return value.computed
        if isinstance(value, Values):
            return value.whole.computed if value.untouched else None
        return self._names.get(id(value)) if isinstance(value, nn.Module) else None

    def log(self, name: str | None, value: str | Later, kwargs: Mapping[str, Any], after: int) -> None:
        """A `self.log` of what is `known`, or a `self.log_dict` if it has no name."""
        # Lightning does not look at it for an object; and that of the whole batch is what is repeated without it.
        needless = isinstance(value, str) or kwargs.get("batch_size") == self._samples
        kept = {k: x for k, x in kwargs.items() if k not in NOT_REPEATED and not (k == "batch_size" and needless)}
        self._events.append(MetricLog(name, value, kept, after))
        self.use([value] if isinstance(value, Later) else [])

    def use(self, computed: Iterable[Later]) -> None:
        """What calls give is not only for the object."""
        self._used.update(*(x.calls for x in computed))

    def logged(self, name: str) -> bool:
        return any(isinstance(event, MetricLog) and event.name == name for event in self._events)

    def _refuse(self, computed: Later) -> NoReturn:
        calls = [event for event in self._events if isinstance(event, MetricCall)]
        raise CaptureError(
            f"{user_line()}: {self._step} computes with what self.{calls[min(computed.calls)].metric} gives, which is not known "
            "before the step has run. Log it (self.log, self.log_dict) or return it, as it is or after arithmetic with numbers; "
            "for a tensor to compute with, use the metric's function (torchmetrics.functional)"
        )


class Values(dict[str, Any]):
    """What a collection of metrics gives: an entry for each.

    Attributes:
        whole: all of it.
    """

    def __init__(self, whole: Awaited, keys: Iterable[str]) -> None:
        super().__init__({key: whole[key] for key in keys})
        self.whole = whole
        self._made = dict(self)

    @property
    def untouched(self) -> bool:
        return self.keys() == self._made.keys() and all(self[key] is x for key, x in self._made.items())


@contextlib.contextmanager
def noting(module: nn.Module, call: Callable[[nn.Module, str, Any, Any], Any]) -> Iterator[None]:
    """Meanwhile `call` gets the calls of metric objects: object, method, arguments."""
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
    def method(name: str, metric: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(metric, name, args, kwargs)

    members: dict[str, Any] = {"__call__": lambda self, *args, **kwargs: method("forward", self, *args, **kwargs)}
    # Properties come before attributes of the object, which torchmetrics' are.
    members |= {name: property(partial(partial, method, name)) for name in METHODS}
    if hasattr(kind, "compute_groups"):
        members |= {name: _linking(getattr(kind, name), call) for name in _LINKING}
    return type(kind.__name__, (kind,), members | {"__module__": kind.__module__})


def _linking(own: Callable[..., Any], call: Callable[[nn.Module, str, Any, Any], Any]) -> Callable[..., Any]:
    """A way to the metrics of a collection. Those that share states get them whenever one is asked for: so they do when the step
    has run, and not before."""

    def way(collection: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call(collection, "values", (), {})
        before = dict(vars(collection))
        try:
            return own(collection, *args, **{**kwargs, "copy_state": False})
        finally:
            vars(collection).update(before)

    return way


def uncopied(node: Node) -> Node:
    """What was copied: in a graph nothing is written into, and several objects may get the same tensor."""
    while node.target in (aten.clone.default, aten.detach.default) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
