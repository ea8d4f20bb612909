"""`search`: find the fastest program for a module and a batch that fits into the devices' memory, and check
it.

`search` measures or calculates the costs of the module's blocks, and chooses candidates with `best_of`. It
writes their programs, and returns the first program that passes the check and whose plan fits.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_piper.capture import flatten
from lightning_piper.capture.tensor_sharding.shardable_params import find_params
from lightning_piper.common.units import counted, duration
from lightning_piper.compiler import compile, verify
from lightning_piper.directives import Directive
from lightning_piper.errors import NoProgram, PiperError, SearchError
from lightning_piper.ir.values import Sharded
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.arguments import check_arguments, hardware_of
from lightning_piper.search.best_candidate import NothingFits, best_of, least_time
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.costs.chain import copy_of
from lightning_piper.search.costs.measurement import measured
from lightning_piper.search.costs.optimizers import optimizer_of, states_of
from lightning_piper.search.costs.parameters import like
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.program_writer import TENSOR, Params, Written, write
from lightning_piper.search.report import CandidateRow, Found, described, exact_size, search_progress, size
from lightning_piper.search.space import Candidate, bytes_of
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

# Share of the needed memory that the allocator keeps but cannot use. This is an assumption: torch's allocator
# rounds blocks above 1 MiB up to a multiple of 2 MiB, and cannot join blocks that are not adjacent.
FRAGMENTATION = 0.05
ROUNDS = 5  # largest number of searches, each with less memory than the one before
LARGER = 4  # after this many plans that do not fit, a new search with less memory begins
TRIED = 20  # largest number of candidates of one search whose programs are written and checked
# Beginning of the reason in `Proposal.refused`, if a program passes the check but its plan does not fit.
TOO_LARGE = "according to its plan it needs"
LOOKS = 1000  # budget of the search for the fastest program without a limit of memory
CALLS = 3  # smallest number of measured steps for each number of samples
AGAIN = "searching again with the logits of the loss in chunks (ChunkLoss)"
Check = Literal["static", "run", "off"]


@dataclass(frozen=True, repr=False)
class Proposal:
    """A program that a search proposes. `print` shows it.

    Attributes:
        found: The result of the search: the table of the best candidates, with reasons.
        chosen: The proposed candidate: the best one whose program passes the check and fits.
        written: The program of the candidate.
        workload: The costs of the step.
        needed: Bytes of the fullest device according to the program's plan, including the margin
            (`found.space.margin`); 0 if the program was not checked.
        refused: (candidate, reason) of better candidates that were rejected.
        checked: How the program was checked: "static", "run", or "off" (not).
        verdict: The verdict of `check="run"`, unless it is `verified`: `verified except`, and why.
        first: Directives at the beginning of the program: `ChunkLoss` or none.
        alternative: How the best program without `ChunkLoss` compares, or the best one with it if this program has
            none. Empty if the search did not try both.
    """

    found: Found
    chosen: Candidate
    written: Written
    workload: Workload
    needed: int
    refused: tuple[tuple[Candidate, str], ...]
    checked: Check
    verdict: str = ""
    first: tuple[Directive, ...] = ()
    alternative: str = ""

    def __repr__(self) -> str:
        return f"<Proposal: {self.described}>"

    @property
    def described(self) -> str:
        """The proposed candidate as text, such as "2 replicas at ZeRO 1; the loss in chunks"."""
        return described(self.chosen) + ("; the loss in chunks" if self.first else "")

    @property
    def is_limited(self) -> bool:
        """Whether a faster candidate does not fit into memory, as a short search without a limit of memory finds."""
        return least_time(self.found.space, LOOKS) < self._row.estimate.time

    @property
    def directives(self) -> tuple[Directive, ...]:
        return self.written.directives

    @property
    def time(self) -> float:
        """Predicted seconds of a step."""
        return float(self._row.estimate.time)

    @property
    def memory(self) -> int:
        """Predicted bytes of the fullest device, including the margin: according to the plan, or if the program
        was not checked, according to the estimate."""
        return self.needed or int(max(self._row.estimate.memory))

    @property
    def batch_size(self) -> int:
        """The samples that each replica reads of the batch for which the search found the program."""
        return self.workload.samples // self.written.replicas

    @property
    def _row(self) -> CandidateRow | Found:
        """The object that has the estimate of `chosen`: its row of the table, or `found` if no row has it."""
        return next((row for row in self.found.table if row.candidate == self.chosen), self.found)

    def annotate(self, module: nn.Module) -> list[RemovableHandle]:
        """Tag the module's stages as the program needs them. Return the handles of `annotate_modules`, or an
        empty list if there is one stage."""
        return self.written.annotate(module)

    def save(self, path: str | Path) -> None:
        """Write the program as JSON, with the groups of `annotate_modules` and the directives."""
        Path(path).write_text(json.dumps(self.written.to_json(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return the result of the search, the rejected candidates, and the program as Python code."""
        lines = [str(self.found), ""]
        lines += [f"refused: {described(candidate)}: {why}" for candidate, why in self.refused]
        lines += [self.alternative] if self.alternative else []
        how = (
            self.verdict
            or {
                "static": "checked statically",
                "run": "executed, and equal to one device",
                "off": "not checked",
            }[self.checked]
        )
        lines.append(f"the program of {self.described}, {how}:")
        return "\n".join([*lines, *self._conditions(), "", str(self.written)])

    def _conditions(self) -> Iterator[str]:
        """Yield the memory of the fullest device, and the batch that needs this memory, as lines."""
        by, margin = "its plan" if self.needed else "the estimate", float(self.found.space.margin)
        yield f"  memory: {exact_size(self.memory)} on the fullest device by {by}, with a margin of {margin:.1%}"
        replicas = self.written.replicas
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        n = self.batch_size
        yield f"  batch: {counted(n, 'sample')}{each}, such as from DataLoader(batch_size={n})"


