"""The calls of metric objects in a step. Piper does not trace them, but replays them after the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Later:
    """A value that is known only after some calls of metric objects.

    Attributes:
        calls: Indices of these calls among all calls of metric objects in the step.
    """

    calls: frozenset[int]

    def of(self, values: Sequence[Any]) -> Any:
        """Return the value. `values` has the results of all calls, in the order of the step."""
        raise NotImplementedError


@dataclass(frozen=True)
class MetricResult(Later):
    """A result of a call of a metric object, or an entry of the result.

    Attributes:
        call: Index of the call, as in `Later.calls`.
        keys: The keys that lead to the entry.
    """

    call: int
    keys: tuple[Any, ...] = ()

    @property
    def calls(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset({self.call})

    def of(self, values: Sequence[Any]) -> Any:
        value = values[self.call]
        for key in self.keys:
            value = value[key]
        return value


@dataclass(frozen=True)
class Derived(Later):
    """A value that the step computes from results of calls.

    Attributes:
        name, function: The arithmetic operation.
        operands: Numbers and `Later` values.
    """

    name: str
    function: Callable[..., Any] = field(repr=False)
    operands: tuple[Any, ...]

    @property
    def calls(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset().union(*(x.calls for x in self.operands if isinstance(x, Later)))

    def of(self, values: Sequence[Any]) -> Any:
        return self.function(*(x.of(values) if isinstance(x, Later) else x for x in self.operands))


@dataclass(frozen=True)
class MetricCall:
    """A call of a metric object.

    Attributes:
        metric: Name of the object, a submodule.
        method: `forward`, `update`, `compute` or `reset`, and for a collection also `values`.
        arguments: A function that rebuilds the positional and keyword arguments from their tensors. It also
            takes a function, which supplies the items that are lists of the batch or results of other calls.
        tensors: Names of these tensors, among the outputs of kind `argument`.
        after: The number of `self.log` calls of the step that come before this call.
        where: The user's source line.
        entries: Path in the arguments -> number, text, or another entry in place of a tensor or a value that changes.
    """

    metric: str
    method: str
    arguments: Callable[..., Any]
    tensors: tuple[str, ...]
    after: int
    where: str
    entries: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.metric}.{self.method}({', '.join(self.tensors)})"


@dataclass(frozen=True)
class MetricLog:
    """A `self.log` (without a name: a `self.log_dict`) of a metric object or of a result of its calls.

    Attributes:
        name: The key.
        value: Name of the metric object, or a value that follows from calls.
        kwargs: The other arguments of `self.log`.
        after: As in `MetricCall`.
    """

    name: str | None
    value: str | Later
    kwargs: Mapping[str, Any]
    after: int

    def __str__(self) -> str:
        return f"self.log({self.name!r}, {self.value}) {sorted(map(str, self.kwargs.items()))}"


@dataclass(frozen=True)
class MetricCalls:
    """A list of all calls and logs of metric objects in a step, in their order.

    Attributes:
        events: Calls and logs.
        terms: Name of each argument tensor -> how its values of several microbatches become one, as an index
            into `StepCode.terms`. None: each microbatch gives the same value. For a tensor with a dimension
            of samples, Piper does not use the entry.
        whole: Name of each argument tensor that does not depend on the samples -> a function from the step's
            inputs to its value for the whole batch.
        used: Indices of the calls whose results the step logs, returns, or passes to other calls.
    """

    events: tuple[MetricCall | MetricLog, ...] = ()
    terms: Mapping[str, int | None] = field(default_factory=dict)
    whole: Mapping[str, Callable[[Sequence[Any]], Any]] = field(default_factory=dict)
    used: frozenset[int] = frozenset()

    @property
    def calls(self) -> list[MetricCall]:
        return [event for event in self.events if isinstance(event, MetricCall)]
