"""Record start and end of every instruction of one device in preallocated memory.

On a CPU, instructions run one after the other in plan order, so the recorder reads a clock before and after
each instruction. On CUDA, the host only issues instructions, so events on an instruction's stream measure
when the instruction ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_piper.accelerators import synchronize
from lightning_piper.plan.instructions import Instruction, WaitWork
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime import Executor
from lightning_piper.runtime.transport import Bound

now = time.monotonic_ns


@dataclass(frozen=True)
class InstructionTimes:
    """The times of one step's instructions in one process.

    Attributes:
        start, end: For each instruction of the plan, nanoseconds of the process's monotonic clock, or 0 if it
            did not run.
    """

    start: list[int]
    end: list[int]


# Gets the index of an instruction and its callables (`Bound`), and returns callables that also measure the
# time.
_Binder = Callable[[int, list[Bound]], list[Bound]]


class StepRecorder:
    """A recorder of an executor's steps. It records while it is the executor's `observer`.

    Args:
        executor: The executor.
        device: The torch device of its tensors.
        labels: Whether to label the operators and kernels that torch.profiler records with the node that runs
            them.
    """

    def __init__(self, executor: Executor, device: torch.device, labels: bool = False) -> None:
        self._executor, self._plan = executor, executor.plan
        self._accelerator = device if device.type != "cpu" else None
        self._labels = labels
        self._room = InstructionTimes([0] * len(self._plan.instructions), [0] * len(self._plan.instructions))
        self._nothing = tuple(self._room.start)  # zeros, to clear `_room`
        # Id of the executor's code -> the code with clocks. On a CPU it is made once.
        self._bound: dict[int, list[Bound]] = {}
        # Returns the times of the latest step; None if `take` has returned it.
        self._take: Callable[[], InstructionTimes] | None = None

    def attach(self) -> None:
        """Record from the next step on."""
        self._executor.observer = self._observe

    def detach(self) -> None:
        """Stop recording from the next step on. An executor without observer has no overhead."""
        self._executor.observer = None

    def take(self) -> Callable[[], InstructionTimes]:
        """Return a function that returns the times of the latest step. Call `take` once after each step.

        On CUDA, the returned function waits for the device, so call it after all recorded steps.
        """
        assert self._take is not None
        found, self._take = self._take, None
        if self._accelerator is not None:
            return found
        times = found()
        return lambda: times

    def _observe(self, code: Sequence[Bound], source: Sequence[int]) -> list[Bound]:
        """Return the code that the executor runs in the next step: its own code, with each instruction timed.
        On a CPU, also clear the times of the step before.

        Args:
            code: The code: one or more callables for each instruction.
            source: For each callable, the index of its instruction in the plan.
        """
        if self._accelerator is not None:
            bind, self._take = _on_streams(self._plan, self._accelerator)
            return self._observed(code, source, bind)
        if id(code) not in self._bound:
            self._bound[id(code)] = self._observed(code, source, partial(_clocked, self._plan, self._room))
        self._room.start[:] = self._room.end[:] = self._nothing
        self._take = self._copy
        return self._bound[id(code)]

    def _copy(self) -> InstructionTimes:
        return InstructionTimes(self._room.start[:], self._room.end[:])

    def _observed(self, code: Sequence[Bound], source: Sequence[int], bind: _Binder) -> list[Bound]:
        """Return the callables of a step, with the callables of each instruction wrapped by `bind`. The
        switch to another stream is not measured."""
        groups: dict[int, list[Bound]] = {}
        for i, bound in zip(source, code, strict=True):
            groups.setdefault(i, []).append(bound)
        observed: list[Bound] = []
        stream = None
        for i, parts in groups.items():
            instruction = self._plan.instructions[i]
            # The first callable switches the stream.
            switched = self._accelerator is not None and instruction.stream != stream
            stream = instruction.stream
            parts[switched:] = bind(i, parts[switched:])
            observed += parts if not self._labels else [self._labeled(instruction, part) for part in parts]
        return observed

    def _labeled(self, instruction: Instruction, bound: Bound) -> Bound:
        name = f"%{instruction.node} {instruction.op} {instruction.label}"

        def labeled() -> object:
            with torch.profiler.record_function(name):
                return bound()

        return labeled


def _clocked(plan: Plan, room: InstructionTimes, i: int, parts: list[Bound]) -> list[Bound]:
    """Return the callables of instruction i, which run on the host and measure it. The first callable sets
    the instruction's start in `room`, and the last callable sets its end."""
    start, end, first, last = room.start, room.end, parts[0], parts[-1]

    def timed() -> object:
        start[i] = now()
        result = first()
        end[i] = now()
        return result

    def tried() -> object:
        # With several devices in one process, a wait may fail and run again later. Keep its first start.
        start[i] = start[i] or now()
        result = first()
        end[i] = now()
        return result

    def begun() -> object:
        start[i] = now()
        return first()

    def ended() -> object:
        result = last()
        end[i] = now()
        return result

    if len(parts) > 1:
        return [begun, *parts[1:-1], ended]
    return [tried if isinstance(plan.instructions[i], WaitWork) else timed]


def _on_streams(plan: Plan, device: torch.device) -> tuple[_Binder, Callable[[], InstructionTimes]]:
    """Return two functions that measure instructions by events of the accelerator. The first function wraps
    the callables of an instruction. The second function returns the times of all instructions."""
    events: dict[int, tuple[Any, Any]] = {}
    origin = torch.Event(device, enable_timing=True)
    synchronize(device)  # the event and the clock below then mark the same moment
    origin.record(torch.accelerator.current_stream(device))
    origin.synchronize()
    zero = now()

    def bind(i: int, parts: list[Bound]) -> list[Bound]:
        """Return the callables of instruction i, with an event before the first and an event after the
        last."""
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        events[i] = (begin, end)
        first, last = parts[0], parts[-1]
        tried = False

        def timed() -> object:
            nonlocal tried
            if not tried:
                begin.record()
                tried = True
            result = first()
            if len(parts) == 1:
                end.record()
            return result

        def ended() -> object:
            result = last()
            end.record()
            return result

        return [timed] if len(parts) == 1 else [timed, *parts[1:-1], ended]

    def take() -> InstructionTimes:
        synchronize(device)
        found = InstructionTimes([0] * len(plan.instructions), [0] * len(plan.instructions))
        for i, pair in events.items():
            found.start[i], found.end[i] = (zero + round(origin.elapsed_time(event) * 1e6) for event in pair)
        return found

    return bind, take