def search(
    module: nn.Module,
    batch: Any,
    devices: int,
    memory: str | Number | None = None,
    *,
    hardware: Hardware | str | PathLike[str] | None = None,
    objective: str = "time",
    workload: Workload | None = None,
    check: Check = "static",
    all_devices: bool = False,
    progress: Callable[[str], None] | None = None,
    cut: BlockCut | None = None,
    **options: Any,
) -> Proposal:
    """Find the program of a module's training step that takes the least time and fits, and write it. The
    module is not changed.

    The search cuts stages at any boundary between blocks. docs/search.md lists what it chooses. It excludes
    candidates only by proved bounds (`bounds`). So no candidate of the space has a better estimate than
    `found.best` by more than the share `found.gap`.

    If no program fits, or if memory excludes a faster program, the search runs again with `ChunkLoss`, and
    returns the better program. It does not if a `workload` is given, or if the step has no such loss.

    Args:
        module: A LightningModule without annotations of its own. The module's parameters may be on the meta
            device if `hardware` is given.
        batch: The batch of one step, with all samples of all devices.
        devices: Number of devices.
        memory: Memory of each device, in bytes or as text such as "24GiB" (default: the memory of the
            hardware).
        hardware: A Hardware, the name of one of the package's files, or a path; costs are calculated from its
            figures. None: costs are measured on this machine.
        objective: "time", or "memory" for the memory of the fullest device.
        workload: The costs of the step, if they are known already, for example from a recording.
        check: How to check the program of a candidate: without a run ("static"), in addition by a run and a
            comparison with one device ("run"), or not ("off"). If the check fails, Piper tries the next best
            candidate. With "off", a program whose plan does not fit is not rejected either.
        all_devices: Consider only programs that use every device.
        progress: Called with a line of text about the progress.
        cut: The blocks of the module and the batch, if they are known.
        options: `schedules`, `levels`, `ranks`, `margin`, `gap` and `budget` of `best_of`.

    Raises:
        SearchError: An argument is not valid, or no program fits. If none fits, the error names the least
            memory in which a program fits.
        NoProgram: No schedule exists for this workload on these devices, or the best programs fail the check.
        CaptureError: The step cannot be captured.
        SimulationError: The file of the hardware is not valid, or has no speed for a data type.
    """
    check_arguments(devices, objective, check, memory, hardware, options)
    say = progress or (lambda text: None)
    if hardware is None:
        say("measuring this machine")
    on = hardware_of(hardware)
    if cut is None:
        say("tracing the step")
        cut = blocks_of(module, batch)
    limit = bytes_of(on.memory if memory is None else memory)
    options = {"margin": FRAGMENTATION, "all_devices": all_devices, "objective": objective, **options}
    run = _ProposalSearch(module, batch, devices, on, hardware is not None, check, limit, options, say)
    if workload is not None:
        return run.proposal(cut, workload)
    say(f"{len(cut.names)} blocks; {'measuring' if hardware is None else 'calculating'} what they cost")
    try:
        plain = run.proposal(cut)
    except NoProgram:
        raise
    except SearchError as error:
        return run.instead_of(error, cut)
    return run.or_with_chunks(plain, cut) if plain.is_limited or objective == "memory" else plain


