"""The search of `PiperStrategy("auto")` at the first batch of a fit. Rank 0 searches for a program, and all
processes use that program.

The search runs if replicas do not fit into memory, or if the user allows a program that divides the module.

Programs that leave the whole module on each process come first, because hooks, callbacks and data loaders
read the module. The optimizer is tried before the search, because some optimizers work neither with shards of
parameters nor with only some of the parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import as_before
from lightning_piper.common.units import counted, duration
from lightning_piper.errors import NoProgram, PiperError, SearchError
from lightning_piper.holdings.elementwise import NotElementwise, Untried, sees_others, state_keys
from lightning_piper.processes.batch_join import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.processes.world import described as text_of
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.costs.optimizers import states_of
from lightning_piper.search.costs.parameters import like
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.proposal import TOO_LARGE, Proposal, better, compared, search
from lightning_piper.search.report import described, size
from lightning_piper.search.space import Candidate
from lightning_piper.session.available_memory import memory_of
from lightning_piper.session.concurrent_measurement import measured_together
from lightning_piper.session.program_cache import ChosenProgram, file_of, folder, read, write
from lightning_piper.simulate.hardware import Hardware


@dataclass(frozen=True)
class Part:
    """A part of the space of programs that is searched separately.

    Attributes:
        levels: The ZeRO stages to try.
        ranks: The largest number of ranks of one pipeline; None for no limit.
    """

    levels: tuple[int, ...] = (0, 1, 2, 3)
    ranks: int | None = None


WHOLE = Part((0,), 1)  # each process has the whole module
# Line of the log if the chosen program divides the module.
LOST = (
    "  each process now holds only its part of the module: hooks and callbacks cannot change the whole module, and "
    "must read or run it inside of piper.whole_module. Checkpoints, gradient clipping and Lightning's weight "
    "averaging still work"
)


def choose(
    module: nn.Module,
    batch: Any,
    world: World,
    one_replica: World,
    say: Callable[[str], None],
    optimizer: torch.optim.Optimizer,
    whole: bool,
) -> ChosenProgram | None:
    """Return the program that a search, or the file of an earlier search, gives for a fit. Collective.

    If only data parallelism is possible, report why and return None. The reasons are:

    - The step cannot be captured or measured.
    - The batches of several processes cannot be joined.
    - No program fits into memory.
    - No program other than data parallelism passes the checks.
    - Replicas of the whole step are better than each program that passes the checks. The replicas themselves
      fail a check, but can run uncaptured.

    Args:
        module: The whole module, on every process.
        batch: This process's first batch.
        world: The processes, each of which draws its own data.
        one_replica: The same processes as one replica.
        say: Tells the user which program was chosen, or why no program was chosen.
        optimizer: The optimizer of the fit.
        whole: Whether to take a program that divides the module only if no other program fits.
    """
    try:
        every = BatchJoin(one_replica).joined(batch)
        cut = _cut(module, every, world)
    except PiperError as error:
        say(f"PiperStrategy cannot search for a program and uses data parallelism: {error}")
        return None

    memory = memory_of(module, world)
    states = states_of(optimizer, module)
    parts = world.broadcast(parts_for(optimizer, world.device, whole))
    path = file_of(module, every, cut, world, memory, optimizer, states, parts)
    found = world.on_rank_zero(lambda: read(path))
    if found is None:
        say("PiperStrategy measures the step on all processes, and then searches for a program")

        def measure(cut: BlockCut) -> tuple[Workload, Hardware]:
            return measured_together(module, every, one_replica, like(optimizer), states, cut)

        try:
            costs = measure(cut)
        except PiperError as error:
            say(f"PiperStrategy cannot measure the step and uses data parallelism: {error}")
            return None
        searched = partial(_searched, module, every, devices=world.size, memory=memory)
        outcome = world.on_rank_zero(lambda: searched(cut, parts, *costs), share=False)
        outcome = _with_chunks(outcome, cut, parts, measure, searched, world, say)
        found, problem = world.broadcast((None, "") if outcome is None else outcome.told())
        if found is None:
            say(f"PiperStrategy uses data parallelism instead of a program from the search: {problem}")
            return None
        if world.is_rank_zero and not write(path, found):
            found = replace(
                found,
                lines=(
                    *found.lines[:-1],
                    f"  the program passed the static checks. It could not be saved in {folder()}",
                ),
            )
    say("\n".join(found.lines))
    return replace(found, file=path)


def parts_for(optimizer: torch.optim.Optimizer, device: torch.device, whole: bool) -> list[Part]:
    """Return the parts of the search space for an optimizer, to be searched in order until a program fits.

    Replicas of the whole module work with every optimizer.

    Args:
        optimizer: The optimizer of the fit.
        device: The device to try the optimizer on.
        whole: Whether programs that leave the whole module on each process come first.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    levels, ranks = WHOLE.levels, WHOLE.ranks
    with contextlib.suppress(NotElementwise, Untried):
        state_keys(optimizer, groups, device)
        levels = Part().levels
    with contextlib.suppress(Untried):
        ranks = WHOLE.ranks if sees_others(optimizer, groups, device) else None
    return list(dict.fromkeys([*([WHOLE] if whole else []), Part(levels, ranks)]))


