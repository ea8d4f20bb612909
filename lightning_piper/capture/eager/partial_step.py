"""A partly captured training step: Piper captures the calls of annotated modules. All other code runs
uncaptured (`remainder`).

Piper uses this if it cannot capture the step as a whole. The trace follows the step's code up to the last
captured call. The graph also has the operations of the step's code before this call, because captured calls
may read their results. Then the uncaptured part runs the user's `training_step` once more, from its beginning
to its end. In this run, the captured calls only return their captured results.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from lightning_piper.annotate import opened
from lightning_piper.capture.eager.eager_remainder import CallResult, EagerRemainder, called
from lightning_piper.capture.eager.outer_calls import Key, ModuleCall, ModuleCallLog, replacing_outermost
from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.joint.remainder_operation import REMAINDER, REMAINDER_BACKWARD, remainder
from lightning_piper.capture.joint.sizes import Specs
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.proxies.batch import BatchSpec, flatten
from lightning_piper.capture.python_state.state_reads import History, StateReads, without_drawing
from lightning_piper.capture.steps.captured_step import CapturedStep
from lightning_piper.capture.steps.settled_trace import TraceArguments
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.tracing.step_trace import TracedStep, trace
from lightning_piper.errors import CaptureError
from lightning_piper.ir.boxed_code import RUNS_KEY

CALL_KEY = "piper_call"  # metadata key of operations that are traced inside of a captured call


class PartlyCaptured(CapturedStep):
    """A `CapturedStep` that captures only module calls. `capture` explains its arguments.

    Attributes:
        calls: the captured calls, in order.
        remainder: runs the uncaptured code.

    Raises:
        CaptureError: the step calls no module with annotated code before the code that cannot be captured.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_spec: BatchSpec,
        device: torch.device,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        history: History | None = None,
        whole_norms: bool = False,
    ) -> None:
        super().__init__(module, batch_spec, device, context, history, whole_norms)
        # This trace also reads Python state in code that runs uncaptured. Guards are needed only for the
        # captured part, so these reads are not recorded in `self.reads`.
        reads = StateReads(dataclasses.replace(self.reads.history))
        followed = _FollowedStep(module, batch_spec, context, (), reads, self._blocks, whole_norms)
        # The trace ends with an error at the line that cannot be captured.
        failed = True
        with contextlib.suppress(Exception), without_drawing():
            trace(followed, self._specs(self.size), device, {})
            failed = False
        self.calls = tuple(followed.followed.captured)
        if not self.calls:
            when, move = (
                " before the code that cannot be captured",
                ", and move that code after these calls",
            )
            raise CaptureError(
                f"training_step calls no annotated module{when if failed else ''}. Annotate modules that it calls with "
                f"piper.annotate_modules, because annotations in the step do not count here{move if failed else ''} "
                "[PIPER-C022]"
            )
        # The uncaptured code may read the parameters and buffers that belong to no captured call.
        owned = [name for name in self.canonical if not any(name in call.has for call in self.calls)]
        free = dict.fromkeys(self.canonical[name] for name in owned)
        trained = [name for name in free if name in self.params and self.params[name].requires_grad]
        others = [name for name in free if name not in trained]
        self.remainder = EagerRemainder(
            module, batch_spec, context, self.reads.history, trained, others, self.canonical
        )

    @property
    def executed(self) -> str:  # type: ignore[override]
        calls = dict.fromkeys(called(call.key) for call in self.calls)
        return f"training_step runs uncaptured, except {', '.join(calls)}"

    def uncaptured(self) -> TracedStep:
        return _WholeStep(self.module, self.batch_spec, self.context)

    @property
    def draws(self) -> bool:
        """Whether the captured calls draw random numbers. Draws of the uncaptured code do not count."""
        codes = self.at(self.size).code.values()
        return any(
            _torch.is_random(node) and node.target is not REMAINDER
            for code in codes
            for node in code.graph.nodes
        )

    def _step(self, degrees: tuple[int, ...]) -> TracedStep:
        about = (self.batch_spec, self.context, degrees, self.reads, self._blocks, self._whole_norms)
        return _RemainderStep(self.module, *about, calls=self.calls, remainder=self.remainder)

    def _trace(self, arguments: TraceArguments) -> tuple[TracedGraph, Specs, TracedStep]:
        """Trace the step as `CapturedStep` does. Then set the methods of `remainder` as the functions that run
        instead of the graph's operations for the uncaptured code (`RUNS_KEY`). Add to `remainder.captured`
        the parameters that captured operations read.

        Raises:
            CaptureError: the code outside of captured calls draws random numbers, or changes a buffer or the
                batch in place.
        """
        traced, specs, step = super()._trace(arguments)
        for node in traced.graph.nodes:
            desc = node.meta.get("desc")
            if isinstance(desc, _torch.ParamAOTInput) and any(
                user.target not in (REMAINDER, REMAINDER_BACKWARD) for user in node.users
            ):
                self.remainder.captured.add(self.canonical[desc.target.removeprefix("module.")])
            if node.target is REMAINDER:
                node.meta[RUNS_KEY] = self.remainder.forward
            elif node.target is REMAINDER_BACKWARD:
                node.meta[RUNS_KEY] = self.remainder.backward
            elif (
                _torch.is_random(node)
                and not _torch.is_backward(node)
                and CALL_KEY not in node.meta.get("custom", {})
            ):
                raise CaptureError(
                    f"{own_line(node)}: training_step draws random numbers before it calls a captured module. "
                    "This code runs once more uncaptured, and would draw other numbers. Draw them in that module, "
                    "or in the collate function [PIPER-C005]"
                )
        _refuse_changed_buffers(traced)
        return traced, specs, step