@dataclass(frozen=True)
class _ProposalSearch:
    """A search for one module. The arguments are the arguments of `search`.

    Attributes:
        on: The hardware.
        calculates: Whether costs are calculated for the hardware. If not, they are measured on this machine.
        limit: Bytes of each device.
        options: Arguments of `best_of`.
        say: Called with a line of text about the progress.
    """

    module: nn.Module
    batch: Any
    devices: int
    on: Hardware
    calculates: bool
    check: Check
    limit: Number
    options: Mapping[str, Any]
    say: Callable[[str], None]

    def proposal(self, cut: BlockCut, workload: Workload | None = None) -> Proposal:
        """Return the best program of the blocks that passes the check and fits.

        Args:
            cut: The blocks of the step.
            workload: Their costs. None: find the costs.

        Raises:
            SearchError: No program fits.
            NoProgram: No program exists, or the best programs fail the check.
        """
        if workload is None:
            on = self.on if self.calculates else None
            workload = work_of(self.module, self.batch, on, sizes_of(self.batch), cut)
        self.say("searching")
        progress = search_progress(self.say, self.options["objective"])
        find = partial(best_of, workload, self.on, self.devices, progress=progress, **self.options)
        return _Trials(self.module, self.batch, cut, self.check, self.limit, self.say).proposal(find)

    def or_with_chunks(self, plain: Proposal, cut: BlockCut) -> Proposal:
        """Return the better one of `plain` and the best program with `ChunkLoss`. Return `plain` if the step has no
        loss for `ChunkLoss`."""
        if (chunked := cut.chunked()) is None:
            return plain
        self.say(f"found a program; a better one may fit; {AGAIN}")
        try:
            return better(plain, self.proposal(chunked), self.options["objective"])
        except SearchError as error:
            return compared(plain, error.memory)

    def instead_of(self, error: SearchError, cut: BlockCut) -> Proposal:
        """Return the best program with `ChunkLoss`, after `error` has said that no program without it fits.

        Raises:
            SearchError: No program with `ChunkLoss` fits, or the step has no loss for it.
        """
        if (chunked := cut.chunked()) is None:
            raise error
        self.say(f"found no program that fits; {AGAIN}")
        try:
            return compared(self.proposal(chunked), error.memory)
        except SearchError as second:
            raise with_less_memory(error, second) from None


def with_less_memory(plain: SearchError, chunked: SearchError) -> SearchError:
    """Return the error to show if no program fits, without and with `ChunkLoss`: the error that names less memory."""
    return chunked if chunked.memory < plain.memory else plain


def better(plain: Proposal, chunked: Proposal, objective: str = "time") -> Proposal:
    """Return the better one of the proposals without and with `ChunkLoss`, compared with the other one.

    Args:
        objective: "time" or "memory".
    """
    if _value(chunked, objective) < _value(plain, objective):
        return compared(chunked, plain)
    return compared(plain, chunked)


def compared(best: Proposal, other: Proposal | float) -> Proposal:
    """Return a proposal with a text about the other search, which has `ChunkLoss` if `best` does not have it, or the
    reverse. `other` is its proposal. If it found none, `other` is `SearchError.memory`: infinite if memory is not the
    cause."""
    which = "without ChunkLoss" if best.first else "with ChunkLoss"
    if not isinstance(other, Proposal):
        fits = " that fits" if math.isfinite(other) else ""
        return replace(best, alternative=f"{which}, the search found no program{fits}")
    needs = f"{duration(other.time, 4)} a step and {size(other.memory)}"
    return replace(best, alternative=f"{which}: {described(other.chosen)}, {needs}")


def _value(proposal: Proposal, objective: str) -> float:
    return proposal.memory if objective == "memory" else proposal.time


class _TooLarge(NamedTuple):
    """A candidate whose program passed the check, but whose plan does not fit.

    Attributes:
        needed: Bytes of the fullest device, according to the plan.
        estimated: Bytes of the fullest device, according to the search.
    """

    needed: float
    estimated: Number


