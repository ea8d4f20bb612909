"""Trace a step into one functional graph for one batch size. A `training_step` is traced with its backward
pass, and any other step without a backward pass."""

from __future__ import annotations

import contextlib
import numbers
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Graph

from lightning_piper.annotate import marking, numbering, tag_layers
from lightning_piper.batch_norms import plain_batch_norms, whole_batch_norms
from lightning_piper.capture.graph_cache.cached_graphs import traced_once
from lightning_piper.capture.joint.joined_part import join_batch
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.metrics.metric_objects import MetricRecorder
from lightning_piper.capture.proxies.arrays import ArrayProxy, from_numpy, to_array
from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.proxies.batch_changes import BatchChanges, contents
from lightning_piper.capture.proxies.data_dependent_shapes import DataDependentTensor
from lightning_piper.capture.proxies.deferred_numbers import (
    holds_deferred,
    is_deferred,
    refusal,
)
from lightning_piper.capture.proxies.metric_values import MetricValueProxy
from lightning_piper.capture.proxies.misplaced_numbers import misplaced
from lightning_piper.capture.proxies.numbers import NumberProxy
from lightning_piper.capture.proxies.opaque_content import carrying
from lightning_piper.capture.python_state.prompt_tokens import making_prompt_tokens
from lightning_piper.capture.python_state.side_effects import ContainerGrowth
from lightning_piper.capture.python_state.state_protection import (
    Attribute,
    attributes,
    check_unchanged,
    preserving_tensors,
    restoring_attributes,
)
from lightning_piper.capture.python_state.state_reads import RandomDraw, StateReads
from lightning_piper.capture.torch_private import _torch, _torchmetrics
from lightning_piper.capture.torch_private._torch_communication import without_communication
from lightning_piper.capture.tracing.captured_module import as_captured, without_data
from lightning_piper.capture.tracing.dtype_promotions import settle_dtypes
from lightning_piper.capture.user_code.caught_refusals import recording_refusals
from lightning_piper.capture.user_code.error_origin import is_own, where_kept
from lightning_piper.capture.user_code.source import mark_called
from lightning_piper.capture.user_code.step_arguments import SKIPPED, arguments
from lightning_piper.common.limits import kind_of
from lightning_piper.common.units import counted
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import LOSS, Logged, Output, Rebuild
from lightning_piper.ir.values import Kind, TensorSpec
from lightning_piper.routing import exchanging
from lightning_piper.sample_gathering import gathering

# `reduce_fx` of `self.log` -> name of the reduction
REDUCTIONS = {"mean": "mean", "sum": "sum", "max": "max", "min": "min", torch.mean: "mean", torch.sum: "sum",
    torch.max: "max",
              torch.min: "min", max: "max", min: "min", sum: "sum"}  # fmt: skip


# (specs, device) -> (fake mode, fake tensors of this mode)
Fakes = Callable[
    [tuple[TensorSpec, ...], torch.device], tuple[_torch.FakeTensorMode, tuple[torch.Tensor, ...]]
]


def fakes_of(
    specs: tuple[TensorSpec, ...], device: torch.device
) -> tuple[_torch.FakeTensorMode, tuple[torch.Tensor, ...]]:
    """Return a new fake mode, and fake tensors of this mode with these specs. All sizes are numbers."""
    with (mode := _torch.FakeTensorMode()):
        return mode, tuple(
            torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=device) for s in specs
        )


