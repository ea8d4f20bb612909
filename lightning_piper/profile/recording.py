"""`Recording`: records the steps of one fit on a schedule and writes the files. The strategy calls it before
and after each training step."""

from __future__ import annotations

import errno
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_piper.accelerators import synchronize
from lightning_piper.common.units import counted
from lightning_piper.compiler import Compiled
from lightning_piper.profile.board import Board
from lightning_piper.profile.chrome import chrome_trace
from lightning_piper.profile.clock import Processes, clock_offsets
from lightning_piper.profile.files import (
    FOLDER,
    bytes_moved,
    exchange_boxes,
    plan_json,
    step_of,
    write_json,
    write_text,
)
from lightning_piper.profile.kernels import Kernels
from lightning_piper.profile.measured_trace import SECOND, Measured
from lightning_piper.profile.recorder import InstructionTimes, StepRecorder, now
from lightning_piper.profile.schedule import ACTIVE, OFF, Schedule
from lightning_piper.runtime import Executor
from lightning_piper.simulate import Network, Simulation, figures
from lightning_piper.simulate.durations import WorkDurations
from lightning_piper.simulate.engine import run_in_virtual_time


class ExecutableProgram(Protocol):
    """A compiled program with its executors; see `session.process_runtime.Prepared`."""

    @property
    def compiled(self) -> Compiled: ...

    @property
    def executors(self) -> Sequence[Executor]: ...


@dataclass
class _Step:
    """One recorded step of one process.

    Attributes:
        compiled: The program of the step.
        number: The number of its batch over the whole training.
        global_step: The trainer's `global_step` when `Recording.after` was called.
        begun: The start of the step on the process's clock, in nanoseconds.
        times: Device -> a function that returns the recorded times.
        batch_time: Seconds from the start of this step to the start of the next step; None if no step
            follows.
        exchange: Start and end of the exchange of local SGD after the step, on the process's clock in
            nanoseconds; None if no exchange follows.
    """

    compiled: Compiled
    number: int
    global_step: int
    begun: int
    times: dict[int, Callable[[], InstructionTimes]]
    batch_time: float | None = None
    exchange: tuple[int, int] | None = None


