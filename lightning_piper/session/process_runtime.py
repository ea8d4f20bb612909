"""The tensors and communicators of one process, on which compiled programs of any kind run.

A fit and the evaluations during the fit share a `ProcessRuntime`. Evaluations outside of a fit, uncaptured
replicas, and each divided optimizer have one of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch

from lightning_piper.capture import difference
from lightning_piper.capture.cutting.chunk_compiler import ChunkCompiler
from lightning_piper.common.units import counted
from lightning_piper.compiler import Compiled
from lightning_piper.directives import Directive, Place, replicas_of
from lightning_piper.errors import CaptureError, DirectiveError, PiperError
from lightning_piper.holdings.distribution import check_held, check_none_idle, check_shards
from lightning_piper.holdings.gradients import changed_by
from lightning_piper.holdings.optimizer_slices import EarlyUpdates
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_map import TensorMap
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.ops.arguments import Arguments, join, shares, ways_of
from lightning_piper.processes.agreement import other_plans
from lightning_piper.processes.world import World, described, fill, of_rank
from lightning_piper.runtime import (
    Executor,
    GradientBuffer,
    LocalTransport,
    ProcessTransport,
    StepResult,
    joined,
    run_local,
)
from lightning_piper.runtime.simulated_steps import OnSimulated
from lightning_piper.runtime.watching import See, Watch
from lightning_piper.session.checksums import checksum, sum_of_plans
from lightning_piper.session.metric_objects import MetricObjects
from lightning_piper.session.replay import Replay

PACKAGE = __name__.partition(".")[0]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Settings:
    """How the steps of a module are compiled and run. The settings are the same on all processes, except
    `device`.

    Attributes:
        program: The directives.
        replicas: Number of replicas, if each process draws the batches of one replica; 1 if one process draws
            the batches of all replicas.
        static: Whether to run the static check on everything that is compiled.
        context: Entered around the training step while it is captured.
        forward_context: Entered around other steps while they are captured.
        local: Whether all devices are in this process.
        timeout: Timeout of communication.
        whole_norms: Whether all batch norms of the training step use the statistics of the whole batch.
        in_part: Whether Piper may capture only the calls of annotated modules if it cannot capture the
            training step.
        compile: Inductor's options for the code of passes; None to run this code uncompiled.
        device: The logical device of this process; None if all devices are in this process.
        simulated: Whether all devices are in this process and on a simulated accelerator.
        cuda_graphs: Whether passes run as graphs after the first step (`runtime.chunk_graphs`).
        everywhere: Under local SGD, the processes of all local replicas, each of which runs the program; otherwise
            None.
    """

    program: Sequence[Directive]
    replicas: int
    static: bool
    context: Context
    forward_context: Context
    local: bool
    timeout: timedelta | None
    whole_norms: bool = False
    in_part: bool = True
    compile: Mapping[str, Any] | None = None
    device: int | None = None
    simulated: bool = False
    cuda_graphs: bool = False
    everywhere: World | None = None

    @property
    def evaluates(self) -> bool:
        """Whether steps without a backward pass run as programs. If not, Lightning runs them on the whole
        module.

        True if there is a process for each device. With all devices in one process, True only if the
        accelerator is simulated and the program does not have replicas.
        """
        return not self.local or (self.simulated and not any(replicas_of(self.program).values()))


@dataclass(frozen=True)
class Prepared:
    """The compiled program for batches of one spec, ready to run on this process's tensors.

    Attributes:
        compiled: The program.
        executors: An executor for each logical device of this process, by device: all devices with
            `transport="local"`, otherwise one.
        replay: Repeats the step's logging after a run.
    """

    compiled: Compiled
    executors: list[Executor]
    replay: Replay

    @cached_property
    def plans(self) -> int:
        """A checksum of all plans. It covers their operations, order and devices, but not shapes."""
        return sum_of_plans(self.compiled)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that the step computes gradients for, on any device."""
        return frozenset(changed_by(self.compiled.dag, Kind.GRAD))

    @property
    def accumulates(self) -> bool:
        """Whether the plans can accumulate the gradients of a batch locally, without an all-reduce, until the
        last batch of an accumulation."""
        return any(executor.accumulates for executor in self.executors)


