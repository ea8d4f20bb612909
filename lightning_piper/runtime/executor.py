"""`Executor`: a plan bound to tensors, code and a transport. A step calls one bound instruction after
another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_piper.accelerators import with_index
from lightning_piper.common.limits import shown
from lightning_piper.common.units import counted
from lightning_piper.errors import ExecutionError, OutOfMemoryError, PiperError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.regions import Step
from lightning_piper.ops.base import BINDERS, Binding
from lightning_piper.ops.early_update import GradientReceiver
from lightning_piper.plan import instructions as ins
from lightning_piper.plan.instructions import Instruction
from lightning_piper.plan.no_sync_plan import keys_of, no_sync_instructions
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.chunk_graphs import ChunkGraphs
from lightning_piper.runtime.chunks import ChunkBinder, Compiler
from lightning_piper.runtime.gradient_buffer import GradientBuffer, bind_add_accumulated, bind_keep
from lightning_piper.runtime.piggyback import DigestMismatch
from lightning_piper.runtime.step_outputs import StepOutputs
from lightning_piper.runtime.streams import streams_of
from lightning_piper.runtime.transport import BLOCKED, Bound, Slots, Transport


@dataclass(frozen=True)
class StepResult:
    """The results of one device's step.

    Attributes:
        grads: Maps the names of the parameters updated on this device to the gradients of the weighted loss
            times `scale`. If the device has a shard of a parameter, this is the one-dimensional gradient of
            its local shard (`Bucket.local_shards`). No other tensor has the same elements in memory, so the
            caller may change the gradients in place. Empty after a batch before the last one of an
            accumulation, if all gradients wait for the last batch.
        metrics: A float64 vector of the step's loss and logged tensors, unscaled, in the order of
            `ops.metrics.metric_names`.
        results: Maps names to the tensors that a forward-only step returns (`StepCode.rebuild`). The tensors
            cover this replica's samples.
    """

    grads: dict[str, torch.Tensor]
    metrics: torch.Tensor
    results: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


# Receives the bound instructions of a step and the plan index of each instruction. Returns as many functions,
# in the same order, which the step calls instead.
Observer = Callable[[Sequence[Bound], Sequence[int]], list[Bound]]


class Executor:
    """An executor that runs one device's plan, step after step.

    Args:
        plan: The plan of this device.
        step: The captured step, which has the chunks' code.
        params, buffers: Tensors by canonical name, on `device`; at least the tensors that the plan's chunks
            read. The executor binds the tensors once. The values may change in place, but do not replace the
            tensors.
        transport: The connection of this device to the other devices.
        device: The torch device of the tensors.
        shards: For each bucket in `Plan.shards`, the flat tensor that this device keeps of it between steps.
            The flat tensor is either the whole bucket, in which only this device's shard is up to date, or
            this shard alone. Bound once, like `params`.
        gradient_buffer: The gradients that all steps of an accumulation except the last keep for the sum
            over replicas. The executors of one device for different batch sizes share one buffer.
        compiler: Returns the function that runs instead of a chunk's code (default: None, the code runs
            uncompiled).
        watch: Returns the function that runs instead of a chunk's code and gives the same bits, such as
            `Watch.function` (default: None).
        early_updates: Receives the gradients of the plan's early updates (default: None, the plan computes no
            update).
        cuda_graphs: Whether to capture passes into graphs after the first step, and to replay the graphs in later
            steps (`chunk_graphs`).

    Attributes:
        plan: The plan that was passed.
        graphs: The graphs of passes; None without `cuda_graphs`.
        accumulates: Whether the plan has gradients that are kept until the last batch of an accumulation.
        observer: Called at the beginning of each step; returns the functions to call in place of the
            bound instructions. None: the step calls the bound instructions.
        position: The index of the next bound instruction of the current step. Before the first step and after
            each step, it is the number of bound instructions.

    Raises:
        ExecutionError: A parameter, a buffer or a shard is missing, the transport is not connected for this
            plan, or an instruction cannot be bound.
    """

    def __init__(
        self,
        plan: Plan,
        step: Step,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        transport: Transport,
        device: torch.device,
        shards: Mapping[Bucket, torch.Tensor] | None = None,
        gradient_buffer: GradientBuffer | None = None,
        compiler: Compiler | None = None,
        watch: Compiler | None = None,
        early_updates: GradientReceiver | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        device = with_index(device)
        self.plan = plan
        self._specs = step.batch_specs_at(plan.local_batch_size)
        self._device = device
        self._slots: Slots = [None] * plan.slots
        self._endpoint = transport.endpoint(plan, device)
        self.graphs = ChunkGraphs(plan, device, self._endpoint.hands_over) if cuda_graphs else None
        self._chunks = ChunkBinder(
            plan,
            step,
            params,
            buffers,
            self._slots,
            device,
            self._endpoint.flat,
            compiler,
            watch,
            self.graphs,
        )
        self._step_outputs = StepOutputs(buffers, self._chunks.given)
        self._binding = Binding(
            self._slots,
            device,
            plan.device,
            self._endpoint,
            _checked(plan, shards or {}),
            self._chunks,
            self._step_outputs,
            early_updates,
        )
        self._streams = streams_of(plan, device, own_compute=self._endpoint.hands_over)
        self._gradient_buffer: GradientBuffer = {} if gradient_buffer is None else gradient_buffer
        self._buffer_keys = keys_of(plan)
        self.accumulates = bool(self._buffer_keys)
        bound = [self._bind(instruction) for instruction in plan.instructions]
        # whether the step is the last one of an accumulation -> bound instructions, plan index of each
        self._variants = {True: self._assembled(bound, last=True)}
        self._variants[False] = self._assembled(bound, last=False) if plan.sync_only else self._variants[True]
        self._code, self._source = self._variants[True]
        self.observer: Observer | None = None
        self.position = len(self._code)  # index of the next bound instruction
        self._running = False

    def _assembled(self, bound: Sequence[Bound | None], last: bool) -> tuple[list[Bound], list[int]]:
        """Return the functions that a step calls in order, and the plan index of each function.

        If an instruction is on a different stream than the instruction before, a function that switches
        streams precedes it. It has the same plan index.

        Args:
            bound: For each instruction of the plan, the function that runs it, or None if there is nothing to
                run.
            last: Whether the step is the last one of an accumulation.
        """
        code: list[Bound] = []
        source: list[int] = []
        stream = None
        for i, instruction in enumerate(self.plan.instructions) if last else no_sync_instructions(self.plan):
            parts: list[Bound | None] = [bound[i]]
            key = self._buffer_keys.get(instruction.node)
            if isinstance(instruction, ins.Keep) and key is not None:
                parts = [bind_keep(instruction, key, self._slots, self._gradient_buffer)]
            elif isinstance(instruction, ins.Collective) and key is not None:
                parts.insert(0, bind_add_accumulated(instruction, key, self._slots, self._gradient_buffer))
            elif not last and isinstance(instruction, ins.WaitEvent):
                parts = [self._streams.wait(instruction, self._slots)]
            parts = [part for part in parts if part is not None]
            if not parts:
                continue
            switch = self._streams.switch(instruction.stream) if instruction.stream != stream else None
            stream = instruction.stream
            for part in (switch, *parts):
                if part is not None:
                    code.append(part)
                    source.append(i)
        return code, source

    def _bind(self, instruction: Instruction) -> Bound | None:
        """Return the function that runs an instruction; None if there is nothing to do.

        Raises:
            ExecutionError: The instruction is unknown, or its binding returns neither a function nor None.
        """
        match instruction:
            case ins.Record():
                return self._streams.record(instruction)
            case ins.WaitEvent():
                return self._streams.wait(instruction, self._slots)
        bind = BINDERS.get(type(instruction))
        if bind is None:
            raise ExecutionError(
                f"device {self.plan.device}: unknown instruction {instruction.where}. If you added an "
                "operation, register its binding. Otherwise, report this [PIPER-X001]"
            )
        try:
            bound = bind(instruction, self._binding)
        except PiperError:
            raise
        except Exception as error:
            error.add_note(f"raised while {instruction.where} was bound on device {self.plan.device}")
            raise
        if bound is not None and not callable(bound):
            raise ExecutionError(
                f"device {self.plan.device}: the binding of {instruction.where} returned {shown(bound)}. "
                "Return a function, or None [PIPER-X001]"
            )
        return bound

    @property
    def carries_digest(self) -> bool:
        """Whether the processes would exchange a digest of each process in a step with `last=True`.

        False if no message of the plan can carry the digest, or if gradients of earlier batches are kept.
        """
        return self._endpoint.piggyback is not None and not self._gradient_buffer

    def step(
        self,
        leaves: Sequence[torch.Tensor],
        seed: int,
        scale: float = 1.0,
        last: bool = True,
        digest: int = 1,
    ) -> StepResult:
        """Run one training step. Afterwards the module's buffers have their new values.

        Args:
            leaves: The tensors of this replica's local batch (`StepCode.batch_specs`). Tensors on a different
                device are copied to this executor's device.
            seed: The seed of the step's random numbers, the same on all devices.
            scale: The factor on the gradient of the loss.
            last: Whether this is the last batch of a gradient accumulation. For earlier batches, this device
                accumulates the gradients that replicas sum, unless they are sharded. The last batch returns
                the sum over all batches.
            digest: A nonzero number that all processes must pass equally, if they exchange digests
                (`carries_digest`).

        Raises:
            ExecutionError: The batch does not fit the plan, or an instruction failed. For an instruction, the
                message names the device, the node and its directives, and the cause is the original error. If
                memory ran out, the error is an `OutOfMemoryError`.
            DigestMismatch: The processes passed different digests, or a process called `vote_abort`. Nothing
                has changed.
        """
        self.begin(leaves, seed, scale, last, digest)
        if not self.advance():
            raise ExecutionError(
                f"{self.waiting_for}. Run all devices of a LocalTransport together with run_local"
                " [PIPER-X001]"
            )
        if self._endpoint.piggyback is not None and not self._endpoint.piggyback.agreed:
            raise DigestMismatch
        return self.end()

    def vote_abort(self) -> None:
        """Take part in a step that this process cannot run but other processes may run. The step becomes void
        for all processes."""
        self._endpoint.vote_abort()

    def begin(
        self,
        leaves: Sequence[torch.Tensor],
        seed: int,
        scale: float = 1.0,
        last: bool = True,
        digest: int = 1,
    ) -> None:
        """Start a step, which `advance` then runs. If the step before failed, first clear slots, endpoint and
        gradient buffer.

        Raises:
            ExecutionError: The batch or the kept gradients do not fit the plan.
        """
        if self._running:
            self._slots[: self.plan.slots] = [None] * self.plan.slots
            self._endpoint.reset()
            self._gradient_buffer.clear()
        self._check(leaves)
        self._code, self._source = self._variants[last]
        if self.observer is not None:
            self._code = self.observer(self._code, self._source)
        self._running, self.position = True, 0
        if self._endpoint.piggyback is not None:
            self._endpoint.piggyback.begin(digest, last)
        leaves = [x.to(self._device) for x in leaves]
        self._step_outputs.open()
        self._chunks.begin(leaves, seed, scale)
        self._streams.begin()

    def _check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Check that the batch is like the captured one, and that this plan can add to the gradients kept so
        far.

        Raises:
            ExecutionError: The number, shapes or dtypes of the tensors differ, or the plan does not sum a
                bucket that has accumulated gradients.
        """
        if len(leaves) != len(self._specs):
            raise ExecutionError(
                f"the batch has {counted(len(leaves), 'tensor')}, but the step was captured with {len(self._specs)}. "
                "Pass a batch of the same structure, or compile for this batch [PIPER-X004]"
            )
        for i, (x, spec) in enumerate(zip(leaves, self._specs, strict=True)):
            if x.shape != spec.shape or x.dtype != spec.dtype:
                found = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
                raise ExecutionError(
                    f"tensor {i} of the batch is {found}, but the step was captured with {spec}. Pass a "
                    "batch of the same shapes and dtypes, or compile for this batch [PIPER-X004]"
                )
        lost = self._gradient_buffer.keys() - self._buffer_keys.values()
        if lost:
            names = sorted(name for bucket, *_ in lost for name in bucket.names)
            raise ExecutionError(
                f"device {self.plan.device} has accumulated gradients of {', '.join(names[:3])}, but the plan of this "
                "batch cannot add to them. Give all batches of an accumulation the same shapes (for example, "
                "drop_last=True in the DataLoader) [PIPER-X005]"
            )

    def advance(self) -> bool:
        """Run until the end of the step, or until an instruction must wait for another device of this
        process. Return whether the step has ended. If it has not, call `advance` again later.

        Raises:
            ExecutionError: An instruction failed. If memory ran out, the error is an `OutOfMemoryError`.
        """
        code, position, end = self._code, self.position, len(self._code)
        if position == end:
            return True
        self._streams.enter(self.plan.instructions[self._source[position]].stream)
        try:
            with torch.no_grad():
                while position < end:
                    if code[position]() is BLOCKED:
                        break
                    position += 1
        except Exception as error:
            where = self.plan.instructions[self._source[position]].where
            lacks_memory = isinstance(error, torch.OutOfMemoryError)
            kind, number = (OutOfMemoryError, "X002") if lacks_memory else (ExecutionError, "X001")
            said = str(error) or type(error).__name__
            shown_code = "" if isinstance(error, PiperError) and error.code else f" [PIPER-{number}]"
            raise kind(f"device {self.plan.device}: {where} failed: {said}{shown_code}") from error
        finally:
            self._streams.leave()
        self.position = position
        return position == end

    def end(self) -> StepResult:
        """Finish a step for which `advance` has returned True: copy the new values into the module's buffers,
        and return the results."""
        grads, metrics, results = self._step_outputs.empty()
        early = self._binding.early_updates
        self._streams.end(
            [*grads.values(), metrics, *results.values()], () if early is None else early.made()
        )
        # Reading the loss on an accelerator would make the host wait.
        reads = self._chunks.makes_loss and self._step_outputs.changes_buffers
        lost = reads and self._device.type == "cpu" and not math.isfinite(metrics[0].item())
        self._step_outputs.commit(keep=lost)
        self._chunks.end()
        if self.graphs is not None:
            with torch.no_grad():
                self.graphs.capture()
        self._running = False
        return StepResult(grads, metrics, results)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """If the loss of the last step was NaN or infinite, put back the buffers' values from before that
        step. Do nothing on an accelerator."""
        self._step_outputs.restore()

    @property
    def waiting_for(self) -> str:
        """Text for errors: the instruction at which this device waits, or that its step has ended. For
        example, "device 1 waits in recv of ..."."""
        if self.position == len(self._code):
            return f"device {self.plan.device} is done"
        return (
            f"device {self.plan.device} waits in {self.plan.instructions[self._source[self.position]].where}"
        )


def _checked(plan: Plan, shards: Mapping[Bucket, torch.Tensor]) -> Mapping[Bucket, torch.Tensor]:
    """Return `shards`, after a check of the flat tensor of each bucket in `plan.shards`.

    Raises:
        ExecutionError: A flat tensor is missing, or does not have the bucket's dtype or the right size. The
            whole bucket is needed if the plan keeps the whole bucket between steps, otherwise a shard.
    """
    for bucket, kept in plan.shards.items():
        wanted = bucket.numel if kept else bucket.shard
        found = shards.get(bucket)
        if found is None or found.shape != (wanted,) or found.dtype != bucket.dtype:
            names = ", ".join(bucket.names[:3])
            given = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise ExecutionError(
                f"device {plan.device}: the bucket of {names} needs a flat tensor {bucket.dtype}[{wanted}], "
                f"but got {given}. If you added an operation, check its `bind`. Otherwise, report this "
                "[PIPER-X001]"
            )
    return shards
