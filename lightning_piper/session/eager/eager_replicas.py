"""`EagerReplicas`: replicas of a whole module whose training step is not captured. After each backward pass
of the user's code, a plan averages the gradients.

Each process runs the user's code unchanged (with several optimizers, backward passes of its own, branches on
values). The optimizers see the mean over the replicas, as with DistributedDataParallel. The plan sums the
gradients of the parameters that have `requires_grad` at the time of the backward pass. One program is
compiled for each set of such parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_piper.batch_norms import whole_batch_norms
from lightning_piper.capture.eager.eager_step import EagerStep, is_of_none
from lightning_piper.compiler import Compiled
from lightning_piper.directives import replicas_of
from lightning_piper.directives.replicate import (
    rounds_params,
    shards_of,
    with_divided_optimizer,
    without_sharding,
)
from lightning_piper.errors import CaptureError, DirectiveError, ExecutionError
from lightning_piper.processes.world import RANK_ZERO, fill
from lightning_piper.profile import Recording
from lightning_piper.sample_gathering import exchanging_rows
from lightning_piper.session.eager.eager_optimizer import compiled_eager
from lightning_piper.session.eager.sparse_gradients import added, mean_over_replicas, sparse_weights
from lightning_piper.session.eager.standalone_module import Standalone
from lightning_piper.session.process_runtime import Prepared, ProcessRuntime, Settings, check_devices
from lightning_piper.totals import summing

Local = Callable[..., None]  # torch's own `torch.autograd.backward`


def why_not(module: nn.Module, settings: Settings, device: torch.device) -> str | None:
    """Return why a module's step cannot run uncaptured under a program; None if it can.

    Args:
        device: The device of the tensors.
    """
    devices, program = len(replicas_of(settings.program)) or 1, settings.program
    if rounds_params(program):
        return (
            "an uncaptured step reads unrounded parameters, but the program has a gather_dtype. Follow the message "
            "above, or remove gather_dtype"
        )
    step = EagerStep(module, devices, _trained(module), device)
    try:
        plans = compiled_eager(settings, without_sharding(program), step).plans
        if any(map(shards_of, program)):
            compiled_eager(settings, with_divided_optimizer(program), step)
    except (CaptureError, DirectiveError) as error:
        by = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))  # the line of the directive
        return (
            f"the program does more than replicate the whole step{by}. Follow the message above, or "
            "train replicas (PiperStrategy())"
        )
    if any(plan.shards for plan in plans.representatives.values()):
        return (
            "an uncaptured step does not support the program's shards of parameters, gradients or optimizer "
            "state. Follow the message above, or remove the shards"
        )
    return None


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes, each of which is a replica, as a new tensor. Collective."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _gathered(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of all processes, in the order of the ranks. Each process is a replica, and may have a
    different number of rows. Collective."""
    rows = x.detach().contiguous()
    most = max(counts := _rows(rows))
    parts = [rows.new_empty(most, *rows.shape[1:]) for _ in counts]
    padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _scattered(gradient: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the gradients that all processes computed for all rows, and return the `count` rows that belong to
    this process. Collective."""
    counts = _rows(gradient[:count])
    first = sum(counts[: dist.get_rank()])
    return _sum(gradient)[first : first + count]


def _rows(x: torch.Tensor) -> list[int]:
    """Return the number of rows of each process, by rank. Collective."""
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device)
    counts[dist.get_rank()] = len(x)
    dist.all_reduce(counts)
    return counts.tolist()


def _buffers(module: nn.Module, found: dict[int, torch.Tensor], seen: set[int]) -> dict[int, torch.Tensor]:
    """Add the buffers of a module and its submodules to `found`, id -> buffer, and return `found`. Leave out
    the submodules whose ids are in `seen`. Add the ids of the other submodules to `seen`.

    This function runs in each step, so it avoids `module.buffers()`, which builds names.
    """
    seen.add(id(module))
    found.update((id(x), x) for x in module._buffers.values() if x is not None)
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            _buffers(child, found, seen)
    return found


def _trained(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, x in module.named_parameters() if x.requires_grad)


def _unused(totals: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
    """Return the parameters that no process has used, among parameters that this process has not used.

    Args:
        totals: Name and summed gradient of each parameter that this process has not used.
    """
    if not totals:
        return set()
    of_none = torch.stack([is_of_none(total) for _, total in totals]).tolist()
    return {name for (name, _), none in zip(totals, of_none, strict=True) if none}


class EagerReplicas:
    """The replicas of a fit whose training step is not captured. All methods are collective.

    Args:
        module: The module that is trained.
        before: The owner of the module until now; this class distributes the module.

    Attributes:
        ownership: The module's tensors, whole on every process, with rank 0's initial values.
        recording: Records the plans that average gradients; None if they are not recorded.
    """

    recording: Recording | None = None

    def __init__(self, module: nn.Module, before: Standalone) -> None:
        self._module, self._world, self._settings = module, before.world, before.settings
        self._runtime = ProcessRuntime(self._settings, self._world)
        # names of the parameters to average -> the program that sums their gradients
        self._prepared: dict[tuple[str, ...], Prepared] = {}
        first = self._compile(_trained(module))
        check_devices(first, self._world, self._settings)
        self.ownership = before.distribute(first)
        self._runtime.bind(first, self.ownership)
        self._params = self.ownership.params
        self._prepared[_trained(module)] = self._runtime.prepare(first)
        self._sparse = sparse_weights(module)
        # The parameters that may have local gradients of accumulated batches, which are not averaged yet.
        self._kept: set[str] = set()
        self._inside = False  # whether a backward pass is running whose gradients will be averaged
        self._passes = 0  # number of averaged passes
        self._failure: Exception | None = None  # the error that the running backward pass raised
        # the original `torch.autograd.backward`, while a replacement is installed
        self._replaced: Local | None = None

    def _compile(self, trained: Sequence[str]) -> Compiled:
        step = EagerStep(self._module, self._settings.replicas, trained, self._world.device)
        return self._runtime.compiled(
            partial(compiled_eager, self._settings, without_sharding(self._settings.program), step)
        )

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all replicas, because each replica has updated its own buffers with its
        own batches."""
        buffers = [x for x in _buffers(self._module, {}, set()).values() if x.numel()]
        if not buffers:
            return
        # The buffers travel as bytes, so every dtype works with every backend.
        flat = torch.cat([x.detach().contiguous().reshape(-1).view(torch.uint8) for x in buffers])
        dist.broadcast(flat, RANK_ZERO)
        if not self._world.is_rank_zero:
            for buffer, values in zip(
                buffers, flat.split([x.numel() * x.element_size() for x in buffers]), strict=True
            ):
                # Cloned because a view of another dtype must begin at a multiple of its element size.
                fill(buffer, values.clone().view(buffer.dtype).view(buffer.shape))

    @contextlib.contextmanager
    def batch_norms(self) -> Iterator[None]:
        """Return a context for a step. In it, synchronized batch norms use the statistics of all replicas'
        samples, and `gather_samples` joins the rows of all replicas."""
        with (
            whole_batch_norms(self._settings.whole_norms),
            summing(_sum),
            exchanging_rows(_gathered, _scattered),
        ):
            yield

    @property
    def averages(self) -> bool:
        """Whether backward passes leave the mean of all replicas' gradients."""
        return self._replaced is not None

    def average(self, last: bool = True) -> None:
        """Make backward passes leave the mean of all replicas' gradients, until `stop_averaging`.

        Args:
            last: Whether the batch is the last one of a gradient accumulation; otherwise gradients stay
                local.
        """
        self.stop_averaging()
        self._replaced = torch.autograd.backward
        torch.autograd.backward = partial(self._backward, self._replaced, last)

    def stop_averaging(self) -> None:
        if self._replaced is not None:
            torch.autograd.backward, self._replaced = self._replaced, None

    def _backward(self, local: Local, last: bool, *args: Any, **kwargs: Any) -> None:
        """Replace `torch.autograd.backward`: run the backward pass with `local`. If the batch is the
        `last` one of an accumulation, also average the gradients over the replicas."""
        if self._inside or not last:
            # No averaging: gradients accumulate locally until the last batch. If activation checkpointing
            # runs a backward pass inside the step's backward pass, the step's pass averages.
            if not self._inside:
                self._kept.update(name for name, x in self._params.items() if x.requires_grad)
            local(*args, **kwargs)
            return
        # A parameter that was frozen since an earlier batch of the accumulation still has a local gradient.
        averaged = {name: x for name, x in self._params.items() if x.requires_grad or name in self._kept}
        ids = set(map(id, averaged.values()))
        sparse = [x for x in self._sparse if id(x) in ids]
        beside = {id(x) for x in sparse}
        trained = tuple(name for name, x in averaged.items() if id(x) not in beside)
        if not trained and not sparse:
            local(*args, **kwargs)
            return
        old = [None if self._kept else x.grad for x in sparse]
        if not self._kept:
            for x in sparse:
                x.grad = None
        if trained:
            self._run(trained, partial(local, *args, **kwargs))
        else:
            self._inside = True
            try:
                local(*args, **kwargs)
            finally:
                self._inside = False
        for x, before in zip(sparse, old, strict=True):
            x.grad = added(before, mean_over_replicas(x, self._world))
        self._kept.clear()

    def _run(self, trained: tuple[str, ...], local: Callable[[], None]) -> None:
        """Run a backward pass, and average its gradients of the `trained` parameters with a plan. Add the
        mean to the gradient of earlier passes in `.grad`. The `.grad` of a parameter that no process has used
        stays. An error of the pass is raised as the user's code raised it."""
        if trained not in self._prepared:
            self._prepared[trained] = self._runtime.prepare(self._compile(trained))
        prepared = self._prepared[trained]
        step: Any = prepared.compiled.step
        params = [self._params[name] for name in trained]
        before = [None if self._kept else x.grad for x in params]
        step.backward = partial(self._local_gradients, params, local)
        if self.recording is not None:
            self.recording.before(prepared)
        self._inside = True
        try:
            result = self._runtime.run(prepared, [], seed=0)
        except ExecutionError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._inside, self._failure = False, None
        if self.recording is not None:
            self.recording.after(prepared, self._passes)
        self._passes += 1
        unused = _unused(
            [(name, result.grads[name]) for name, found in zip(trained, step.found, strict=True) if not found]
        )
        for name, param, old in zip(trained, params, before, strict=True):
            param.grad = added(old, None if name in unused else result.grads[name])

    def _local_gradients(
        self, params: Sequence[nn.Parameter], local: Callable[[], None]
    ) -> list[torch.Tensor | None]:
        """Run the local backward pass, and return the `.grad` of each parameter; None if it has none.

        If gradients of earlier batches are kept, the result includes them. Otherwise, first remove the
        parameters' old gradients.
        """
        if not self._kept:
            for param in params:
                param.grad = None
        try:
            with torch.enable_grad():
                local()
        except Exception as error:
            self._failure = error
            raise
        return [param.grad for param in params]

    def close(self, failed: bool) -> None:
        """End the fit. Collective, unless the fit failed."""
        self.stop_averaging()
        if not failed:
            if self.recording is not None:
                self.recording.close()
            self.ownership.end()
        self._prepared.clear()
        self._runtime.close(failed)