class Recording:
    """A recording of a fit's steps, which writes files to the trainer's log directory.

    All processes make the same calls. Rank 0 writes. During the active steps of a cycle, the recording sends
    and writes nothing. The constructor is collective.

    Args:
        schedule: The steps to record.
        trainer: The trainer, whose loggers and log directory are used.
        world: The processes.
        verification: The report of a verification by execution, on rank 0.

    Attributes:
        folder: The folder of the files.
        written: The step files, on rank 0.
        last: The figures of the last recorded step, on rank 0; None before it is written.
        exchanged: The bytes that this process exchanges in a round of local SGD; None without local SGD.
    """

    def __init__(
        self, schedule: Schedule, trainer: pl.Trainer, world: Processes, verification: str | None
    ) -> None:
        self._schedule, self._trainer, self._world, self._verification = (
            schedule,
            trainer,
            world,
            verification,
        )
        self.folder = Path(trainer.log_dir or trainer.default_root_dir) / FOLDER
        self.written: list[Path] = []
        self.last: Simulation | None = None
        self.exchanged: int | None = None
        self._count = 0  # steps so far
        self._begun = 0  # start of the current step, in nanoseconds
        self._recorders: dict[int, list[StepRecorder]] = {}  # id of a program -> recorders of its executors
        self._prepared: list[ExecutableProgram] = []  # keeps the objects alive whose ids are keys above
        self._steps: list[_Step] = []  # the steps of this cycle, not yet written
        self._plans: list[weakref.ref[Compiled]] = []  # the programs whose plan files are written
        self._board: Board | None = None
        self._kernels = Kernels() if schedule.kernels else None

    def before(self, prepared: ExecutableProgram) -> None:
        """Prepare to record the training step that follows, if the schedule says so. In the first step after
        a cycle's active steps, write these steps, which is collective.
        """
        if self._steps and self._steps[-1].batch_time is None:
            self._steps[-1].batch_time = (now() - self._begun) * SECOND
        phase = self._schedule.phase(self._count)
        if phase != ACTIVE or self._schedule.is_first_active(self._count):
            self._flush()
        if phase == ACTIVE and self._kernels is not None:
            self._kernels.start()
        if phase != OFF:
            for recorder in self._of(prepared):
                recorder.attach()
        self._begun = now()

    def after(self, prepared: ExecutableProgram, number: int) -> None:
        """Keep the recorded times of the training step that has run, if the step is active. `number` counts
        batches over the whole training."""
        phase = self._schedule.phase(self._count)
        self._count += 1
        if phase == OFF:
            return
        times = {}
        for executor, recorder in zip(prepared.executors, self._of(prepared), strict=True):
            recorder.detach()
            times[executor.plan.device] = recorder.take()
        if phase == ACTIVE:
            self._steps.append(
                _Step(prepared.compiled, number, self._trainer.global_step, self._begun, times)
            )

    def exchange(self, run: Callable[[], int]) -> None:
        """Run an exchange of local SGD. Rank 0 logs its seconds, which include the wait for the slowest replica, and
        its bytes. Exchanges are logged in the whole fit, because they are rarer than the steps of a cycle. If the step
        before the exchange is active, its record has the exchange.

        Args:
            run: Runs the exchange, and returns the bytes of the values that this process exchanges.
        """
        synchronize(self._world.device)
        start = now()
        nbytes = run()
        synchronize(self._world.device)
        end = now()
        if self._count and self._schedule.phase(self._count - 1) == ACTIVE:
            self._steps[-1].exchange = (start, end)
        if self._world.rank == 0:
            self._board = self._board or Board(self._trainer, self.folder.parent)
            values = {"piper/exchange_time": (end - start) * SECOND, "piper/exchange_bytes": float(nbytes)}
            self._board.values(values, self._trainer.global_step)

    def close(self) -> None:
        """Write the remaining steps at the end of the training. Warn if no step was recorded. Collective."""
        self._flush()
        first = self._schedule.wait + self._schedule.warmup
        if self._world.rank == 0 and 0 < self._count <= first:
            warnings.warn(
                f"PiperStrategy recorded no step: the schedule leaves out the first {counted(first, 'step')}, and the fit "
                f"had {counted(self._count, 'step')}. Fit more steps, or use piper.Schedule(wait=0, warmup=0) or "
                "piper.PiperProfiler(wait=0, warmup=0) [PIPER-W027]",
                stacklevel=2,
            )
        self._forget()
        if self._board is not None:
            self._board.close()

    def _forget(self) -> None:
        """Drop the recorders and the programs. Executors have tensors and communicators, so the strategy must
        be able to free them."""
        self._recorders.clear()
        self._prepared.clear()

    def _of(self, prepared: ExecutableProgram) -> list[StepRecorder]:
        """Return the recorders of a program's executors. The first call of a cycle makes them."""
        if id(prepared) not in self._recorders:
            self._prepared.append(prepared)
            labels = self._kernels is not None
            self._recorders[id(prepared)] = [
                StepRecorder(e, self._world.device, labels) for e in prepared.executors
            ]
        return self._recorders[id(prepared)]

    def _flush(self) -> None:
        """Gather the times of the recorded steps on rank 0, which writes their files, or warns if it cannot
        write. Collective."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        self._forget()
        offset = clock_offsets(self._world)[self._world.rank]
        own = [
            (
                {d: _shifted(times(), offset) for d, times in step.times.items()},
                step.exchange and tuple(time + offset for time in step.exchange),
            )
            for step in steps
        ]
        kernels = None if self._kernels is None else self._kernels.stop()
        found = self._world.gather((own, _fixed(self._trainer, steps[-1].compiled, self._world), kernels))
        if self._world.rank:
            return
        fixed = {str(d): sizes for _, part, _ in found for d, sizes in part.items()}
        try:
            for k, step in enumerate(steps):
                parts = [own[k] for own, _, _ in found]
                exchange = {rank: times for rank, (_, times) in enumerate(parts) if times is not None}
                self._write(
                    step, {d: times for part, _ in parts for d, times in part.items()}, fixed, exchange
                )
            for rank, (_, _, text) in enumerate(found):
                if text is not None:
                    write_text(self.folder / f"kernels_{steps[0].number}_rank{rank}.json", text)
        except OSError as error:  # a full disk should not end the training
            warnings.warn(
                f"the recording of steps could not be written to {self.folder}: {error}. {self._fix(error)} "
                "[PIPER-W021]",
                RuntimeWarning,
                stacklevel=2,
            )

    def _fix(self, error: OSError) -> str:
        """Return what to do if the folder cannot be written, as text."""
        if error.errno == errno.ENOSPC:
            return "Free space on the disk"
        logger = self._trainer.logger
        own = "" if logger is None else f"Give your {type(logger).__name__} another folder"
        if logger is None or logger.save_dir is None:
            return "Give another folder: Trainer(default_root_dir=...)"
        if logger.save_dir != self._trainer.default_root_dir:
            return own
        # Lightning may have made the logger, whose folder is then this folder.
        return f"{own}. If you did not give a logger, give another folder to Trainer(default_root_dir=...)"

    def _write(
        self,
        step: _Step,
        times: Mapping[int, InstructionTimes],
        fixed: Mapping[str, Mapping[str, int]],
        exchange: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Write the files of one step, and log its figures. Also write the plan if it is the first step of
        its program.

        Args:
            times: Device -> recorded times, all on the clock of rank 0.
            fixed: Device -> kind -> bytes that stay between steps; see `_fixed`.
            exchange: Device -> start and end of the exchange after the step, on the same clock.
        """
        dag, plans = step.compiled.dag, step.compiled.plans
        measured = Measured(dag, plans, times, serial=self._world.device.type == "cpu")
        real = self.last = figures(dag, plans, measured.trace)
        self._board = self._board or Board(self._trainer, self.folder.parent)
        durations = measured.durations()
        virtual = run_in_virtual_time(dag, plans, WorkDurations(dag, durations), Network())
        planned = figures(dag, plans, virtual)
        if all(step.compiled is not known() for known in self._plans):
            self._plans.append(weakref.ref(step.compiled))
            plan = plan_json(
                step.compiled, step_of(plans, planned, virtual), self._verification, self.exchanged
            )
            write_json(self.folder / self._name(step.compiled), plan)
            self._board.texts(plan, step.global_step)
        else:
            plan = plan_json(step.compiled, {}, None, self.exchanged)
        recorded = step_of(plans, real, measured.trace)
        after = {
            d: ((a - measured.zero) * SECOND, (b - measured.zero) * SECOND) for d, (a, b) in exchange.items()
        }
        recorded["boxes"] += exchange_boxes(plans, after)
        known = step.compiled.step.batch_spec.specs  # without known specs, the number of samples is unknown
        rate = dag.size / step.batch_time if known and step.batch_time is not None else None
        tokens = _tokens_of(step.compiled)
        content = {
            "version": 1, "kind": "step", "plan": self._name(step.compiled), "number": step.number,
            "global_step": step.global_step, "batch_time": step.batch_time, "samples_per_second": rate,
            "tokens_per_second": None if rate is None or tokens is None else rate * tokens,
            "bytes_moved": bytes_moved(plans), "fixed": fixed, "durations": durations,
            "planned_step_time": float(planned.step_time), "step": recorded,
        }  # fmt: skip
        path = self.folder / f"step_{step.number}.json"
        write_json(path, content)
        write_text(self.folder / f"trace_{step.number}.json", chrome_trace(plan, content))
        self.written.append(path)
        self._board.step(content)
        self._board.schedule(planned, real, step.global_step)

    def _name(self, compiled: Compiled) -> str:
        """Return the name of the plan file of a program."""
        index = next(i for i, known in enumerate(self._plans) if known() is compiled)
        return f"plan_{index + 1}.json" if index else "plan.json"


