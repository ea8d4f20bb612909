"""What `PiperStrategy("auto")` does at the first batch of a fit: rank 0 searches a program, and all processes take it over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import as_before
from lightning_piper.errors import NoProgram, PiperError
from lightning_piper.processes.joining import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.processes.world import described as text_of
from lightning_piper.search.blocks import Cut, blocks_of
from lightning_piper.search.optimizers import states_of
from lightning_piper.search.parameters import like
from lightning_piper.search.proposing import Proposal, search
from lightning_piper.search.report import counted, described, size
from lightning_piper.search.workload import Workload
from lightning_piper.session.available import memory_of
from lightning_piper.session.cached import Choice, file_of, folder, read, write
from lightning_piper.session.together import measured_together
from lightning_piper.simulate.hardware import Hardware


def choose(
    module: nn.Module, batch: Any, world: World, alone: World, say: Callable[[str], None], optimizer: torch.optim.Optimizer
) -> Choice | None:  # fmt: skip
    """The program for a fit; None where there can be data parallelism alone, and then why: the step cannot be captured or
    measured, batches of several processes are not one, or no other program passes. Collective.

    Args:
        module: whole, in every process.
        batch: this process's first one.
        world: the processes, each of which draws data of its own.
        alone: the same as one replica.
        say: tells the user what was chosen, or why nothing is.
        optimizer: of the fit.

    Raises:
        SearchError: nothing fits: says the least memory that would do.
    """
    try:
        every = BatchJoin(alone).joined(batch)
        cut = _cut(module, every, world)
    except PiperError as error:
        say(f"PiperStrategy searches no program, so the processes are replicas: {error}")
        return None

    memory = memory_of(module, world)
    states = states_of(optimizer, module)
    path = file_of(module, every, cut, world, memory, optimizer, states)
    found = world.on_rank_zero(lambda: read(path))
    if found is None:
        try:
            costs = measured_together(module, every, alone, like(optimizer), states, cut)
        except PiperError as error:
            say(f"PiperStrategy cannot measure the step, so the processes are replicas: {error}")
            return None
        found = world.on_rank_zero(lambda: _searched(module, every, cut, world.size, memory, *costs))
        if found is None:
            say("PiperStrategy: of the programs that a search finds, none passes the checks; so the processes are replicas")
            return None
        if world.is_rank_zero and not write(path, found):
            found = Choice(found.written, (*found.lines[:-1], f"  it is checked; it could not be kept in {folder()}"))
    say("\n".join(found.lines))
    return found


def _cut(module: nn.Module, batch: Any, world: World) -> Cut:
    """The step's blocks, which are the same in all processes. Collective: what fails in one process fails in all.

    Raises:
        PiperError: the step cannot be captured, or is another one in another process.
    """
    failure: Exception | None = None
    try:
        with as_before(module):
            cut = blocks_of(module, batch)
        own = hashlib.blake2b(cut.step.text.encode(), digest_size=16).hexdigest()
    except Exception as error:  # the step's own code may raise anything
        failure, own = error, ""
    found = world.gather((None if failure is None else text_of(failure), own))
    for rank, (problem, text) in enumerate(found):
        if problem is not None:
            raise PiperError(problem if rank == 0 else f"rank {rank}: {problem}") from failure
        if text != found[0][1]:
            raise PiperError(f"the step of rank {rank} is another one than that of rank 0")
    return cut


def _searched(
    module: nn.Module, batch: Any, cut: Cut, devices: int, memory: int, workload: Workload, hardware: Hardware
) -> Choice | None:  # fmt: skip
    try:
        return _told(search(module, batch, devices, memory, hardware=hardware, workload=workload, all_devices=True, cut=cut))
    except NoProgram:
        return None


def _told(proposal: Proposal) -> Choice:
    chosen, found = proposal.chosen, proposal.found
    others = [row for row in found.table if row.candidate not in (chosen, *(refused for refused, _ in proposal.refused))]
    lines = [
        f"PiperStrategy chose {described(chosen)}",
        f"  predicted: {proposal.time * 1e3:.4g} ms a step, {size(proposal.memory)} on the fullest device",
        *(f"  and not {described(row.candidate)}: {row.estimate.time * 1e3:.4g} ms, {row.reason}" for row in others[:1]),
        *(f"  and not {described(candidate)}: {why}" for candidate, why in proposal.refused[:1]),
        f"  {_proved(proposal)}",
        f"  it is checked, and kept in {folder()}: PiperStrategy(directives=...) takes it from there",
    ]
    return Choice(proposal.written, tuple(lines))


def _proved(proposal: Proposal) -> str:
    found, refused = proposal.found, len(proposal.refused)
    but = f", but for {refused} that {'is' if refused == 1 else 'are'} refused" if refused else ""
    if found.gap:
        return f"the best of {counted(found.size, 'program')} may take up to {float(found.gap):.1%} less{but}"
    return f"of {counted(found.size, 'program')}, none is predicted to be better{but}"