class ProcessRuntime:
    """The runtime of one process. It compiles together with the other processes, and runs programs on the
    tensors that `bind` receives.

    Attributes:
        metric_objects: The metric objects that the steps update.
        early_updates: The updates that training steps compute before they end.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self._settings, self._world = settings, world
        self.metric_objects = MetricObjects(settings.everywhere or world)
        self.early_updates = EarlyUpdates()
        self._first: Compiled | None = None  # the program that `bind` received
        self._tensor_map: TensorMap | None = None
        self._params: Mapping[str, torch.Tensor] = {}
        self._buffers: Mapping[str, torch.Tensor] = {}
        # logical device -> its shards of buckets; its gradients that are accumulated over batches
        self._shards: Mapping[int, Mapping[Bucket, torch.Tensor]] = {}
        self._gradient_buffers: dict[int, GradientBuffer] = {}
        self._transport: ProcessTransport | None = None
        self._last: Prepared | None = None  # the program that ran last
        self._compiler = None if settings.compile is None else ChunkCompiler(settings.compile, world.device)
        self._simulated = OnSimulated() if settings.simulated else None
        self._told = False  # whether the user was warned about passes without compilation or graphs

    def compiled(self, work: Callable[[], Compiled], apart: bool = False) -> Compiled:
        """Compile on all processes, and check that all processes compiled the same program for the same
        module. If a process fails, all processes raise an error. Collective.

        Args:
            work: Compiles the program.
            apart: Whether replicas may compile for batches of different sizes.

        Raises:
            Exception: On a process where `work` fails, the error of `work`.
            PiperError: `work` failed on another process. The error has the same class as there, if that is
                CaptureError or DirectiveError.
            PiperError: The processes compiled different programs. It is a CaptureError if each process is a
                replica and only the traced steps differ.
        """
        failure: Exception | None = None
        # (checksum of the plans, number of samples, checksum of the step, checksum of the module's tensors)
        own: tuple[int, ...] = (0, 0, 0, 0)
        try:
            compiled = work()
            step = compiled.step
            size = compiled.dag.size if compiled.dag.code.undivided is None else 0
            own = (
                sum_of_plans(compiled),
                size,
                checksum(step.text),
                checksum(repr(step.params), repr(step.buffers)),
            )
        except Exception as error:
            failure = error
        kind = type(failure) if isinstance(failure, CaptureError | DirectiveError) else PiperError
        late = isinstance(failure, CaptureError) and failure.late
        found = self._world.gather((None if failure is None else (kind, described(failure), late), own))
        if isinstance(failure, CaptureError):
            failure.late = any(problem is not None and problem[2] for problem, _ in found)
        if failure is not None:
            raise failure
        for rank, (problem, *_) in enumerate(found):
            if problem is not None:
                kind, text, late = problem
                rank = self._world.members[rank]
                foreign = of_rank(rank, kind(f"rank {rank}: {text}"))
                if isinstance(foreign, CaptureError):
                    foreign.late = late
                raise foreign
        together = self._world.replicas if apart else (0,) * len(found)
        if (
            len(set(zip(together, found, strict=True))) > len(set(together))
            or len({sums[3] for _, sums in found}) > 1
        ):
            texts, members = self._world.gather(step.said), self._world.members
            compared = (difference(texts[0], x, (members[0], members[i])) for i, x in enumerate(texts))
            where = next((f": {found}" for found in compared if found is not None), "")
            if len({sums[3] for _, sums in found}) > 1:
                raise PiperError(
                    "the modules of the processes have parameters or buffers of different names, shapes, dtypes, strides "
                    "or requires_grad. Build the module in the same way in every process [PIPER-L006]"
                )
            kind = CaptureError if self._world.count == self._world.size else PiperError
            raise kind(
                f"the processes traced different versions of {compiled.step.name}{where}. Make the step independent "
                "of the rank, the time and unseeded random numbers [PIPER-L006]"
            )
        if apart and len({sums[:2] for _, sums in found}) > len({sums[1] for _, sums in found}):
            raise other_plans()
        return compiled

    def compiled_here(self, work: Callable[[], Compiled]) -> Compiled:
        """Compile in this process only. At the same time, other replicas run the program that they already have
        for their batch.

        The plans must equal the plans that ran last, because the other replicas run plans equal to these.

        Raises:
            CaptureError: The step cannot be captured. The error is `late`, because other replicas continue.
            PiperError: The plans are different.
        """
        try:
            compiled = work()
        except CaptureError as error:
            error.late = True
            raise
        if self._last is None or sum_of_plans(compiled) != self._last.plans:
            raise other_plans()
        return compiled

    def bind(self, first: Compiled, own: Ownership) -> None:
        """Connect the processes, and make the plans work on this process's tensors. Collective.

        Args:
            first: The program that determined the distribution of the tensors.
            own: The tensors that this process holds.
        """
        self._first, self._tensor_map = first, own.tensor_map
        self._params, self._buffers, self._shards = own.owned_params, own.owned_buffers, own.shards
        if not self._settings.local:
            world, timeout = self._world, self._settings.timeout
            self._transport = ProcessTransport(first.plans, world.members, world.device, timeout)

    def connect(self, compiled: Compiled) -> None:
        """Create the communicators of a program that other processes prepare now and this process has
        prepared before. Collective."""
        if self._transport is not None:
            self._transport.connect(compiled.plans)

    def prepare(self, compiled: Compiled) -> Prepared:
        """Return a program with new executors of this process. Collective if the plans need communicators
        that do not exist yet.

        Raises:
            PiperError: The program needs tensors, or shards of buckets, that a process does not hold.
        """
        assert self._first is not None
        check_shards(self._first, compiled)
        check_none_idle(self._first, compiled)
        executors = self._executors(compiled)
        reports = [None if self._compiler is None else self._compiler.report]
        reports += [executor.graphs.report for executor in executors[:1] if executor.graphs is not None]
        for report in () if self._told else filter(None, reports):
            self._told = True
            warnings.warn(report, stacklevel=2)
        everywhere = self._settings.everywhere
        firsts = None if everywhere is None else range(0, everywhere.size, self._world.size)
        replay = Replay(compiled, self.metric_objects, firsts)
        return Prepared(compiled, executors, replay)

    def _executors(self, compiled: Compiled, watch: Watch | None = None) -> list[Executor]:
        """Return new executors of this process's devices, which `watch` watches. Collective like `prepare`."""
        if self._settings.local:
            local = LocalTransport(compiled.plans)
            with contextlib.nullcontext() if self._simulated is None else self._simulated.bound():
                return [self._executor(compiled, device, local, watch) for device in sorted(compiled.plans)]
        assert self._transport is not None
        self.check_held(compiled)
        self._transport.connect(compiled.plans)
        return [self._executor(compiled, self._world.rank, self._transport, watch)]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over all processes, between two steps. The sum may use the
        memory of `x`. Collective."""
        return x if self._transport is None else self._transport.sum(x)

    def announce(self, flag: bool) -> bool:
        """Return the flag that rank 0 of the run passed, between two steps. Return True if this runtime cannot send
        the flag to all processes without a wait of the host. Collective."""
        if self._settings.everywhere is not None or self._world.device.type != "cpu":
            return True
        return self._transport is not None and self._transport.any(flag and self._world.rank == 0)

    @contextlib.contextmanager
    def run_watched(
        self, prepared: Prepared, see: See, leaves: Sequence[torch.Tensor], seed: int, scale: float
    ) -> Iterator[StepResult]:
        """Run a step operation by operation, and enter a context with its result. At the end of the context,
        buffers get their values back. Nothing else changes. Collective.

        Args:
            see: Called after each operation of this process's devices.
            leaves, seed, scale: As in `run`.
        """
        last, before = self._last, {name: x.detach().clone() for name, x in self._buffers.items()}
        watched = replace(prepared, executors=self._executors(prepared.compiled, Watch(see)))
        try:
            yield self.run(watched, leaves, seed, scale)
        finally:
            self._last = last
            for name, old in before.items():
                fill(self._buffers[name], old)

    def sum_kept(self) -> dict[str, torch.Tensor]:
        """All-reduce the gradients that a plan has accumulated locally, because another plan continues the
        accumulation. Afterwards, no gradients are accumulated locally. Collective.

        Returns:
            Name of a parameter -> its whole gradient, on every process, as new tensors. Empty if no process
                had accumulated gradients.

        Raises:
            PiperError: The gradients belong to parameters that are divided along an axis.
        """
        assert self._first is not None
        kept: dict[tuple[Any, ...], tuple[Bucket, torch.Tensor]] = {}
        for device, buffer in self._gradient_buffers.items():
            for (bucket, *_), gradient in buffer.items():
                # Groups that each have all shards keep shards.
                flat = bucket.whole_with(gradient, self._first.plans.group_rank_of(device))
                key = bucket.names, bucket.numel, bucket.dtype
                kept[key] = (bucket, flat) if key not in kept else (bucket, kept[key][1].add_(flat))
            buffer.clear()
        grads: dict[str, torch.Tensor] = {}
        everyones = self._world.gather({key: bucket for key, (bucket, _) in kept.items()})
        for key, bucket in {key: bucket for found in everyones for key, bucket in found.items()}.items():
            if bucket.degree > 1:
                raise PiperError(
                    "PiperStrategy: two batches of one gradient accumulation have different plans, because "
                    "the shapes of the batches, or Python values that the step reads, differ. "
                    f"The weight {bucket.names[0]!r} is sharded along an axis, so Piper cannot add the gradients of both "
                    "batches. Give all batches of an accumulation the same shapes and Python values "
                    "[PIPER-X005]"
                )
            flat = self._world.sum(kept[key][1] if key in kept else bucket.empty(self._world.device).zero_())
            for name, view, spec in zip(bucket.names, bucket.views(flat), bucket.tensors, strict=True):
                grads[name] = view.to(spec.dtype, copy=True)
        return grads

    @property
    def compiles(self) -> bool:
        """Whether Inductor compiles the code of passes."""
        return self._settings.compile is not None

    @property
    def digest_carrier(self) -> Prepared | None:
        """The program that ran last, if a digest of each process travels with its all-reduce; otherwise None.

        The answer is the same on all processes.
        """
        last = self._last
        carries = last is not None and not self._settings.local and last.executors[0].carries_digest
        return last if carries else None

    def run(
        self,
        prepared: Prepared,
        leaves: Sequence[torch.Tensor],
        seed: int,
        scale: float = 1.0,
        last: bool = True,
        digest: int = 1,
    ) -> StepResult:
        """Run one step, and return its result: the gradients of the parameters that this process holds, and
        the values that the step reports.

        The caller passes the tensors of the batch (`leaves`) and the seed of the step's random numbers.
        `Executor.step` explains `scale`, `last` and `digest`. With all devices in one process, `digest` has
        no effect.
        """
        self._last = prepared
        if self._settings.local:
            with (
                contextlib.nullcontext()
                if self._simulated is None
                else self._simulated.step(prepared.executors)
            ):
                results = run_local(prepared.executors, leaves, seed, scale, last)
            grads = joined([executor.plan for executor in prepared.executors], results)
            found = results[0].results | arguments_of(prepared.compiled.dag, results, leaves, self._buffers)
            return StepResult(grads, results[0].metrics, found)
        return prepared.executors[0].step(leaves, seed, scale, last, digest)

    def close(self, failed: bool = False) -> None:
        """Release the communicators and drop the gradients. Collective, unless the run failed. In that case,
        the communicators end with the default group."""
        self._gradient_buffers.clear()
        self._last = None
        if self._transport is not None and not failed:
            self._transport.close()
        self._transport = None

    def _executor(
        self,
        compiled: Compiled,
        device: int,
        transport: LocalTransport | ProcessTransport,
        watch: Watch | None,
    ) -> Executor:
        """Return an executor of one device's plan on the tensors that `bind` has received."""
        assert self._first is not None
        # Only a training step uses the gradient buffer. An evaluation during an accumulation must not touch it.
        trains = watch is None and compiled.step.name == self._first.step.name
        found = Executor(
            compiled.plans[device],
            compiled.step,
            self._params,
            self._buffers,
            transport,
            self._world.device,
            self._shards.get(device, {}),
            self._gradient_buffers.setdefault(device, {}) if trains else {},
            self._compiler if watch is None else None,
            None if watch is None else watch.function,
            self.early_updates if trains else None,
            self._settings.cuda_graphs and watch is None,
        )
        found.observer = None if watch is None else watch.observe(found.plan)
        return found

    def check_held(self, compiled: Compiled, before_fit: bool = False) -> None:
        """Check that every process holds the tensors that its plan works on (`distribution.check_held`)."""
        assert self._tensor_map is not None and self._first is not None
        check_held(self._first, compiled, self._tensor_map, before_fit)