def _shifted(times: InstructionTimes, offset: int) -> InstructionTimes:
    """Return times on the clock of rank 0, which is `offset` nanoseconds ahead. Times of 0 stay 0, because
    the instruction did not run."""
    return InstructionTimes([t and t + offset for t in times.start], [t and t + offset for t in times.end])


def _tokens_of(compiled: Compiled) -> int | None:
    """Return the number of tokens of one sample: the columns of the batch's first tensor. None without such a
    tensor, or if it is not a matrix of int32 or int64.
    """
    spec = next(iter(compiled.step.batch_spec.specs), None)
    if spec is None or len(spec.shape) != 2 or spec.dtype not in (torch.int64, torch.int32):
        return None
    return spec.shape[1]


def _fixed(trainer: pl.Trainer, compiled: Compiled, world: Processes) -> dict[int, dict[str, int]]:
    """Return device of this process -> {"parameters": bytes, "optimizer": bytes}: the memory that stays
    between steps.
    """
    devices = [world.rank] if world.size > 1 else list(compiled.plans)
    sizes = {name: x.spec.nbytes for name, x in compiled.step.params.items()}
    names = {
        id(p): compiled.step.canonical[n]
        for n, p in trainer.lightning_module.named_parameters(remove_duplicate=False)
    }
    state = _state_by_parameter(trainer.optimizers)
    found = {}
    for device in devices:
        plan, used = compiled.plans[device], compiled.params_on(device)
        # Parameters outside of buckets count whole. A bucket counts one shard, or all of it if it is kept.
        buckets = {name for bucket in plan.shards for name in bucket.names}
        shards = sum((b.numel if kept else b.shard) * b.dtype.itemsize for b, kept in plan.shards.items())
        # With several processes, the optimizer has only this process's states.
        own = sum(
            n for key, n in state.items() if world.size > 1 or names.get(key) is None or names[key] in used
        )
        found[device] = {"parameters": sum(sizes[name] for name in used - buckets) + shards, "optimizer": own}
    return found


def _state_by_parameter(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Return the bytes of optimizer state of each parameter, by the parameter's `id`."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            found[id(p)] = sum(
                x.numel() * x.element_size() for x in state.values() if isinstance(x, torch.Tensor)
            )
    return found
