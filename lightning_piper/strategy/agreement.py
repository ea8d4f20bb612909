"""All stages of a pipeline train on the same batch: what makes them agree, and what notices when they do not.

With replicas, each has a pipeline of its own, and batches of its own, of the same sizes.

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
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler

from lightning_piper.capture import BatchLayout
from lightning_piper.errors import PiperError
from lightning_piper.strategy.settings import Settings, check_alike
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


def draw_seed(world: World) -> int:
    """A seed from the lead's random numbers, which go on as if none had been drawn. Collective."""
    share_random_state(world)
    with isolate_rng():
        return int(torch.randint(2**62, ()))


def agree_on_loader(loader: object, world: World, apart: bool = False) -> object:
    """Make a DataLoader give the same batches in all processes of a replica. Collective.

    Args:
        loader, world: of this process.
        apart: replicas may have different numbers of batches.

    Raises:
        PiperError: it is split in another way than over the replicas, or has another length in some processes.
    """
    if world.size == 1:
        return loader
    share_random_state(world)
    sizes = world.gather(_length(loader))
    of_replicas = set(zip(world.replicas, sizes, strict=True))
    if len(of_replicas) > world.count or (len(set(sizes)) > 1 and not apart):
        why = "all stages of a pipeline read the same ones" if world.count == 1 else "every replica needs as many as the others"
        raise PiperError(f"the processes' data have {sizes} batches, by rank; {why}")
    if not isinstance(loader, DataLoader):
        return loader
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            _check_sampler(sampler, world)
            sampler.seed = world.broadcast(sampler.seed)
    generators = generators_of(loader)
    for generator, state in zip(generators, world.broadcast([g.get_state() for g in generators]), strict=True):
        generator.set_state(state)
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=world.replica)
    return loader


def _check_sampler(sampler: DistributedSampler[Any], world: World) -> None:
    if sampler.num_replicas == world.count and sampler.rank == world.replica:
        return
    if world.count == 1:
        raise PiperError(
            f"the DataLoader's DistributedSampler splits the data over {sampler.num_replicas} replicas, but the processes are "
            "stages of one pipeline, which all read the same batches; use a plain sampler (shuffle=True)"
        )
    raise PiperError(
        f"the DataLoader's DistributedSampler gives process {world.rank} part {sampler.rank} of {sampler.num_replicas}, but it "
        f"belongs to replica {world.replica} of {world.count}; use DistributedSampler(dataset, num_replicas={world.count}, "
        f"rank={world.replica}) here, or a plain sampler, which the Trainer replaces by one that divides the data"
    )


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its samplers have of their own."""
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return [g for g in (getattr(x, "generator", None) for x in owners) if isinstance(g, torch.Generator)]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def agree_on_batch(world: World, key: object, leaves: Sequence[torch.Tensor], lacking: bool, step: int) -> tuple[bool, bool]:
    """Compare the batches of an evaluation step before it is run: those of one replica are the same. Collective.

    Args:
        key: what the step's plan depends on, such as the layout of the batch.
        leaves: its tensors.
        lacking: this process has no plan for it yet.
        step: number of the step, for which the values are compared.

    Returns:
        Whether any process lacks a plan, and whether the replicas' keys differ.

    Raises:
        PiperError: the processes of one replica have different batches.
    """
    if world.size == 1:
        return lacking, False
    own = (zlib.crc32(repr(key).encode()), _checksum(leaves, step))
    sums = [torch.iinfo(torch.int64).min] * 4 * world.count  # of each replica, the largest and the smallest of two sums
    sums[4 * world.replica : 4 * world.replica + 4] = [own[0], -own[0], own[1], -own[1]]
    message = torch.tensor([int(lacking), *sums])
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=world.host_group)
    anybody, *found = message.tolist()
    for replica in range(world.count):
        high, low, data, data_low = found[4 * replica : 4 * replica + 4]
        if high != -low or data != -data_low:
            who = "the processes" if world.count == 1 else f"the processes of replica {replica}"
            raise PiperError(
                f"{who} drew different batches (other {'shapes' if high != -low else 'values'}) in evaluation step {step}, but all "
                "stages of a pipeline run on the same one. Seed whatever draws the data (seed_everything(seed, workers=True)), and "
                "let it not depend on the rank or on time"
            )
    return bool(anybody), len(set(found[::4])) > 1


class BatchCheck:
    """Compares the batches of all processes: values within each replica, shapes everywhere. And how they train, which is the same
    everywhere."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0
        self._layout: tuple[Any, ...] | None = None
        self._layout_sum = 0
        self._running: tuple[dist.Work, torch.Tensor, Settings] | None = None
        self._warned = False

    @property
    def reads(self) -> bool:
        """Are values in the memory of a GPU compared with the next batch?"""
        return self._steps == 1 or self._steps % ON_GPU_EVERY == 0

    def post(self, layout: BatchLayout, leaves: Sequence[torch.Tensor], settings: Settings) -> None:
        """Begin to compare this step's batch, and finish with the last one's.

        Args:
            settings: how this process trains; what is known after a step comes with the next one.

        Raises:
            PiperError: the batches or settings differ.
        """
        if self._world.size == 1:
            return
        self.finish()
        key = layout.key
        at_once = key != self._layout or self._steps == 1  # then the factors of `backward` are known
        if key != self._layout:
            self._layout, self._layout_sum = key, zlib.crc32(repr(key).encode())
        data = _checksum(leaves, self._steps)
        self._steps += 1
        sums = [torch.iinfo(torch.int64).min] * 2 * self._world.count  # of each replica; the largest counts, and the smallest
        sums[2 * self._world.replica], sums[2 * self._world.replica + 1] = data, -data
        alike = zlib.crc32(repr(settings).encode())
        message = torch.tensor([alike, -alike, self._layout_sum, -self._layout_sum, *sums])
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        assert work is not None
        self._running = (work, message, settings)
        if at_once:
            self.finish()

    def finish(self) -> None:
        """Wait for the comparison that is under way.

        Raises:
            PiperError: the batches or settings differ.
        """
        if self._running is None:
            return
        (work, message, settings), self._running = self._running, None
        work.wait()
        alike, alike_low, layout, layout_low, *sums = message.tolist()
        if alike != -alike_low:  # all processes see it
            check_alike(self._world.gather(settings))
        data, data_low = sums[::2], sums[1::2]
        apart = [r for r, (high, low) in enumerate(zip(data, data_low, strict=True)) if high != -low]
        if layout != -layout_low and self._world.count > 1:
            raise PiperError(
                f"the processes drew batches of different shapes in training batch {self._steps - 1} of this fit, but every "
                "replica needs as many samples as the others, in tensors of the same shapes. Use a sampler that divides the data "
                "evenly (Lightning's own does), and pad all batches to the same lengths"
            )
        if layout != -layout_low or apart:
            what = "shapes" if layout != -layout_low else "values"
            who = "the processes" if self._world.count == 1 else f"the processes of replica {apart[0]}"
            raise PiperError(
                f"{who} drew different batches (other {what}) in training batch {self._steps - 1} of this fit, but all "
                "stages of a pipeline train on the same one. Seed whatever draws the data (seed_everything(seed, workers=True)), "
                "and let it not depend on the rank or on time"
            )
        if len(data) > 1 and len(set(data)) == 1 and data[0] and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"all {len(data)} replicas drew the same samples in training batch {self._steps - 1} of this fit, so they learn no "
                "more than one would. Give each replica its own: leave Trainer(use_distributed_sampler=True), or let an iterable "
                "dataset read another part in each replica"
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