def arguments_of(
    dag: TrainingDAG,
    results: Sequence[StepResult],
    leaves: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the tensor arguments of metric objects for the global batch, by name, from the results of all
    devices in one process. Empty if the step passes no tensors to metric objects.

    Args:
        results: The result of each device, by device.
        leaves: The tensors of the global batch.
        buffers: This process's buffers by name, because denominators may be counted from them.
    """
    found = {}
    edges = range(0, dag.size + 1, dag.local_batch_size)
    slices = [Slice(a, b) for a, b in itertools.pairwise(edges)]
    for node in dag.of_type(Arguments):
        for name, way in zip(dag.value(node.inputs[0]).names, ways_of(dag, node), strict=True):
            held = [results[node.devices[group_rank]].results[name] for group_rank in dag.mesh.lines(DATA)[0]]
            found[name] = join(held, way, partial(shares, dag.step, way, slices, leaves, buffers))
    return found


def check_placed(program: Sequence[Directive], processes: int, local_replicas: int = 1) -> None:
    """Check before a capture that there is a process for each logical device. Without the capture, some
    programs do not show the number of logical devices. They pass this check.

    Args:
        local_replicas: Number of local replicas of local SGD, each with this number of processes.

    Raises:
        PiperError: There are more or fewer processes.
    """
    if processes == 1 or not all(type(each).__module__.startswith(f"{PACKAGE}.") for each in program):
        # On one device, the step may run uncaptured. Where directives of other packages place chunks is
        # unknown.
        return
    placed = {device for each in program if isinstance(each, Place) for device in each.group}
    if placed and placed == set(range(len(placed))):
        _check_number(len(placed), processes, local_replicas)


def _check_number(devices: int, processes: int, local_replicas: int = 1) -> None:
    if devices != processes:
        replica = "" if local_replicas == 1 else "each local replica of "
        needed = "the Trainer" if local_replicas == 1 else f"{local_replicas} local replicas"
        raise PiperError(
            f"the directives place the step on {counted(devices, 'logical device')}, but {replica}the Trainer has "
            f"{counted(processes, 'process')}. Give {needed} {counted(devices * local_replicas, 'process')} "
            f"(Trainer(devices={devices * local_replicas}) on one machine) [PIPER-S003]"
        )


def check_devices(first: Compiled, world: World, settings: Settings) -> None:
    """Check that each logical device has a process, and that each process draws the data of its replica.

    Raises:
        PiperError: A device does not have a process, or a process draws the data of another replica.
    """
    everywhere = settings.everywhere
    _check_number(len(first.plans), world.size, 1 if everywhere is None else everywhere.size // world.size)
    working = {device for chunk in first.dag.of_type(Chunk) for device in chunk.devices}
    if any(
        first.dag.replica_of(first.plans.group_rank_of(device)) != world.replicas[device]
        for device in working
    ):
        raise PiperError(
            "a directive makes replicas that its replica_groups() does not name, so Piper does not know "
            "which data each process reads. Define replica_groups() in the directive's class [PIPER-D019]"
        )
