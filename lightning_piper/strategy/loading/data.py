"""The batches of a run. Every process draws its own batches. All processes of a replica draw equal batches.

The batches are equal because the random numbers are equal: before the first batch, all processes copy the
states of rank 0's generators. Workers of data loaders are seeded by replica, not by process.
`processes.agreement` detects batches that differ nevertheless.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler

from lightning_piper import accelerators
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.strategy._lightning import collect_rng_states, set_rng_states, wrapped_sampler


def share_random_state(world: World) -> None:
    """Set the random number generators of all processes (torch, numpy, Python) to the states of rank 0.
    Collective."""
    if world.size == 1:
        return
    # First the generators of the host, then the generator of the device.
    set_rng_states(world.broadcast(collect_rng_states(False)))
    if world.device.type != "cpu":
        generator, _ = accelerators.generators_of(world.device)
        generator.set_state(world.broadcast(generator.get_state()))


def draw_seed(world: World) -> int:
    """Return a random seed, the same on all processes. All processes get the states of rank 0's random number
    generators, which the draw leaves unchanged. Collective."""
    share_random_state(world)
    with isolate_rng():
        return int(torch.randint(2**62, ()))


def agree_on_loader(loader: object, world: World, limit: float = 1.0, apart: bool = False) -> object:
    """Make a loader give the same batches on all processes of a replica, and return the same loader.
    Collective.

    All processes get the states of rank 0's random number generators, and compare their numbers of batches.
    A DataLoader also gets rank 0's states of its own generators, and rank 0's seed of its
    `DistributedSampler`. After `seed_everything(workers=True)`, its workers are seeded by replica. With one
    process, nothing changes.

    Args:
        loader: This process's loader.
        limit: How many of the batches are drawn, in the Trainer's form: an int is a number, a float is a
            fraction.
        apart: Whether replicas may have different numbers of batches, as in an evaluation.

    Raises:
        PiperError: A sampler does not split the data over the replicas, or processes have different numbers
            of batches.
    """
    if world.size == 1:
        return loader
    share_random_state(world)
    sizes = world.gather(drawn_length(loader, limit))
    of_replicas = set(zip(world.replicas, sizes, strict=True))
    if len(of_replicas) > world.count or (len(set(sizes)) > 1 and not apart):
        why = (
            "all processes of a replica read the same batches. Give them the same dataset and sampler"
            if len(of_replicas) > world.count
            else "every replica needs the same number of batches. Give all replicas data for that number"
        )
        raise PiperError(
            f"the dataloaders of the processes have {sizes} batches, by rank, but {why} [PIPER-L004]"
        )
    if not isinstance(loader, DataLoader):
        return loader
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            _check_sampler(sampler, world, shuffles=sampler.shuffle and not apart)
            sampler.seed = world.broadcast(sampler.seed)
    generators = generators_of(loader)
    for generator, state in zip(
        generators, world.broadcast([g.get_state() for g in generators]), strict=True
    ):
        generator.set_state(state)
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=world.replica)
    return loader


def _check_sampler(sampler: DistributedSampler[Any], world: World, shuffles: bool) -> None:
    """Check that a sampler divides the data over the replicas, and gives this process its replica's part.

    Args:
        shuffles: Whether an error proposes a loader that shuffles.

    Raises:
        PiperError: The sampler has another number of replicas, or another replica's part.
    """
    if sampler.num_replicas == world.count and sampler.rank == world.replica:
        return
    fix = "Remove it, and give DataLoader(shuffle=True)" if shuffles else "Remove it"
    if world.count == 1:
        raise PiperError(
            f"the DataLoader's DistributedSampler splits the data over {sampler.num_replicas} replicas, but "
            f"all processes belong to one replica, so they read the same batches. {fix} [PIPER-L005]"
        )
    raise PiperError(
        f"the DataLoader's DistributedSampler gives process {world.rank} part {sampler.rank} of "
        f"{sampler.num_replicas}, but this process belongs to replica {world.replica} of {world.count}. "
        f"{fix}. Lightning then divides the data, unless you give Trainer(use_distributed_sampler=False) [PIPER-L005]"
    )


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the torch generators of a data loader and of its samplers, also of a sampler whose samples Lightning
    divides."""
    owners = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    owners += [wrapped_sampler(owner) for owner in owners]
    return [g for g in (getattr(x, "generator", None) for x in owners) if isinstance(g, torch.Generator)]


def drawn_length(loader: Any, limit: float) -> int | None:
    """Return how many batches the run draws from the loader; None if the loader's length is not known."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    return min(length, limit) if isinstance(limit, int) else int(length * limit)
