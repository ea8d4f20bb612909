"""What `PiperStrategy("auto")` does at the first batch of a fit: rank 0 searches a program, and all processes take it over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_piper.errors import NoProgram, PiperError
from lightning_piper.processes.joining import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.search.blocks import blocks_of
from lightning_piper.search.parameters import like
from lightning_piper.search.proposing import Proposal, search
from lightning_piper.search.report import described, size
from lightning_piper.search.workload import Workload
from lightning_piper.session.available import memory_of
from lightning_piper.session.cached import Choice, file_of, folder, read, write
from lightning_piper.session.together import measured_together
from lightning_piper.simulate.hardware import Hardware


def choose(
    module: nn.Module, batch: Any, world: World, alone: World, say: Callable[[str], None], optimizer: torch.optim.Optimizer
) -> Choice | None:  # fmt: skip
    """The program for a fit; None where there can be data parallelism alone: the step cannot be captured, batches of several
    processes are not one, or no other program passes. Collective.

    Args:
        module: whole, in every process.
        batch: this process's first one.
        world: the processes, each of which draws data of its own.
        alone: the same as one replica.
        say: tells the user what was chosen.
        optimizer: of the fit.

    Raises:
        SearchError: nothing fits: says the least memory that would do.
    """
    try:
        every = BatchJoin(alone).joined(batch)
        cut = blocks_of(module, every)
    except PiperError:
        return None  # whoever runs the step says why; it is alike in all processes

    memory = memory_of(module, world)
    path = file_of(module, every, cut, world, memory, optimizer)
    found = world.on_rank_zero(lambda: read(path))
    if found is None:
        costs = measured_together(module, every, alone, like(optimizer), cut)
        found = world.on_rank_zero(lambda: _searched(module, every, world.size, memory, *costs))
        if found is None:
            say("PiperStrategy: of the programs that a search finds, none passes the checks; so the processes are replicas")
            return None
        if world.is_rank_zero:
            write(path, found)
    say("\n".join(found.lines))
    return found


def _searched(module: nn.Module, batch: Any, devices: int, memory: int, workload: Workload, hardware: Hardware) -> Choice | None:
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
