"""What `PiperStrategy("auto")` does at the first batch of a fit: rank 0 searches a program, and all processes take it over."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_piper.errors import NoProgram, PiperError
from lightning_piper.processes.joining import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.search.blocks import Cut, blocks_of
from lightning_piper.search.measuring import measured
from lightning_piper.search.proposing import CALLS, Proposal, search, sizes_of
from lightning_piper.search.report import described, size
from lightning_piper.search.workload import Workload
from lightning_piper.session.available import memory_of
from lightning_piper.session.cached import Choice, file_of, folder, read, write
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Hardware

MESSAGE, ROUNDS = 1 << 22, 5  # bytes, and how often they are sent to and fro, to measure a link


def choose(module: nn.Module, batch: Any, world: World, alone: World, say: Callable[[str], None]) -> Choice | None:
    """The program for a fit; None where there can be data parallelism alone: the step cannot be captured, batches of several
    processes are not one, or no other program passes. Collective.

    Args:
        module: whole, in every process.
        batch: this process's first one.
        world: the processes, each of which draws data of its own.
        alone: the same as one replica.
        say: tells the user what was chosen.

    Raises:
        SearchError: nothing fits: says the least memory that would do.
    """
    try:
        every = BatchJoin(alone).joined(batch)
        cut = blocks_of(module, every)
    except PiperError:
        return None  # whoever runs the step says why; it is alike in all processes

    memory = memory_of(module, world)
    path = file_of(module, every, cut, world, memory)
    found = world.on_rank_zero(lambda: read(path))
    if found is None:
        costs = measured_together(module, every, alone, cut)
        found = world.on_rank_zero(lambda: _searched(module, every, world.size, memory, *costs))
        if found is None:
            say("PiperStrategy: of the programs that a search finds, none passes the checks; so the processes are replicas")
            return None
        if world.is_rank_zero:
            write(path, found)
    say("\n".join(found.lines))
    return found


def measured_together(module: nn.Module, batch: Any, world: World, cut: Cut | None = None) -> tuple[Workload, Link]:
    """What a step's blocks cost, and a message, while all processes are at work, as they are in training: cores share caches,
    memory and clocks. Of the slowest process. Collective.

    Args:
        world: as one replica.
        cut: of the module and the batch, if there is one.
    """
    link = _link(world)
    world.gather(None)  # begin together
    workload = measured(module, batch, sizes_of(batch), CALLS, cut=cut)
    found = world.gather(workload)
    return max(found, key=lambda each: sum(sum(work[:3]) for block in each.blocks for work in block.work.values())), link


def _searched(module: nn.Module, batch: Any, devices: int, memory: int, workload: Workload, link: Link) -> Choice | None:
    hardware = dataclasses.replace(Hardware.measure(), links=((devices, link),))
    try:
        return _told(search(module, batch, devices, memory, hardware=hardware, workload=workload, all_devices=True))
    except NoProgram:
        return None


def _told(proposal: Proposal) -> Choice:
    chosen, found = proposal.chosen, proposal.found
    others = [row for row in found.table if row.candidate not in (chosen, *(refused for refused, _ in proposal.refused))]
    lines = [
        f"PiperStrategy chose {described(chosen)}",
        f"  predicted: {proposal.time * 1e3:.4g} ms a step, {size(proposal.memory)} on the fullest device",
        *(f"  and not {described(row.candidate)}: {row.estimate.time * 1e3:.4g} ms, {row.reason}" for row in others[:1]),
        f"  of {found.size:,} programs, {found.evaluated:,} were estimated; the rest was excluded by bounds",
        f"  it is checked, and kept in {folder()}: PiperStrategy(directives=...) takes it from there",
    ]
    return Choice(proposal.written, tuple(lines))


def _link(world: World) -> Link:
    """Between the first process and the last one, for tensors of the host, while messages go both ways: seconds of a message, and
    bytes a second. Collective."""
    other = {0: world.size - 1, world.size - 1: 0}.get(world.rank)
    times: dict[int, list[float]] = {1: [], MESSAGE // 4: []}
    for _ in range(ROUNDS + 1):
        for count in times:
            own, theirs = torch.zeros(count), torch.empty(count)
            start = time.perf_counter()
            if other is not None:
                sent = dist.isend(own, other, group=world.host_group)
                dist.recv(theirs, other, group=world.host_group)
                assert sent is not None
                sent.wait()
            times[count].append(time.perf_counter() - start)
    small, large = (found[1:] for found in times.values())
    latency, whole = min(small), median(large)
    return world.broadcast(Link(latency, MESSAGE / max(whole - latency, whole / 2)))
