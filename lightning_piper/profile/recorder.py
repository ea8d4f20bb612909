"""Start and end of every instruction of one device, in preallocated room.

On a CPU, instructions run one after the other, in the plan's order, and a clock is read before and after each. On CUDA they are
only issued then: events on the instruction's stream say when it really ran.
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
class Times:
    """When the instructions of one step ran in one process.

    Attributes:
        start, end: of each instruction of the plan, in nanoseconds of the process's monotonic clock; 0 where it did not run.
    """

    start: list[int]
    end: list[int]


_Binder = Callable[[int, list[Bound]], list[Bound]]


class Recorder:
    """Records an executor's steps while it is its `observer`.

    Args:
        executor: the executor; `attach` and `detach` do the rest.
        device: where its tensors are.
        labels: let torch.profiler see which node each operator and kernel belongs to.
    """

    def __init__(self, executor: Executor, device: torch.device, labels: bool = False) -> None:
        self._executor, self._plan = executor, executor.plan
        self._accelerator = device if device.type != "cpu" else None
        self._labels = labels
        self._room = Times([0] * len(self._plan.instructions), [0] * len(self._plan.instructions))
        self._nothing = tuple(self._room.start)
        self._bound: dict[int, list[Bound]] = {}  # id of the executor's code -> the same with clocks; on a CPU it is made once
        self._take: Callable[[], Times] | None = None

    def attach(self) -> None:
        """From the next step on, record."""
        self._executor.observer = self._observe

    def detach(self) -> None:
        """From the next step on, cost nothing."""
        self._executor.observer = None

    def take(self) -> Callable[[], Times]:
        """The times of the last step; on CUDA asking for them waits for the device, so that is left for later."""
        assert self._take is not None
        found, self._take = self._take, None
        if self._accelerator is not None:
            return found
        times = found()
        return lambda: times

    def _observe(self, code: Sequence[Bound], source: Sequence[int]) -> list[Bound]:
        if self._accelerator is not None:
            bind, self._take = _on_streams(self._plan, self._accelerator)
            return self._observed(code, source, bind)
        if id(code) not in self._bound:
            self._bound[id(code)] = self._observed(code, source, partial(_clocked, self._plan, self._room))
        self._room.start[:] = self._room.end[:] = self._nothing
        self._take = self._copy
        return self._bound[id(code)]

    def _copy(self) -> Times:
        return Times(self._room.start[:], self._room.end[:])

    def _observed(self, code: Sequence[Bound], source: Sequence[int], bind: _Binder) -> list[Bound]:
        groups: dict[int, list[Bound]] = {}
        for i, bound in zip(source, code, strict=True):
            groups.setdefault(i, []).append(bound)
        observed: list[Bound] = []
        stream = None
        for i, parts in groups.items():
            instruction = self._plan.instructions[i]
            switched = self._accelerator is not None and instruction.stream != stream  # the first part goes over to the stream
            stream = instruction.stream
            parts[switched:] = bind(i, parts[switched:])
            observed += parts if not self._labels else [self._labelled(instruction, part) for part in parts]
        return observed

    def _labelled(self, instruction: Instruction, bound: Bound) -> Bound:
        name = f"%{instruction.node} {instruction.op} {instruction.label}"

        def labelled() -> object:
            with torch.profiler.record_function(name):
                return bound()

        return labelled


def _clocked(plan: Plan, room: Times, i: int, parts: list[Bound]) -> list[Bound]:
    """What is bound of instruction i, with a clock read before and after."""
    start, end, first, last = room.start, room.end, parts[0], parts[-1]

    def timed() -> object:
        start[i] = now()
        result = first()
        end[i] = now()
        return result

    def tried() -> object:
        start[i] = start[i] or now()  # another device of this process may have to go on first
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


def _on_streams(plan: Plan, device: torch.device) -> tuple[_Binder, Callable[[], Times]]:
    events: dict[int, tuple[Any, Any]] = {}
    origin = torch.Event(device, enable_timing=True)
    synchronize(device)  # the event and the clock below are one moment
    origin.record(torch.accelerator.current_stream(device))
    origin.synchronize()
    zero = now()

    def bind(i: int, parts: list[Bound]) -> list[Bound]:
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

    def take() -> Times:
        synchronize(device)
        found = Times([0] * len(plan.instructions), [0] * len(plan.instructions))
        for i, pair in events.items():
            found.start[i], found.end[i] = (zero + round(origin.elapsed_time(event) * 1e6) for event in pair)
        return found

    return bind, take