class _Trials:
    """A series of trials of candidates: write the program, check it, and see whether its plan fits.

    Args:
        module: The module to be trained.
        batch: The batch of one step.
        cut: The blocks of the module.
        check: How to check a program.
        limit: Bytes of each device.
        say: Called with a line of text about the progress.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        cut: BlockCut,
        check: Check,
        limit: Number,
        say: Callable[[str], None],
    ) -> None:
        self._module, self._batch, self._cut, self._check = module, batch, cut, check
        self._limit, self._say = limit, say
        self._refused: list[tuple[Candidate, str]] = []
        self._large: list[_TooLarge] = []

    def proposal(self, find: Callable[[Number], Found]) -> Proposal:
        """Return the best program that passes the check and whose plan fits into the limit.

        Args:
            find: Takes a number of bytes, and returns the best candidates that fit into it by estimate.

        Raises:
            NoProgram: No program exists, or the programs of the best candidates fail the check.
            SearchError: No plan fits.
        """
        # If plans need more than their estimates, search again with less memory, in the same proportion.
        within = self._limit
        for _ in range(ROUNDS):
            found, before = self._found(find, within), len(self._large)
            proposal = self._first_fitting(found)
            if proposal is not None:
                return proposal
            ratios = [float(each.estimated) / each.needed for each in self._large[before:]]
            if not ratios and self._large:
                break
            if not ratios:
                raise NoProgram(
                    f"search: {counted(len(self._refused), 'program')} of the best candidates failed the check. "
                    f"Reason for the best candidate: {self._refused[0][1]}"
                )
            within = int(min(float(self._limit) * max(ratios), float(within) * 0.999))
        raise self._too_large()

    def _found(self, find: Callable[[Number], Found], within: Number) -> Found:
        """Return the best candidates within this many bytes. If none fits, but an earlier search had more memory,
        return the candidate with the least memory, unless its plan is known.

        Raises:
            SearchError: The search found nothing that fits. If an earlier search had more memory, the error
                names the least memory that the plan of one of its candidates needs.
        """
        try:
            return find(within)
        except NothingFits as error:
            smallest = error.smallest
            if within == self._limit:
                raise NothingFits(error.problem, smallest, self._enough(smallest)) from None
            if any(smallest.best == candidate for candidate, _ in self._refused):
                raise self._too_large() from error
            return replace(smallest, gap=math.inf, space=replace(smallest.space, memory=self._limit))
        except SearchError as error:
            if within == self._limit:
                raise
            raise self._too_large() from error

    def _enough(self, found: Found) -> float:
        """Return the least memory, including the margin, in which a candidate of the table fits by its estimate and
        by its plan. The result is 0 if programs are not checked, or if no tried program passes the check."""
        least = math.inf
        smallest = sorted(_estimated(found).items(), key=lambda item: item[1])
        for candidate, estimated in smallest[:LARGER] if self._check != "off" else ():
            if estimated >= least:
                break
            with contextlib.suppress(PiperError):
                least = min(least, max(float(estimated), self._tried(candidate, found, "static")[1]))
        return 0 if math.isinf(least) else least

    def _tried(self, candidate: Candidate, found: Found, check: Check) -> tuple[Written, float, str]:
        """Check a candidate of a search. Return its program, the bytes that it needs on its fullest device,
        including the margin, and the verdict; see `_checked`."""
        written = _written(candidate, self._cut)
        written = replace(written, directives=(*self._cut.first, *written.directives))
        states = found.space.workload.states
        used, verdict = _checked(written, self._module, self._batch, check, states)
        return written, float(used * (1 + found.space.margin)), verdict

    def _too_large(self) -> SearchError:
        """Return the error of a search whose programs fit by estimate, but not by their plans."""
        needed = min(self._large).needed
        error = SearchError(
            f"search: {counted(len(self._large), 'program')} may fit in {size(self._limit)} by estimate, but none "
            f"fits according to its plan. Give {exact_size(needed)} for each device [PIPER-P002]"
        )
        error.memory = needed
        return error

    def _first_fitting(self, found: Found) -> Proposal | None:
        """Try the candidates of one search. Return the proposal of the first candidate whose program passes
        the check and whose plan fits. Return None if there is no such candidate, or after `LARGER` plans that
        do not fit. Add each rejected candidate to `_refused`, and to `_large` if its plan does not fit."""
        larger = 0
        estimated = _estimated(found)
        for candidate in _in_turn(found, self._refused):
            self._say(f"checking {described(candidate)}")
            try:
                written, needed, verdict = self._tried(candidate, found, self._check)
            except PiperError as error:
                self._refused.append((candidate, " ".join(str(error).split())[:1000]))
                continue
            if needed <= self._limit:
                return Proposal(
                    found,
                    candidate,
                    written,
                    found.space.workload,
                    int(needed),
                    tuple(self._refused),
                    self._check,
                    verdict,
                    self._cut.first,
                )
            why = f"{TOO_LARGE} {size(needed)} on the fullest device, more than estimated"
            self._refused.append((candidate, why))
            self._large.append(_TooLarge(needed, estimated[candidate]))
            larger += 1
            if larger == LARGER:
                break
        return None


def _estimated(found: Found) -> dict[Candidate, Number]:
    """Return the estimated bytes of the fullest device by candidate: the best candidate and the table's candidates."""
    rows = {row.candidate: max(row.estimate.memory) for row in found.table}
    return rows | {found.best: max(found.estimate.memory)}


