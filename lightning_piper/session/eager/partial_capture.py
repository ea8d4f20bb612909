"""Partial capture: a training step that cannot be captured as a whole, under a program that cuts it.

Piper captures the calls of annotated modules. All other code of the step runs uncaptured, in the region of
the previous captured call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import BatchSpec, History, PartlyCaptured
from lightning_piper.capture.eager.eager_reference import merged
from lightning_piper.capture.eager.eager_remainder import RemainderLog
from lightning_piper.capture.metrics.metric_objects import foreign_updates_refused
from lightning_piper.capture.tracing.recorded_logs import library_method
from lightning_piper.capture.tracing.step_trace import REDUCTIONS, shown_function
from lightning_piper.common.containers import container_like
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives.replicate import shards_of
from lightning_piper.errors import CaptureError, ExecutionError, PiperError, with_notes
from lightning_piper.ir.regions import Step
from lightning_piper.processes.world import World, on_host
from lightning_piper.session.eager.eager_replicas import why_not
from lightning_piper.session.metric_objects import MetricObjects
from lightning_piper.session.process_runtime import Settings
from lightning_piper.session.replay import NOT_REPLAYED

_NOTHING = contextlib.nullcontext()


class InPart:
    """The training step of a fit that is captured in part.

    Args:
        module: The module that has the step.
        objects: The metric objects that its steps update.

    Attributes:
        extras: The entries of the dict that the latest step returned, except the loss, joined over the
            microbatches. Empty if the step returned only the loss, or was captured as a whole.
        before: Called before each step that is captured in part.
    """

    def __init__(self, module: nn.Module, settings: Settings, world: World, objects: MetricObjects) -> None:
        self._module, self._settings, self._world, self._objects = module, settings, world, objects
        self._told = False  # whether the user was warned
        self.extras: dict[str, Any] = {}
        self.before: Callable[[], None] = lambda: None

    def compiled(self, error: CaptureError, batch: BatchSpec, history: History) -> Compiled:
        """Compile a step that cannot be captured as a whole.

        Args:
            error: Why the whole step cannot be captured.
            batch: The spec of the batch.
            history: Facts from earlier captures of the step.

        Raises:
            CaptureError: `error`, in each of these cases. The calls of annotated modules cannot be captured
                either. The program neither cuts the step nor shards parameters or gradients. The settings do
                not allow a partial capture. `error` is `late`, or comes from the step's own code, or from
                communication in a step that the program cuts.
        """
        settings, world = self._settings, self._world
        if not settings.in_part or error.late or error.raised is not None:
            raise error
        cuts = why_not(self._module, settings, world.device) is not None
        if cuts and error.communicates:
            raise error
        # Without capture, the whole step would have whole parameters and gradients.
        gathers = any(field != "shard_optimizer" for each in settings.program for field in shards_of(each))
        if not cuts and not gathers:
            raise error
        try:
            step = PartlyCaptured(
                self._module, batch, world.device, settings.context, history, settings.whole_norms
            )
            compiled = compile_step(
                step, tuple(settings.program), verify=settings.static, device=settings.device
            )
            step.remainder.everywhere = not cuts
            if not cuts and not all(call.tags for call in step.calls):
                raise CaptureError(
                    "the step calls modules that are not annotated. Annotate all modules that it calls "
                    "(piper.annotate_modules) [PIPER-C022]"
                )
            if not cuts and (changed := sorted(step.buffers.keys() & set(step.remainder.others))):
                raise CaptureError(
                    f"the code outside of the annotated modules may change buffer {changed[0]!r}. Change buffers "
                    "only in annotated modules [PIPER-C022]"
                )
        except PiperError as other:
            error.add_note(f"Capturing only the calls of annotated modules also failed: {with_notes(other)}")
            raise error from None
        if not self._told:
            self._told = True
            world.warn(_said(error, step))
        return compiled

    def running(self, step: Step) -> contextlib.AbstractContextManager[None]:
        """Return the context in which to run the step.

        At its end, the context logs, on all processes, the values that the uncaptured part has logged. If the
        whole step is captured, the context does nothing.
        """
        self.extras = {}
        return self._joining(step) if isinstance(step, PartlyCaptured) else _NOTHING

    @contextlib.contextmanager
    def _joining(self, step: PartlyCaptured) -> Iterator[None]:
        """Return a context for one run of the step. At its end, the context logs the step's values on all
        processes. It raises an error of the step's own code as one device would. Collective.

        Raises:
            PiperError: A parameter does not have a gradient.
        """
        remainder, world = step.remainder, self._world
        alone = self._settings.local or world.size == 1
        foreign = _NOTHING if alone or remainder.everywhere else foreign_updates_refused(self._module)
        self.before()
        remainder.begin()
        try:
            with self._objects.local_values(), foreign:
                yield
        except ExecutionError as error:
            if remainder.failure is None:
                raise
            remainder.failure.add_note(str(error).partition(" failed: ")[0])
            raise remainder.failure from None
        own = remainder.logs, remainder.used, remainder.extras, remainder.updated
        found = [own] if alone else world.gather(on_host(own))
        if unused := sorted(
            set(remainder.trained) - remainder.captured.union(*(used for _, used, _, _ in found))
        ):
            raise PiperError(
                f"training_step has not used {', '.join(unused[:3])}, but a step that is captured in part "
                "needs a gradient for every parameter. Freeze the unused parameters (requires_grad_(False))"
                " [PIPER-C022]"
            )
        replica = world.replicas[world.rank] if len(found) > 1 else None
        of_own = [
            part
            for rank, (_, _, parts, _) in enumerate(found)
            if replica in (None, world.replicas[rank])
            for part in parts
        ]
        for key in dict.fromkeys(key for part, _ in of_own for key in part):
            self.extras[key] = _joined(
                *zip(*((part[key], n) for part, n in of_own if key in part), strict=True)
            )
        if not remainder.everywhere:
            owners = tuple(
                sorted(
                    (i for i, (*_, names) in enumerate(found) if names is not None),
                    key=lambda i: world.replicas[i],
                )
            )
            updated = sorted(set().union(*(names or () for *_, names in found)))
            self._objects.updated(self._module, updated, owners)
        own_log, module = library_method(type(self._module), "log"), self._module
        for log, value, kwargs in _logged([log for logs, *_ in found for log in logs]):
            logging: Any = partial(own_log, module) if log.own else module.log
            logging(log.name, value, **kwargs)


def _said(error: CaptureError, step: PartlyCaptured) -> str:
    """Return the warning for the user."""
    return (
        f"training_step is captured in part. Reason: {error}. Consequences: {step.executed}, once for each microbatch. "
        "Attributes that it sets on the module stay in the process that runs it. Piper takes the loss as a mean over "
        "samples. Any other loss gives a different result from one device. To get an error instead, use "
        "PiperStrategy(capture='always') [PIPER-W002]"
    )


def _logged(logs: Sequence[RemainderLog]) -> Iterator[tuple[RemainderLog, Any, Mapping[str, Any]]]:
    """Merge the logged values of all parts of the batch into one value for each name. Yield also the first call of the
    name, and keyword arguments.

    Raises:
        PiperError: A value is reduced by an unsupported function.
    """
    by_name: dict[str, list[RemainderLog]] = {}
    for log in logs:
        by_name.setdefault(log.name, []).append(log)
    for name, found in by_name.items():
        kwargs = {key: value for key, value in found[0].kwargs.items() if key not in NOT_REPLAYED}
        function = kwargs.get("reduce_fx", "mean")
        how = REDUCTIONS.get(getattr(function, "__wrapped__", function))
        if how is None:
            raise PiperError(
                f"self.log({name!r}): values reduced by reduce_fx={shown_function(function)} "
                "cannot be merged over microbatches. Give one of 'mean', 'sum', 'max' and 'min' [PIPER-C007]"
            )
        # As in Lightning, a value counts by its batch size, which may differ from part to part.
        sizes = [log.kwargs.get("batch_size") or log.samples for log in found]
        kwargs["batch_size"] = sum(sizes)
        samples = torch.tensor(sizes, dtype=torch.float64)
        weights = samples / samples.sum() if how == "mean" else torch.ones_like(samples)
        values = [log.value.to("cpu", torch.float64) for log in found]
        value = merged("sum" if how == "mean" else how, values, weights)
        yield found[0], value.to(torch.promote_types(torch.float32, found[0].value.dtype)), kwargs


def _joined(parts: Sequence[Any], samples: Sequence[int]) -> Any:
    """Join the results of microbatches into the result that one device would return.

    Tensors and lists with an entry for each sample are concatenated. Floating-point numbers are averaged over
    the samples. Other values that are equal stay as one value. All this also holds inside of dicts, lists and
    tuples. All other results become a list with one entry for each microbatch.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        if all(x.ndim and x.shape[0] == n for x, n in zip(parts, samples, strict=True)):
            return torch.cat(list(parts))
        if not all(x.ndim == 0 and x.is_floating_point() for x in parts):
            return list(parts)
    if all(isinstance(x, float | torch.Tensor) for x in parts):
        return sum(x * n for x, n in zip(parts, samples, strict=True)) / sum(samples)
    if any(type(x) is not type(first) for x in parts):
        return list(parts)
    if isinstance(first, Mapping) and all(x.keys() == first.keys() for x in parts):
        return container_like(first, [_joined([x[key] for x in parts], samples) for key in first])
    if isinstance(first, list) and all(len(x) == n for x, n in zip(parts, samples, strict=True)):
        return [x for part in parts for x in part]
    if isinstance(first, list | tuple) and all(len(x) == len(first) for x in parts):
        return container_like(first, [_joined(entries, samples) for entries in zip(*parts, strict=True)])
    with contextlib.suppress(ValueError, TypeError):  # comparing arrays does not give a single bool
        return first if all(x == first for x in parts) else list(parts)
    return list(parts)