def _refuse_changed_buffers(traced: TracedGraph) -> None:
    """Check that the step changes buffers and the batch only inside of captured calls.

    Raises:
        CaptureError: The step changes a buffer or the batch outside of captured calls.
    """
    results = traced.graph.output_node()
    for node, desc in zip(results.args[0], results.meta["desc"], strict=True):  # type: ignore[arg-type]
        if (
            isinstance(desc, _torch.InputMutationAOTOutput)
            and CALL_KEY not in node.meta.get("custom", {})
            and not isinstance(
                desc.mutated_input, _torch.ParamAOTInput
            )  # another error refuses any such change
        ):
            target = getattr(desc.mutated_input, "target", None)
            name = "its batch" if target is None else f"the buffer {target.removeprefix('module.')}"
            fix = (
                "Change a clone of the tensor (x = x.clone())"
                if target is None
                else "Make the change in that module"
            )
            raise CaptureError(
                f"{own_line(node)}: training_step changes {name} before it calls a captured module. This code "
                f"runs once more uncaptured, and would change {name} twice. {fix} [PIPER-C022]"
            )


class _WholeStep(TracedStep):
    """The step as one device runs it, including code that cannot be captured. It returns the loss only, and
    calls of `self.log` have no effect. `PartlyCaptured.uncaptured` returns it."""

    keeps = False

    def log(self, name: str, value: Any, call: Mapping[str, Any]) -> None:
        pass

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self._call(leaves)
        return (made["loss"] if isinstance(made, Mapping) else made,)


class _FollowedStep(TracedStep):
    """The step in a trace that finds the step's module calls up to the line that cannot be captured. After
    the trace, `followed` has these calls."""

    has_tracing_run = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.followed = ModuleCallLog()

    def _run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        with self.followed.following(self.module):
            return step(*args)


class _TraceEnd(BaseException):
    """Raised to leave the step's code after the last captured call. It derives from `BaseException`, so that
    `except Exception` in the step's code does not catch it."""


