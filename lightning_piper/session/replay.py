"""Replays the step's `self.log` calls and metric object calls with the values of the batch that it has just
run on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import BatchSpec
from lightning_piper.capture.proxies.numbers import NumberProxy
from lightning_piper.capture.tracing.recorded_logs import library_method
from lightning_piper.common.limits import kind_of
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.metric_calls import Later, MetricCall, MetricLog, MetricResult
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import LOSS, Logged
from lightning_piper.ir.terms import Weighing
from lightning_piper.ir.values import Kind
from lightning_piper.ops.metrics import first_log, metric_names, widths
from lightning_piper.runtime import StepResult
from lightning_piper.session.metric_objects import MetricObjects, owners_of, wanted_by_all

# Keywords of `self.log` that a replayed call leaves out. A plan reports the same values on every process, so
# reducing these values again would only cost time (under local SGD, `_sync_dist`). The values do not have an autograd
# graph.
NOT_REPLAYED = ("sync_dist", "sync_dist_group", "enable_graph")


class Given:
    """The values that a step could not know when it was captured: the lists in its batch and the results of
    metric objects.

    Attributes:
        batch_spec: The spec of the batch.
        leaves: The tensors of the batch.
        values: Results of the calls of metric objects, in order.
    """

    def __init__(self, batch_spec: BatchSpec, leaves: Sequence[torch.Tensor]) -> None:
        self.batch_spec = batch_spec
        self.values: list[Any] = []
        self._calls: list[MetricCall] = []
        self.leaves = leaves
        self._lists = batch_spec.contents(leaves)

    def __call__(self, what: Any) -> Any:
        """Return the value for a placeholder of the capture: a list of the batch, or the result of a metric
        object or an entry of that result.

        Raises:
            PiperError: The metric object's result does not have the entry that the step uses.
        """
        if not isinstance(what, Later):
            return self._lists[what.index]
        try:
            return what.of(self.values)
        except (LookupError, TypeError, AttributeError) as error:
            found = ", ".join(
                f"self.{self._calls[i].metric} returned {_shown(self.values[i])}" for i in sorted(what.calls)
            )
            wanted = (
                f"uses {''.join(f'[{key!r}]' for key in what.keys)} of it"
                if isinstance(what, MetricResult)
                else "calculates with an entry of it"
            )
            raise PiperError(
                f"{found}, but the step {wanted} ({type(error).__name__}: {error}). Use an entry that the result has"
                " [PIPER-C008]"
            ) from error

    def keep(self, call: MetricCall, value: Any) -> None:
        """Store the result of the next call of a metric object."""
        self._calls.append(call)
        self.values.append(value)


def _shown(value: Any) -> str:
    return f"a dict of {', '.join(map(repr, value))}" if isinstance(value, dict) else kind_of(value)


class Replay:
    """Repeats the logging of one compiled program. Every process logs the same values under the same keys, in
    the order of the step.

    Args:
        compiled: The program.
        objects: The metric objects that the steps update.
        firsts: Under local SGD, the first rank of each local replica in the run; None without local SGD.

    Attributes:
        dtype: Dtype of the loss; None for a forward-only step.
        tensors: Whether the step logs tensors, not only numbers.
    """

    def __init__(
        self, compiled: Compiled, objects: MetricObjects, firsts: Sequence[int] | None = None
    ) -> None:
        names = metric_names(compiled.dag.code)
        ends = list(itertools.accumulate(counts := widths(compiled.dag.code)))
        slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        dtypes = _dtypes(compiled.dag)
        self.dtype = dtypes.get(LOSS)
        logs = compiled.dag.code.logs
        self._log, self._log_dict = (
            library_method(type(compiled.step.module), name) for name in ("log", "log_dict")
        )
        alike = _alike(compiled.dag, lambda log: _current(log.kwargs.get("batch_size")))
        # An uncaptured step has no logs here, because it makes its log calls itself.
        with compiled.step.context() if logs else contextlib.nullcontext():
            # Lightning keeps values in this dtype if they are logged in neither float32 nor float64.
            wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
            kept = {
                name: dtype if dtype in (torch.float32, torch.float64) else wide
                for name, dtype in dtypes.items()
            }
        self.tensors = len(names) > first_log(compiled.dag.code)
        self._step, self._objects, self._size = compiled.step, objects, compiled.dag.size
        self._wanted = wanted_by_all(compiled.dag.code.metrics, compiled.step.name)
        self._owners = {
            name: tuple(first + rank for first in firsts or (0,) for rank in ranks)
            for name, ranks in owners_of(compiled.dag).items()
        }
        # For each log call: its name, a function that returns its value, the keywords for `self.log`, and the keywords
        # that are numbers of the capture, each with a factor.
        self._calls: list[
            tuple[str, Callable[[StepResult], Any], dict[str, Any], dict[str, tuple[NumberProxy, int]]]
        ] = []
        self._calls_metrics = bool(compiled.dag.code.metrics.events)
        self._repeats = bool(logs) or self._calls_metrics
        self._context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if self._calls_metrics:
            self._context = compiled.step.context
        for log in logs:
            kwargs: dict[str, Any] = {k: v for k, v in log.kwargs.items() if k not in NOT_REPLAYED}
            # Replicas whose batches cannot be cut have equal weights on all processes, regardless of the
            # sizes of their tensors.
            apart = compiled.dag.code.undivided is not None and compiled.dag.replicas > 1
            if kwargs.get("batch_size") is None:
                kwargs["batch_size"] = compiled.dag.replicas if apart else compiled.dag.size
            kwargs["reduce_fx"] = log.reduce
            if firsts is not None:
                kwargs["sync_dist"] = _sync_dist(log.kwargs, compiled.step.name)
            parts = [slices[names.index(name, first_log(compiled.dag.code))] for name in log.outputs]
            factor = compiled.dag.replicas if log.name in alike else 1
            numbers = {key: (x, 1) for key, x in kwargs.items() if type(x) is NumberProxy}
            if "batch_size" in numbers:
                numbers["batch_size"] = kwargs["batch_size"], factor
            else:
                kwargs["batch_size"] *= factor
            self._calls.append((log.name, _value(log, parts, kept, wide), kwargs, numbers))
            if log.constant is not None:
                self._context = compiled.step.context

    def __call__(self, module: nn.Module, result: StepResult, given: Given) -> None:
        """Call Lightning's `log` and the metric objects of the module.

        Args:
            result: The result of the step.
            given: The values for this process's batch; receives the results of the metric objects.
        """
        if not self._repeats:
            return
        # The events at this process's batch size, because constant arguments (`weight=len(y)`) may depend on
        # the size.
        events = list(self._step.at(given.batch_spec.size).metrics.events) if self._calls_metrics else []
        self._objects.claim(module, self._owners)
        with self._context():  # Numbers become tensors of the precision's default dtype.
            for i, (name, value, kwargs, numbers) in enumerate(self._calls):
                while events and events[0].after <= i:
                    self._repeat(module, events.pop(0), result, given)
                for key, (number, factor) in numbers.items():
                    kwargs[key] = number.get() * factor
                self._log(module, name, value(result), **kwargs)
            for event in events:
                self._repeat(module, event, result, given)

    def _repeat(self, module: Any, event: MetricCall | MetricLog, result: StepResult, given: Given) -> None:
        """Repeat one call of a metric or one `self.log` with the values of this step."""
        if isinstance(event, MetricCall):
            tensors = [self._argument(name, result, given) for name in event.tensors]
            found = self._objects.call(module, event, tensors, given, len(given.values) in self._wanted)
            given.keep(event, found)
            return
        kwargs = {key: _current(x) for key, x in event.kwargs.items()}
        if isinstance(event.value, Later):
            value = given(event.value)
            kwargs.setdefault("batch_size", self._size)
        else:
            value = module.get_submodule(event.value)
        if event.name is None:
            self._log_dict(module, value, **kwargs)
        else:
            self._log(module, event.name, value, **kwargs)

    def _argument(self, name: str, result: StepResult, given: Given) -> torch.Tensor | None:
        """Return a tensor argument of a metric object; None on a process that does not have the argument."""
        found = result.results.get(name)
        code = self._step.at(given.batch_spec.size)
        whole = code.metrics.whole
        return (
            found
            if found is None or name not in whole
            else whole[name](self._step.inputs(given.leaves, code)).to(found.device)
        )


def added(dag: TrainingDAG) -> set[str]:
    """Return the names of the logged values that are sums over samples, not means. Such a value of the whole
    batch is the sum of the values of the parts of the batch."""
    code = dag.code
    outputs = [
        out for interface in code.interfaces.values() for out in interface.outputs if out.kind == Kind.LOG
    ]
    sums = {
        out.names[0]
        for out in outputs
        if out.term is not None and code.terms[out.term].weighing == Weighing.SUM
    }
    alike = _alike(dag, _constant)
    return {
        log.name
        for log in code.logs
        if (log.name not in alike if log.constant is not None else sums.issuperset(log.outputs))
    }


def _current(value: Any) -> Any:
    """Return the current value of a number of the capture, such as the batch index. Return any other value unchanged."""
    return value.get() if type(value) is NumberProxy else value


def _constant(log: Logged) -> float | None:
    return log.constant() if callable(log.constant) else log.constant


def _alike(dag: TrainingDAG, number: Callable[[Logged], Any]) -> set[str]:
    """Return the names of the logged values for which `number` returns the same for the whole batch of all
    replicas and for a part of that batch.

    Such a number does not depend on the size of the batch, and each replica has it.
    """
    if dag.replicas == 1 or all(number(log) is None for log in dag.code.logs):
        return set()
    part = dag.step.at(min(len(chunk.slice) for chunk in dag.of_type(Chunk)))
    pairs = zip(dag.code.logs, part.logs, strict=True)
    return {log.name for log, of_part in pairs if number(log) is not None and number(log) == number(of_part)}


def _value(
    log: Logged, slices: Sequence[slice], kept: Mapping[str, torch.dtype], wide: torch.dtype
) -> Callable[[StepResult], Any]:
    """Return a function that computes the logged value from the result of the step.

    Args:
        log: The log call.
        slices: For each value from which the logged value is computed, its slice of `StepResult.metrics`.
        kept: Name of a value of the step -> the dtype in which Lightning keeps it.
        wide: The dtype in which Lightning keeps values that are neither float32 nor float64.
    """
    constant, computed = log.constant, log.computed
    if constant is not None:
        return lambda result: constant() if callable(constant) else constant
    if computed is None:
        (index,), dtype = (x.start for x in slices), kept[log.name]
        return lambda result: result.metrics[index].to(dtype)

    def value(result: StepResult) -> torch.Tensor:
        made = computed.of([result.metrics[part] for part in slices])
        return made if made.dtype in (torch.float32, torch.float64) else made.to(wide)

    return value


def _sync_dist(given: Mapping[str, Any], step: str) -> bool:
    """Return whether Lightning averages a logged value over the local replicas of local SGD.

    A value of an epoch is always averaged. A value of each step is averaged only if the user asks for it, because the
    replicas would communicate in each step.

    Args:
        given: The keywords of `self.log`.
        step: Name of the step. Lightning logs on each step by default only in "training_step".
    """
    on_step = given.get("on_step")
    return bool(given.get("sync_dist")) or not (step == "training_step" if on_step is None else on_step)


def _dtypes(dag: TrainingDAG) -> dict[str, torch.dtype]:
    """Return name -> dtype in which the step computes its loss (`LOSS`) and its logged tensors."""
    found = {}
    for key, interface in dag.code.interfaces.items():
        for output, specs in zip(interface.outputs, dag.code.code[key].outputs, strict=True):
            if output.kind == Kind.LOSS:
                found[LOSS] = specs[0].dtype
            elif output.kind == Kind.LOG:
                found.setdefault(output.names[0], specs[0].dtype)
    return found