@_torch.quietly()
def trace(
    step: TracedStep,
    specs: tuple[TensorSpec, ...],
    device: torch.device,
    parts: Mapping[str, int],
    fakes: Fakes = fakes_of,
) -> TracedGraph:
    """Return a step as one graph, traced on fake tensors. Parameters may be on the meta device.

    The graph is ready for the analysis of the loss: its dtypes are settled (`settle_dtypes`), and its joined part
    reads gathered tensors of the batch (`join_batch`).

    Args:
        specs: the specs of the tensors of the batch, followed by the specs of the step's Python numbers.
        parts: parameter name -> number of equal parts of its first dimension. The traced device has one part.
        fakes: makes the fake tensors of the batch and their fake mode.

    Raises:
        CaptureError: the step cannot be captured. If the step itself raises an error, this error gets a note.
        ContainerGrowth, RandomDraw: see `StateReads.running`.
    """
    (mode, inputs), module = fakes(specs, device), step.module
    reading = step.reads.tracing(module, step.name) if step.reads is not None else contextlib.nullcontext()
    # anomaly detection would look for NaN in gradients, which have no values here
    plain = torch.autograd.set_detect_anomaly(False)
    data = without_data(module, mode, device, parts, step.name)
    local = without_communication(partial(_communicates, step.name), partial(_sized, step))
    if step.reads is not None:
        step.reads.guard_attributes(module)
    with (
        plain,
        step.gradients(),
        restoring_attributes(module),
        reading,
        data,
        as_captured(module, step),
        local,
    ):
        before = attributes(module)

        def make() -> Graph:
            graph = preserving_tensors(
                module, partial(_torch.functional_graph, mode, step, inputs, mark_called)
            )
            if step.keeps:
                # hooks of the backward pass may have changed the attributes
                check_unchanged(module, before, step.name)
            return graph

        try:
            # `parts` is empty because the parameters already have the shape of one part
            other = partial(without_data, module, device=device, parts={}, step=step.name)
            graph = (
                traced_once(module, step, inputs, device, other, make)
                if step.has_tracing_run and fakes is fakes_of
                else make()
            )
            tag_layers(graph)
        except ContainerGrowth:
            raise
        except (CaptureError, RandomDraw) as error:
            _refuse_metric(step, error)
            raise
        except _torch.WITHOUT_VALUES as error:
            _refuse_metric(step, error)
            if error.func is torch.ops.aten._local_scalar_dense.default:
                raise refusal(error) from error
            reads = "reads the values of a tensor"
            if isinstance(error, _torch.DynamicOutputShapeException):
                reads = "makes a shape that depends on the values of a tensor"
            raise CaptureError(
                f"{user_line(error)}: {error.func} {reads}. Tensors have no values while the step is "
                "captured. Keep the computation in tensors "
                f"(torch.where, masks, index_add), or move it to a hook outside of {step.name} [PIPER-C001]"
            ) from error
        except Exception as error:
            _refuse_metric(step, error)
            _refuse(step, specs, error)
    if step.known is None or step.digest != step.known:
        settle_dtypes(graph)
        join_batch(graph)
    return TracedGraph(graph, step.plain, tuple(step.logs), step.metrics.made)


# Operation that gets functions -> what to use instead.
_WITHOUT_FUNCTIONS = {
    "cond": "Compute both branches, and choose with torch.where",
    "flex_attention": "Use scaled_dot_product_attention, with a tensor as attn_mask (docs/howto/packed_text.md)",
}


def _refuse(step: TracedStep, specs: tuple[TensorSpec, ...], error: Exception) -> NoReturn:
    """Raise the error of a trace that failed. Call it in the `except` block of `error`.

    If `error` is the user's own, raise `error` itself with a note. Otherwise raise a `CaptureError`.
    """
    if _torch.is_foreign_tensor(error):
        raise CaptureError(
            f"{user_line(error)}: the step uses a tensor that is neither in the batch nor a "
            "parameter or buffer of the module. Make it a buffer (self.register_buffer), or create "
            "it in the step. Keep a list of modules or parameters in an nn.ModuleList or nn.ParameterList [PIPER-C004]"
        ) from error
    if (found := misplaced(error)) is not None:
        raise found from error
    if kept := where_kept(step.module, error):
        raise CaptureError(
            f"{step.name} reads a tensor that an earlier run kept in {kept}. A captured step cannot "
            "keep tensors in Python attributes. Keep it in a buffer (register_buffer), and write "
            "into the buffer: self.state.copy_(...) [PIPER-C004]"
        ) from error
    if is_own(error, TracedStep._call.__name__):
        size = next((spec.shape[0] for spec in specs if spec.shape), 1)
        error.add_note(
            f"raised while {step.name} was captured for {counted(size, 'sample')}, with tensors that have no values"
        )
        raise
    if name := _torch.called_with_functions(error):
        advice = _WITHOUT_FUNCTIONS.get(name, "Use a Python loop with a fixed number of iterations")
        raise CaptureError(
            f"{user_line(error)}: {name} cannot be captured, because it gets a function. {advice} [PIPER-C026]"
        ) from error
    raise CaptureError(
        f"{user_line(error)}: {step.name} cannot be captured as one graph. Check that it runs without Piper "
        f"(fast_dev_run), and replace the operation on this line. The error is {type(error).__name__}: "
        f"{error} [PIPER-C011]"
    ) from error