def _cut(module: nn.Module, batch: Any, world: World) -> BlockCut:
    """Find the step's blocks and check that they are the same on all processes. If this fails on one process,
    it fails on all processes. Collective.

    Raises:
        PiperError: The step cannot be captured, or differs between processes.
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
            raise PiperError(
                f"rank {rank} traced a different training_step than rank 0. Build the module in the same way "
                "in every process, and make the step independent of the rank, the time and unseeded random numbers [PIPER-L006]"
            )
    return cut


@dataclass(frozen=True)
class _Outcome:
    """The result of a search on rank 0.

    Attributes:
        part: Index of the part of the space in which the search ended.
        proposal: The proposed program; None if there is none.
        problem: Why there is none.
        needed: Bytes of each device that are enough for a program, if `problem` names them; otherwise infinite.
        is_limited: Whether memory excludes a program that is better, or that leaves the module whole.
    """

    part: int
    proposal: Proposal | None = None
    problem: str = ""
    needed: float = math.inf
    is_limited: bool = False

    def told(self) -> tuple[ChosenProgram | None, str]:
        """Return the chosen program, or None, and `problem`."""
        return None if self.proposal is None else _told(self.proposal), self.problem


def _with_chunks(
    outcome: _Outcome | None,
    cut: BlockCut,
    parts: Sequence[Part],
    measure: Callable[[BlockCut], tuple[Workload, Hardware]],
    searched: Callable[..., _Outcome],
    world: World,
    say: Callable[[str], None],
) -> _Outcome | None:
    """If memory limits the outcome of a search and the step has a loss that `ChunkLoss` changes, measure and search
    again with `ChunkLoss`. Return the better outcome on rank 0. Collective.

    Args:
        outcome: The outcome on rank 0; None on other ranks.
        cut: The blocks of the step.
        parts: The parts of the space, in the order of the search.
        measure: Measures the costs of a cut. Collective.
        searched: `_searched` for this module, batch, and devices.
        world: The processes.
        say: Tells the user about the second search.
    """
    if not world.broadcast(outcome is not None and outcome.is_limited):
        return outcome
    chunked = cut.chunked()
    if not all(world.gather(chunked is not None)):
        return outcome
    assert chunked is not None
    say(
        "PiperStrategy measures the step with its loss in chunks (ChunkLoss), because memory limits the program"
    )
    try:
        costs = measure(chunked)
    except PiperError as error:
        say(f"PiperStrategy cannot measure the step with its loss in chunks: {error}")
        return outcome

    def again() -> _Outcome:
        assert outcome is not None
        return _better(outcome, searched(chunked, parts[: outcome.part + 1], *costs))

    return world.on_rank_zero(again, share=False)


def _better(plain: _Outcome, chunked: _Outcome) -> _Outcome:
    """Return the better outcome of the searches without and with `ChunkLoss`. A program from an earlier part of the
    space is better. Without a program, the problem that names less memory is better."""
    if plain.proposal is None and chunked.proposal is None:
        return chunked if chunked.needed < plain.needed else plain
    if plain.proposal is None or chunked.proposal is None:
        best, other = (plain, chunked) if chunked.proposal is None else (chunked, plain)
        assert best.proposal is not None
        return replace(best, proposal=compared(best.proposal, other.needed))
    if chunked.part < plain.part:
        return replace(chunked, proposal=compared(chunked.proposal, plain.proposal))
    return replace(plain, proposal=better(plain.proposal, chunked.proposal))


def _searched(
    module: nn.Module,
    batch: Any,
    cut: BlockCut,
    parts: Sequence[Part],
    workload: Workload,
    hardware: Hardware,
    *,
    devices: int,
    memory: int,
) -> _Outcome:
    """Return the choice from the first part of the space in which a program fits. There is no choice if no program
    fits, or if an uncaptured step as under DDP is faster than the choice.

    Args:
        parts: The parts of the space, in the order of the search.
        workload, hardware: The measured costs of the step, and the machine.
        devices: Number of devices.
        memory: Bytes that a program may use on each device.
    """
    problem, needed, is_limited = "", math.inf, False
    for index, part in enumerate(parts):
        try:
            found = search(
                module,
                batch,
                devices,
                memory,
                hardware=hardware,
                workload=_without_exchanges(workload) if part == WHOLE else workload,
                all_devices=True,
                cut=cut,
                levels=part.levels,
                ranks=part.ranks,
            )
        except SearchError as error:
            problem, needed = str(error), error.memory
            is_limited = is_limited or not isinstance(error, NoProgram)
            continue
        refused = (
            why for candidate, why in found.refused if _is_ddps(candidate) and not why.startswith(TOO_LARGE)
        )
        # With `ChunkLoss`, a step is not as under DDP.
        why = None if cut.first else next(refused, None)
        if why is not None:
            return _Outcome(
                index, problem=f"an uncaptured step, as under DDP, is faster than {found.described}: {why}"
            )
        return _Outcome(index, found, is_limited=is_limited or found.is_limited)
    return _Outcome(len(parts) - 1, problem=problem, needed=needed, is_limited=is_limited)


def _without_exchanges(workload: Workload) -> Workload:
    """Return the workload without the rows that blocks send to experts. A search then does not divide experts
    over replicas."""
    return replace(workload, blocks=tuple(replace(block, routed=0) for block in workload.blocks))


def _told(proposal: Proposal) -> ChosenProgram:
    """Return the chosen program, with lines that tell the user what was chosen and what was rejected."""
    chosen, found = proposal.chosen, proposal.found
    others = [
        row
        for row in found.table
        if row.candidate not in (chosen, *(refused for refused, _ in proposal.refused))
    ]
    lines = [
        f"PiperStrategy chose {proposal.described}",
        f"  predicted: {duration(proposal.time, 4)} a step, {size(proposal.memory)} on the fullest device",
        *(
            f"  rejected {described(row.candidate)}: {duration(float(row.estimate.time), 4)}, {row.reason}"
            for row in others[:1]
        ),
        *(f"  rejected {described(candidate)}: {why}" for candidate, why in proposal.refused[:1]),
        *([f"  {proposal.alternative}"] if proposal.alternative else []),
        f"  {_proved(proposal)}",
        *([] if _is_whole(chosen) else [LOST]),
        f"  the program passed the static checks and is saved in {folder()}. To use it again, pass its file "
        "as PiperStrategy(directives=...)",
    ]
    return ChosenProgram(proposal.written, tuple(lines), proposal.time)


def _is_whole(chosen: Candidate) -> bool:
    """Return whether each process has the whole module under this candidate."""
    layout = chosen.layout
    return layout.ranks == layout.tensor == layout.routed == 1 and not any(chosen.levels)


def _is_ddps(candidate: Candidate) -> bool:
    """Return whether the candidate does the same as DDP."""
    return (
        _is_whole(candidate)
        and candidate.layout.microbatches == 1
        and not candidate.recomputed + candidate.offloaded
    )


def _proved(proposal: Proposal) -> str:
    """Return what the search has proved about the proposal, as text."""
    found, refused = proposal.found, len(proposal.refused)
    but = f", except {refused} that {'was' if refused == 1 else 'were'} rejected" if refused else ""
    if math.isinf(found.gap):
        best = f"the best of {counted(found.size, 'program')}{but},"
        return f"the search ended before it had a bound on {best} so a better program may exist"
    if found.gap:
        return (
            f"the best of {counted(found.size, 'program')} may take up to {float(found.less):.1%} less "
            f"time{but}"
        )
    return f"of {counted(found.size, 'program')}, none is predicted to be better{but}"