class _RemainderStep(TracedStep):
    """A step that consists of the captured calls, and the uncaptured code as one operation.

    Args:
        calls: the captured calls.
        remainder: the uncaptured code. The trace stores the structure of the calls' results there.
    """

    has_tracing_run = False

    def __init__(self, *args: Any, calls: Sequence[ModuleCall], remainder: EagerRemainder) -> None:
        super().__init__(*args)
        self._calls, self._remainder = calls, remainder
        # the annotation that was opened last, up to the last captured call
        self._last: Mapping[str, Any] = {}

    def _run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the step up to the last captured call, and return {key of a captured call: its result}.

        Raises:
            CaptureError: the step has ended without making one of the captured calls.
        """
        wanted, returned = {call.key for call in self._calls}, {}

        def handle(key: Key, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
            """Make the call. If it is a captured call, mark its operations with `CALL_KEY`, and store its
            result. After the last captured call, leave the step's code."""
            if key not in wanted:
                return call()
            with fx_traceback.annotate({CALL_KEY: True}):
                returned[key] = call()
            self._last = opened().last
            if key == self._calls[-1].key:
                raise _TraceEnd
            return returned[key]

        with contextlib.suppress(_TraceEnd), replacing_outermost(self.module, handle):
            step(*args)
        if missing := wanted - returned.keys():
            raise CaptureError(
                f"training_step calls {called(min(missing))} for some batches only. Call it for every batch"
                " [PIPER-C022]"
            )
        return returned

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss alone, which is the result of the operation that stands for the uncaptured code.

        Args:
            leaves: the tensors of the batch, then the Python numbers that are inputs of the trace.

        Raises:
            CaptureError: no input of the uncaptured code needs a gradient. Or a captured call is missing, or the
                structure of its result differs from an earlier trace.
        """
        returned = self._call(leaves)
        self.logs, self._logged = [], []  # only the uncaptured code logs
        self.metrics.clear()
        found = [self._returned(call, returned[call.key]) for call in self._calls]
        # `flowing` and `still`: the inputs of the uncaptured code with and without a gradient. They have the
        # order that `EagerRemainder.forward` expects.
        flowing = [
            x for tensors, known in found for x, flows in zip(tensors, known.trained, strict=True) if flows
        ]
        still = [
            x
            for tensors, known in found
            for x, flows in zip(tensors, known.trained, strict=True)
            if not flows
        ]
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        flowing += [state[name] for name in self._remainder.trained]
        still += [state[name] for name in self._remainder.others]
        if not flowing:
            raise CaptureError(
                "the loss of training_step depends on no trained parameter. Look for no_grad, detach() and frozen "
                "parameters in the annotated modules [PIPER-C022]"
            )
        with fx_traceback.annotate(dict(self._last)):
            loss, _ = remainder(flowing, [*still, *leaves[: len(self._batch_spec.specs)]], _dtype(flowing))
        return (loss,)

    def _returned(self, call: ModuleCall, made: Any) -> tuple[list[torch.Tensor], CallResult]:
        """Return the tensors of a call's result that the uncaptured code receives, and the structure of the
        result. If only other captured calls read the result, there are no such tensors.

        The structure in the first trace is stored in `EagerRemainder.returned`, and is returned in all later
        traces.

        Args:
            made: the result of the call.

        Raises:
            CaptureError: the structure of the result differs from the first trace.
        """
        if call.handed_on:
            self._remainder.returned[call.key] = CallResult(None)
            return [], CallResult(None)
        tensors, spec = flatten(made, f"result of self.{call.key[0]}")
        known = self._remainder.returned.setdefault(
            call.key, CallResult(spec, tuple(x.requires_grad for x in tensors))
        )
        if known.spec is None or known.spec.structure != spec.structure:
            raise CaptureError(
                f"{called(call.key)} returns a different structure or Python value for another batch or "
                "microbatch. Only the values and shapes of tensors may differ: return a tensor in place of such a value "
                "[PIPER-C022]"
            )
        return tensors, known


def _dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the loss: float32, promoted with the dtypes of all `tensors`. For example, it is
    float64 if one of them is, and float32 if all are bfloat16."""
    found = torch.float32
    for x in tensors:
        found = torch.promote_types(found, x.dtype)
    return found