def work_of(
    module: nn.Module, batch: Any, on: Hardware | None, samples: Sequence[int], cut: BlockCut
) -> Workload:
    """Return the costs of the step. They include the update by the optimizer that the module makes, or by
    AdamW if `optimizer_of` does not find an optimizer.

    Args:
        module, batch: A LightningModule and the batch of one step.
        on: The hardware for which costs are calculated. None: costs are measured on this machine.
        samples: The numbers of samples for which costs are computed.
        cut: The blocks of the module.
    """
    optimizer = optimizer_of(module)
    states = states_of(optimizer, module)
    if on is not None:
        return analytic(module, batch, on, samples, states=states, cut=cut)
    updates = torch.optim.AdamW if optimizer is None else like(optimizer)
    return measured(module, batch, samples, CALLS, states, cut, optimizer=updates)


def sizes_of(batch: Any) -> list[int]:
    """Return the numbers of samples for which a search needs costs: 1, 1/2, 1/4, 1/8 and 1/16 of the batch.
    Each number is rounded down, and at least 1. For a batch of 12 samples, return [1, 3, 6, 12]."""
    samples = flatten(batch)[1].size
    return sorted({max(1, samples // parts) for parts in (1, 2, 4, 8, 16)})


def _in_turn(found: Found, refused: Sequence[tuple[Candidate, str]]) -> list[Candidate]:
    """Return up to `TRIED` candidates that fit by estimate and were not rejected before, the best first."""
    fitting = [row.candidate for row in found.table if max(row.estimate.memory) <= found.space.memory]
    before = {candidate for candidate, _ in refused}
    return [candidate for candidate in dict.fromkeys([found.best, *fitting]) if candidate not in before][
        :TRIED
    ]


def _written(candidate: Candidate, cut: BlockCut) -> Written:
    return write_stages(candidate, cut, _params(cut, candidate.layout.tensor))


def write_stages(candidate: Candidate, cut: BlockCut, params: Params | None) -> Written:
    """Return the program of a candidate whose stages are blocks of `cut`.

    Args:
        params: Parameters that are sharded along the tensor axis, as in `ShardWeights`. None: the axis has one
            device.

    Raises:
        SearchError: Several stages would contain work on parameters outside of all modules. No tag can assign
            this work to different stages.
    """
    stages = cut.stages(candidate.cuts)
    unnamed = {
        stage
        for stage, (a, b) in enumerate(candidate.spans(len(cut.names)))
        for block in cut.untagged
        if a <= block < b
    }
    if len(unnamed) > 1:
        raise SearchError(
            f"stages {sorted(unnamed)} use parameters outside of all submodules, and no tag can assign "
            "this work to stages. Move the parameters into submodules [PIPER-P004]"
        )
    return write(candidate, stages, params, next(iter(unnamed), None))


def _params(cut: BlockCut, degree: int) -> Params | None:
    """Return the parameters that are divided over `degree` devices: name -> dimension, or (dimension, runs)
    if each run is divided separately. None for one device."""
    if degree == 1:
        return None
    found: dict[str, Sharded] = find_params(cut.step.joint_graph, TENSOR, degree, {})
    parts = {name: part for n, part in found.items() for name in cut.all_named([n])}
    ordered = (name for block in cut.params for name in block if name in parts)  # in the order of the model
    return {
        name: parts[name].dim if parts[name].blocks == 1 else (parts[name].dim, parts[name].blocks)
        for name in ordered
    }


def _checked(written: Written, module: nn.Module, batch: Any, check: Check, states: float) -> tuple[int, str]:
    """Check a program. Return the bytes that it needs on its fullest device, and the verdict.

    The bytes are 0 if the program is not checked. The verdict is empty unless a run shows `verified except`.

    Raises:
        PiperError: A check fails: the program is not valid, or not equivalent to one device.
    """
    if check == "off":
        return 0, ""
    annotated = copy_of(module)
    written.annotate(annotated)
    verdict = ""
    with torch.random.fork_rng(devices=[]):
        compiled = compile(annotated, batch, written.directives)
        if check == "run":
            report = verify(annotated, batch, written.directives)
            report.require()
            verdict = "" if report.verdict == "verified" else report.conclusion
    return max(bytes_needed(compiled, states).values()), verdict