class TracedStep(nn.Module):
    """A module that runs `training_step` as a function from tensors to (loss, logged tensors, arguments of
    metric objects).

    Args:
        module, batch_spec: The LightningModule and the spec of its batches. Further tensors that the step
            gets are Python numbers (`StateReads.inputs`).
        context: Entered around the step, e.g. autocast.
        degrees: For each call of `dispatch`: the number of parts into which the parameters of its region are
            divided.
        reads: Records what the step reads in Python. If None, the step runs uncaptured on real values.
        blocks: Name -> module whose calls become regions if the step has no annotations.
        whole_norms: All batch norms use the statistics of the whole batch, like `nn.SyncBatchNorm`.

    Attributes:
        batch_idx: The step's `batch_idx` if `reads` is None. Otherwise `reads` supplies it.
        logs: The `self.log` calls of the last call of the step, without logs of metric objects.
        metrics: The calls and logs of metric objects in the last call of the step.
        digest: Identifies the operations of the last trace, and so its graph. None if they could not be recorded.
        known: The digest of an earlier trace. A trace with this digest has an empty graph, because the caller needs only
            the digest.
    """

    name = "training_step"
    keeps = True  # whether the step must leave the module's Python attributes unchanged
    # whether a run on fake tensors may show that the graph is known (`cached_graphs.py`)
    has_tracing_run = True
    # the context in which the step runs
    gradients: Callable[[], contextlib.AbstractContextManager[Any]] = torch.enable_grad

    def __init__(
        self,
        module: nn.Module,
        batch_spec: BatchSpec,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        degrees: tuple[int, ...] = (),
        reads: StateReads | None = None,
        blocks: Mapping[str, nn.Module] | None = None,
        whole_norms: bool = False,
    ) -> None:
        super().__init__()
        self.module, self._batch_spec, self._context, self._degrees = module, batch_spec, context, degrees
        self.reads, self.blocks, self._whole_norms = reads, blocks or {}, whole_norms
        self.batch_idx = 0
        self.logs: list[Logged] = []
        self._logged: list[torch.Tensor] = []
        self._runs = False  # whether the step's method is running, not its backward pass
        self.metrics = MetricRecorder(module, self.name)
        self.digest: str | None = None
        self.known: str | None = None

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss, the logged tensors and the arguments of metric objects. `plain` describes them."""
        results = (_loss_of(self._call(leaves)), *self._logged, *self.metrics.tensors)
        if self.reads is not None and self.keeps:
            self.reads.goes_back(self.name, leaves[len(self._batch_spec.specs) :])
        for buffer in self.module.buffers():
            # The step has assigned a value without detach() to the buffer. Detach the buffer, because the
            # backward pass begins only at the loss.
            if buffer.requires_grad:
                buffer.detach_()
        return results

    def _call(self, leaves: tuple[torch.Tensor, ...], dataloader_idx: int | None = None) -> Any:
        """Rebuild the batch from tensors, run the user's step on it, and return the result.

        Record the changes that the step makes to its batch.

        Raises:
            CaptureError: the step has changed the module's Python state, or has caught an error of the
                capture. The contexts raise further errors.
        """
        self.logs, self._logged = [], []  # the tracer runs the step more than once
        step: Callable[..., Any] = getattr(self.module, self.name)
        batch_idx: Any = self.batch_idx
        running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        count = len(self._batch_spec.specs)
        if (reads := self.reads) is not None:
            batch_idx = reads.source("batch_idx", lambda: reads.history.batch_idx)
            running = reads.running(self.module, self.name, leaves[count:])
        values = reads is None
        leaves = leaves[:count]
        before = attributes(self.module)
        samples = next((x.shape[0] for x in leaves if x.ndim), 0)
        self.metrics.clear(samples)
        self._runs = True
        # Entered last, so that it removes its global hooks before `running` checks the guards on hooks.
        marked = marking(self.blocks)
        with (
            numbering(),
            exchanging(self._degrees),
            gathering(),
            self._context(),
            carrying(self.name, samples, user_line, reads) as carried,
            from_numpy(),
            contextlib.nullcontext() if reads is None else making_prompt_tokens(self.module, reads),
            contextlib.nullcontext() if values else _torchmetrics.without_values(),
            plain_batch_norms() if values else whole_batch_norms(self._whole_norms),
            running,
            recording_refusals() as caught,
            marked,
        ):
            batch = self._batch_spec.rebuild(leaves, carried, to_array if values else ArrayProxy)
            given, versions = contents(batch), [x._version for x in leaves]
            result = self._run(step, arguments(step, batch, batch_idx, dataloader_idx))
            if (refused := next(caught(), None)) is not None:
                raise refused
        self._runs = False
        if reads is not None:
            paths = self._batch_spec.paths
            written = [
                path for path, x, was in zip(paths, leaves, versions, strict=True) if x._version != was
            ]
            reads.batch_changes = BatchChanges.between(written, given, contents(batch))
        self._take_kept(before)
        if self.keeps:
            check_unchanged(self.module, before, self.name)
        return result

    def _run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call the user's method and return its result."""
        return step(*args)

    def _take_kept(self, before: list[Attribute]) -> None:
        """Record what the step has put into attributes. Only steps that may keep values implement this.

        Args:
            before: the attributes before the step.
        """

    @property
    def rebuild(self) -> Rebuild | None:
        """A function that builds the step's return value from its result tensors (see `StepCode.rebuild`).
        None for a training step."""
        return None

    @property
    def plain(self) -> tuple[Output, ...]:
        """The kind and names of each output of the last call."""
        return (Output(Kind.LOSS, (LOSS,)), *self._plain_logs, *self.metrics.outputs)

    @property
    def _plain_logs(self) -> Iterator[Output]:
        return (Output(Kind.LOG, (log.name,)) for log in self.logs if log.constant is None)

    def check_read(self, what: str) -> None:
        """Raise an error if the step reads from the Trainer a value that the step itself has logged.

        Logged values reach the Trainer after the captured step has run. Until then, the Trainer has the
        values of the previous step.

        Args:
            what: the expression that the step reads, such as `self.trainer.callback_metrics['loss']`.

        Raises:
            CaptureError: the step has logged the value that it reads.
        """
        found = re.fullmatch(r"(self\.trainer\.(callback|logged|progress_bar)_metrics)(.*)", what)
        if found is None:
            return
        whole, kind, keys = found.groups()
        key = re.match(r"(?:\[|\.get\()(?:'([^']*)'|\"([^\"]*)\")", keys)
        read = None if key is None else re.sub(r"/dataloader_idx_\d+$", "", key[1] or key[2] or "")
        for log in self.logs:
            visible = _visible(log, kind, self.name)
            if keys.endswith("()") and key is None and visible:
                raise CaptureError(
                    f"{user_line()}: {self.name} reads all of {whole} after self.log({log.name!r}), but a captured "
                    f"step logs only after it has run. Read single names, such as {whole}['val_loss'] [PIPER-C007]"
                )
            if read in visible:
                raise CaptureError(
                    f"{user_line()}: {self.name} reads {what} after self.log({log.name!r}), but a captured step "
                    "logs its values only after it has run. Keep the logged value in a variable and use that"
                    " [PIPER-C007]"
                )

    def log(self, name: str, value: Any, call: Mapping[str, Any]) -> None:
        """Record a call of `self.log`.

        A tensor, or a number that depends on tensors, becomes an output of the graph. Any other number is
        recorded as a constant, and a number that changes from step to step as a function that returns it. A
        metric object or its result is recorded in `metrics`.

        Args:
            call: the other arguments of `self.log` by name.

        Raises:
            CaptureError: a captured step cannot log this value, cannot log here, or has already logged a
                value under this name.
        """
        if not self._runs:
            raise CaptureError(
                f"{user_line()}: self.log({name!r}) is called in the backward pass, by a hook. A captured "
                "step can log only in its forward pass. Log the gradients of parameters in on_before_optimizer_step: "
                "self.log_dict(piper.grad_norm(self, 2)). Only an uncaptured step can log other gradients: "
                "PiperStrategy(capture='never') [PIPER-C007]"
            )
        # Lightning ignores the `batch_size` of a metric object.
        ignored = "batch_size" if isinstance(self.metrics.known(value), str) else None
        made = next((x for x, given in call.items() if x != ignored and _is_known_later(given)), None)
        if made is not None:
            raise CaptureError(
                f"{user_line()}: self.log({name!r}): the argument {made} is made from the value of a tensor, which is "
                "only known when the step runs. Give a value that does not depend on a tensor [PIPER-C007]"
            )
        if self._logs_metric(name, value, call):
            return
        kwargs = dict(call)
        function = kwargs.pop("reduce_fx", "mean")
        reduce = REDUCTIONS.get(getattr(function, "__wrapped__", function))
        if reduce is None:
            raise CaptureError(
                f"{user_line()}: self.log({name!r}): values reduced by reduce_fx={shown_function(call['reduce_fx'])} "
                "cannot be merged over microbatches. Give one of 'mean', 'sum', 'max' and 'min' [PIPER-C007]"
            )
        self._check_name(name)
        if type(value) is DataDependentTensor:
            value.refuse()
        if is_deferred(value):
            # Lightning also converts numbers to the default dtype.
            value = value.tensor.to(torch.get_default_dtype())
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise CaptureError(
                    f"{user_line()}: self.log({name!r}): the value has shape {tuple(value.shape)}. Log a "
                    "single number [PIPER-C007]"
                )
            self._logged.append(value.detach().reshape(()).clone())
            self.logs.append(Logged(name, reduce, kwargs, where=user_line()))
        elif type(value) is NumberProxy:
            self.logs.append(Logged(name, reduce, kwargs, constant=value.get))
        elif isinstance(value, numbers.Number):
            self.logs.append(Logged(name, reduce, kwargs, constant=float(value)))  # type: ignore[arg-type]
        else:
            raise CaptureError(
                f"{user_line()}: self.log({name!r}): {kind_of(value)} cannot be logged inside a "
                "captured step. Log a tensor, a number, or a metric object that is an attribute of the "
                "module or in its nn.ModuleList or nn.ModuleDict [PIPER-C007]"
            )

    def _logs_metric(self, name: str, value: Any, call: Mapping[str, Any]) -> bool:
        """Record the call if `value` is a metric object or its result, and return whether it is."""
        known = self.metrics.known(value)
        if known is not None:
            self._check_name(name)
            self.metrics.log(name, known, call, len(self.logs))
        return known is not None

    def _check_name(self, name: str) -> None:
        if any(entry.name == name for entry in self.logs) or self.metrics.logged(name):
            raise CaptureError(
                f"{user_line()}: self.log({name!r}) is called twice in one step. Give each call its own name"
                " [PIPER-C007]"
            )


