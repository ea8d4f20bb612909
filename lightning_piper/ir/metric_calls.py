"""What a step does with metric objects: it is not traced, but repeated when the step has run, with the values of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Later:
    """What is known once calls of metric objects have been made.

    Attributes:
        calls: their numbers in the step.
    """

    calls: frozenset[int]

    def of(self, values: Sequence[Any]) -> Any:
        """It, when the calls have given `values`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Computed(Later):
    """What a call of a metric object gives, or an entry of it.

    Attributes:
        call: number of the call in the step.
        keys: on the way to the entry.
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
    """What the step makes of what calls give.

    Attributes:
        name, function: of the arithmetic.
        operands: numbers, and what is known later.
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
        metric: name of the object, a submodule.
        method: `forward`, `update`, `compute` or `reset`; of a collection also `values`.
        arguments: puts the arguments (positional, named) together from their tensors, and for what stands in them for a list of the
            batch, or for what another call gives, from what a function says.
        tensors: names of these tensors, among the outputs of kind `argument`.
        after: how many `self.log` calls of the step come before it.
        where: the user's line.
    """

    metric: str
    method: str
    arguments: Callable[..., Any]
    tensors: tuple[str, ...]
    after: int
    where: str

    def __str__(self) -> str:
        return f"{self.metric}.{self.method}({', '.join(self.tensors)})"


@dataclass(frozen=True)
class MetricLog:
    """A `self.log` (or, without a name, `self.log_dict`) of a metric object, or of what a call gives.

    Attributes:
        name: the key.
        value: name of the object, or what calls give.
        kwargs: the other arguments.
        after: as in `MetricCall`.
    """

    name: str | None
    value: str | Later
    kwargs: Mapping[str, Any]
    after: int

    def __str__(self) -> str:
        return f"self.log({self.name!r}, {self.value}) {sorted(map(str, self.kwargs.items()))}"


@dataclass(frozen=True)
class MetricCalls:
    """All that a step does with metric objects, in its order.

    Attributes:
        events: calls and logs.
        terms: name of each tensor among the arguments -> how its values in several microbatches become one, if none of its
            dimensions follows the samples, by its place in `StepCode.terms`; None: they are all the same.
        whole: name of each tensor among the arguments that has nothing of the samples in it -> gives it for the whole batch, from
            what the step's code takes.
        used: numbers of the calls of which it logs or returns what they give, or gives it to others.
    """

    events: tuple[MetricCall | MetricLog, ...] = ()
    terms: Mapping[str, int | None] = field(default_factory=dict)
    whole: Mapping[str, Callable[[Sequence[Any]], Any]] = field(default_factory=dict)
    used: frozenset[int] = frozenset()

    @property
    def calls(self) -> list[MetricCall]:
        return [event for event in self.events if isinstance(event, MetricCall)]
