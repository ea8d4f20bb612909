"""All stages of a pipeline train on the same batch: what makes them agree, and what notices when they do not.

Every process draws its own batches. They agree because the processes' random numbers do: before the first batch is drawn, all
take over the lead's generators, and workers are seeded by replica, not by process. What cannot be made equal (a dataset that
reads a clock, a shuffle that depends on the rank) is noticed: a checksum of each batch goes round, in the background, while
the step runs. Nobody waits for it, except where a batch has another layout than the one before: then a step on different
plans could hang.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states, pl_worker_init_function
from torch.utils.data import DataLoader, DistributedSampler

from lightning_piper.capture import BatchLayout
from lightning_piper.errors import PiperError
from lightning_piper.strategy.world import World

SAMPLE = 2048  # elements of each tensor that enter the checksum
ON_GPU_EVERY = 16  # reading a GPU tensor makes the host wait, so only every so many steps


def share_random_state(world: World) -> None:
    """All processes continue with the lead's random numbers (torch, numpy, Python). Collective."""
    if world.size == 1:
        return
    _set_rng_states(world.broadcast(_collect_rng_states(include_cuda=False)))
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(world.broadcast(torch.cuda.get_rng_state(world.device)), world.device)


def agree_on_loader(loader: object, world: World) -> object:
    """Make a training DataLoader give the same batches in all processes. Collective.

    Raises:
        PiperError: it is split over the processes, or has another length in some.
    """
    if world.size == 1:
        return loader
    share_random_state(world)
    sizes = world.gather(_length(loader))
    if len(set(sizes)) > 1:
        raise PiperError(f"the processes' training data have {sizes} batches, by rank; all stages of a pipeline read the same ones")
    if not isinstance(loader, DataLoader):
        return loader
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != 1:
            raise PiperError(
                f"the DataLoader's DistributedSampler splits the data over {sampler.num_replicas} replicas, but the processes are "
                "stages of one pipeline, which all read the same batches; use a plain sampler (shuffle=True)"
            )
    generators = generators_of(loader)
    for generator, state in zip(generators, world.broadcast([g.get_state() for g in generators]), strict=True):
        generator.set_state(state)
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # of the replica; there is one
    return loader


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its samplers have of their own."""
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return [g for g in (getattr(x, "generator", None) for x in owners) if isinstance(g, torch.Generator)]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class BatchCheck:
    """Compares the batches of all processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0
        self._layout: tuple[Any, ...] | None = None
        self._layout_sum = 0
        self._running: tuple[dist.Work, torch.Tensor] | None = None

    def post(self, layout: BatchLayout, leaves: Sequence[torch.Tensor]) -> None:
        """Begin to compare this step's batch, and finish with the last one's.

        Raises:
            PiperError: the batches differ.
        """
        if self._world.size == 1:
            return
        self.finish()
        key = layout.key
        changed = key != self._layout
        if changed:
            self._layout, self._layout_sum = key, zlib.crc32(repr(key).encode())
        data = _checksum(leaves, self._steps)
        self._steps += 1
        message = torch.tensor([self._layout_sum, -self._layout_sum, data, -data])
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        assert work is not None
        self._running = (work, message)
        if changed:
            self.finish()

    def finish(self) -> None:
        """Wait for the comparison that is under way.

        Raises:
            PiperError: the batches differ.
        """
        if self._running is None:
            return
        (work, message), self._running = self._running, None
        work.wait()
        layout, layout_low, data, data_low = message.tolist()
        if layout != -layout_low or data != -data_low:
            what = "shapes" if layout != -layout_low else "values"
            raise PiperError(
                f"the processes drew different batches (other {what}) in training batch {self._steps - 1} of this fit, but all "
                "stages of a pipeline train on the same one. Seed whatever draws the data (seed_everything(seed, workers=True)), "
                "and let it not depend on the rank or on time"
            )


def _checksum(leaves: Iterable[torch.Tensor], step: int) -> int:
    """Of elements spread evenly over each tensor."""
    total = 0
    for leaf in leaves:
        if leaf.device.type != "cpu" and step % ON_GPU_EVERY:
            continue
        flat = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // SAMPLE)].contiguous().cpu()
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return total