def _is_known_later(value: Any) -> bool:
    """Return whether the value is a tensor, or made from one, so that it is only known when the step runs."""
    return isinstance(value, torch.Tensor) or holds_deferred(value)


def shown_function(function: Any) -> str:
    """Return a function for a message: its name, with its module if the function has one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", repr(function))
    return f"{module}.{name}" if module and name != "<lambda>" else name


def _visible(log: Logged, kind: str, step: str) -> set[str]:
    """Return the names under which a dict of the Trainer has a logged value right after the call of `self.log`,
    and not only at the end of an epoch.

    Args:
        log: the call of `self.log`.
        kind: the dict: `callback`, `logged` or `progress_bar`.
        step: the name of the step.
    """
    training = step == TracedStep.name
    default = {"on_step": training, "on_epoch": not training, "prog_bar": False, "logger": True}
    given = {k: v if (x := log.kwargs.get(k)) is None else bool(x) for k, v in default.items()}
    shown = {"callback": training, "logged": given["logger"], "progress_bar": given["prog_bar"]}[kind]
    if not (shown and given["on_step"]):
        return set()
    name = f"{log.name}_step" if given["on_epoch"] else log.name
    return {name, log.name} if kind == "callback" else {name}


def _loss_of(result: Any) -> torch.Tensor:
    """Return the loss in the return value of `training_step`, as a tensor without dimensions.

    Raises:
        CaptureError: The value is not the loss alone, or the loss is not a single number that depends on a
            trained parameter.
    """
    if isinstance(result, Mapping):
        if set(result) != {"loss"}:
            raise CaptureError(
                f"training_step returns a dict with keys {sorted(map(str, result))}. Return only "
                "the loss, or {'loss': loss}. Log other values with self.log [PIPER-C006]"
            )
        result = result["loss"]
    if type(result) is DataDependentTensor:
        result.refuse_to("the loss")
    if result is None:
        raise CaptureError(SKIPPED)
    if not isinstance(result, torch.Tensor):
        what = "the result of a metric object" if type(result) is MetricValueProxy else kind_of(result)
        raise CaptureError(f"training_step returns {what}. Return the loss, a scalar tensor [PIPER-C006]")
    if result.numel() != 1:
        raise CaptureError(
            f"training_step returns a loss of shape {tuple(result.shape)}. Return a scalar, such as "
            "loss.mean() [PIPER-C006]"
        )
    if torch.is_grad_enabled() and not result.requires_grad:
        raise CaptureError(
            "training_step returns a loss with requires_grad=False. Compute it from a parameter with "
            "requires_grad=True, without detach() and no_grad() [PIPER-C006]"
        )
    return result.reshape(())


def _sized(step: TracedStep) -> None:
    """Guard the number of processes, because the step reads it."""
    if step.reads is not None:
        step.reads.note_value("torch.distributed.get_world_size()", torch.distributed.get_world_size)


def _communicates(step: str) -> CaptureError:
    """Return the error for a step that communicates with other processes."""
    error = CaptureError(
        f"{user_line()}: {step} communicates with other processes (torch.distributed), which a captured step "
        "cannot do. To join the samples of all processes, use piper.gather_samples. Otherwise communicate in a hook, "
        "such as on_train_batch_end [PIPER-C010]"
    )
    error.communicates = True
    return error


def _refuse_metric(step: TracedStep, error: BaseException) -> None:
    """Raise an error if `error` comes from a metric object of torchmetrics that is not a submodule, or from a method
    of a submodule that a captured step cannot call. Otherwise do nothing.

    Raises:
        CaptureError: `error` comes from such a metric object or method. The message names the line that runs it.
    """
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if "/torchmetrics/metric.py" in frame.f_code.co_filename
    ]
    inside = {id(part) for part in step.module.modules()}
    if frames and id(frames[0].f_locals.get("self")) in inside:
        if (name := frames[0].f_code.co_name) in ("sync", "unsync", "sync_context", "plot"):
            raise CaptureError(
                f"{user_line(error)}: {step.name} calls {name}() of a metric object, which a captured step cannot do. "
                "Call it in a hook, such as on_train_batch_end [PIPER-C008]"
            ) from error
    elif frames:
        raise CaptureError(
            f"{user_line(error)}: {step.name} runs a metric object that is not an attribute of the module, "
            "which a captured step cannot do. Keep metric objects as attributes of the module (self.acc = "
            "...), or in an nn.ModuleList or nn.ModuleDict [PIPER-C008]"
        ) from error
