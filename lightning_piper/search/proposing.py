"""`search`: a module, a batch and devices -> the fastest program that fits, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_piper.capture import flatten
from lightning_piper.capture.finding import find_params
from lightning_piper.compiler import compile, verify
from lightning_piper.directives import Directive
from lightning_piper.errors import NoProgram, PiperError, SearchError
from lightning_piper.ir.values import Shard as Part
from lightning_piper.limits import shown
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.analytic import analytic
from lightning_piper.search.blocks import Cut, blocks_of
from lightning_piper.search.chain import copy_of
from lightning_piper.search.measuring import measured
from lightning_piper.search.optimizers import optimizer_of, states_of
from lightning_piper.search.parameters import like
from lightning_piper.search.report import Found, Row, described, size
from lightning_piper.search.searching import best_of, check_asked
from lightning_piper.search.space import Candidate, bytes_of
from lightning_piper.search.workload import Workload
from lightning_piper.search.writing import TENSOR, Params, Written, write
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

# Of memory, as a share of what is needed: what an allocator keeps and cannot use. An assumption: torch's rounds what is more than
# 1 MiB up to a multiple of 2 MiB, and cannot join what lies apart.
FRAGMENTATION = 0.05
ROUNDS = 5  # searches, each within less memory than the one before, until the plan of what is found fits
LARGER = 4  # candidates whose plans do not fit, until there is another search
TRIED = 20  # candidates that are written and checked, at most, until one passes
TOO_LARGE = "by its plan it needs"  # why a candidate is refused that passes the checks
CALLS = 3  # steps of each size that are measured
OPTIONS = ("schedules", "levels", "ranks", "margin", "gap", "budget")  # of `best_of`
Check = Literal["static", "run", "off"]


@dataclass(frozen=True)
class Proposal:
    """What a search proposes; `print` shows it.

    Attributes:
        found: the search's result: the table of the best candidates, and why each of them is not the one.
        chosen: the candidate that is proposed: the best one, unless its program was refused.
        written: its program.
        workload: what the step costs.
        needed: bytes of the fullest device, as the program's plan says; 0 if it was not checked.
        refused: candidates that were better, and why their programs are refused.
        checked: how the program was checked.
        verdict: of its execution, if it is not that it is equal to one device: `verified except`, and why.
    """

    found: Found
    chosen: Candidate
    written: Written
    workload: Workload
    needed: int
    refused: tuple[tuple[Candidate, str], ...]
    checked: Check
    verdict: str = ""

    @property
    def directives(self) -> tuple[Directive, ...]:
        return self.written.directives

    @property
    def time(self) -> float:
        """Seconds of a step, predicted."""
        return float(self._row.estimate.time)

    @property
    def memory(self) -> int:
        """Bytes of the fullest device, predicted."""
        return self.needed or int(max(self._row.estimate.memory))

    @property
    def _row(self) -> Row | Found:
        return next((row for row in self.found.table if row.candidate == self.chosen), self.found)

    def annotate(self, module: nn.Module) -> list[RemovableHandle]:
        """Tag the module's stages, as the program needs them; `annotate_modules` says what it returns."""
        return self.written.annotate(module)

    def save(self, path: str | Path) -> None:
        """As JSON: `annotate`, for `annotate_modules`, and `directives`."""
        Path(path).write_text(json.dumps(self.written.to_json(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [str(self.found), ""]
        lines += [f"refused: {described(candidate)}: {why}" for candidate, why in self.refused]
        how = (
            self.verdict
            or {"static": "checked statically", "run": "executed, and equal to one device", "off": "not checked"}[self.checked]
        )
        return "\n".join([*lines, f"the program of {described(self.chosen)}, {how}:", "", str(self.written)])


def search(
    module: nn.Module, batch: Any, devices: int, memory: str | Number | None = None, *, hardware: Hardware | str | None = None,
    objective: str = "time", workload: Workload | None = None, check: Check = "static", all_devices: bool = False,
    progress: Callable[[str], None] | None = None, cut: Cut | None = None, **options: Any,
) -> Proposal:  # fmt: skip
    """Find the program of a module's training step that takes least time, of those that fit, and write it.

    Stages are cut at any border between blocks, of any lengths; with them are chosen the schedule and its microbatches, replicas
    and the level of ZeRO of each stage, members of a tensor axis, stages that recompute or offload. Bounds exclude candidates, and
    are proved (`bounds`): so nothing of the space is better than the result, or by so much as the result says.

    Args:
        module: a LightningModule, without annotations of its own; where `hardware` is given, its parameters may be on the meta
            device.
        batch: of one step: all samples that it has, on all devices.
        devices: how many there are.
        memory: of each device, bytes or text such as "24GiB"; that of the hardware when left out.
        hardware: a Hardware, the name of one of the package's files, or the path of one: costs are calculated from its figures.
            Left out, they are measured on this machine.
        objective: "time", or "memory": the least for the fullest device.
        workload: the step's costs, where they are known already, as from a recording.
        check: of the winner: its program is checked as every program is ("static"), or also executed and compared with one device
            ("run"); a program that is refused gives way to the next best.
        all_devices: consider only programs that use every device.
        progress: told what is done.
        cut: of the module and the batch, if there is one.
        options: `schedules`, `levels`, `ranks`, `margin`, `gap` and `budget` of `best_of`.

    Raises:
        SearchError: an argument cannot be used, or nothing fits: says the least memory that would do.
        CaptureError: the step cannot be captured.
    """
    if check not in ("static", "run", "off"):
        raise SearchError(f"search: check={shown(check)}; give 'static', 'run' or 'off'")
    # What cannot be used is told before a model is traced and measured.
    if unknown := options.keys() - OPTIONS:
        raise SearchError(f"search: there is no argument {min(unknown)!r}; options are {', '.join(OPTIONS)}")
    check_asked(devices, objective, **options)
    if memory is not None:
        bytes_of(memory)
    if not isinstance(hardware, Hardware | str | None):
        raise SearchError(f"search: hardware={shown(hardware)}; give a Hardware, a name, or the path of a JSON file")
    say = progress or (lambda text: None)
    on = Hardware.measure() if hardware is None else Hardware.read(hardware) if isinstance(hardware, str) else hardware
    if cut is None:
        say("tracing the step")
        cut = blocks_of(module, batch)
    if workload is None:
        say(f"{len(cut.names)} blocks; {'measuring' if hardware is None else 'calculating'} what they cost")
        workload = work_of(module, batch, None if hardware is None else on, sizes_of(batch), cut)

    def told(evaluated: int, bound: float, best: float) -> None:
        say(f"{evaluated} candidates estimated; at least {bound:.4g}, best so far {best:.4g}")

    options = {"margin": FRAGMENTATION, "all_devices": all_devices, "progress": told, **options}
    limit = bytes_of(on.memory if memory is None else memory)
    return _proposed(module, batch, cut, partial(best_of, workload, on, devices, objective=objective, **options), limit, check, say)


def _proposed(
    module: nn.Module, batch: Any, cut: Cut, find: Callable[[Number], Found], limit: Number, check: Check,
    say: Callable[[str], None],
) -> Proposal:  # fmt: skip
    """The best program that passes, and whose plan fits into `limit` bytes; `find` gives the best ones within some bytes.

    Raises:
        NoProgram: the best ones are refused.
        SearchError: by their plans none fits.
    """
    refused: list[tuple[Candidate, str]] = []
    large: list[tuple[float, str]] = []  # what plans need that do not fit, and of which candidates
    within = limit
    for _ in range(ROUNDS):
        try:
            found, needed = find(within), 0.0
        except SearchError as error:
            if within == limit:
                raise
            needed, least = min(large)
            raise SearchError(
                f"search: nothing fits in {size(limit)}, though by estimates something does; give {size(needed)} of each device, "
                f"which is what the plan of {least} needs"
            ) from error
        states, keep = found.space.workload.states, 1 + found.space.margin
        estimated = {row.candidate: max(row.estimate.memory) for row in found.table} | {found.best: max(found.estimate.memory)}
        most = 0.0  # share of the memory that a plan needs, for which estimates were right of a candidate that does not fit
        larger = 0
        for candidate in _in_turn(found, refused):
            say(f"checking {described(candidate)}")
            try:
                written = _written(candidate, cut)
                used, verdict = _checked(written, module, batch, check, states)
                needed = float(used * keep)
            except PiperError as error:
                refused.append((candidate, " ".join(str(error).split())[:300]))
                continue
            if needed <= limit:
                return Proposal(found, candidate, written, found.space.workload, int(needed), tuple(refused), check, verdict)
            refused.append((candidate, f"{TOO_LARGE} {size(needed)} of a device, more than was estimated"))
            large.append((needed, described(candidate)))
            most, larger = max(most, float(estimated[candidate]) / needed), larger + 1
            if larger == LARGER:
                break
        within = int(min(float(limit) * most, float(within) * 0.999))
        if not needed:
            break
    kind = SearchError if needed else NoProgram
    raise kind(f"search: the programs of the {len(refused)} best candidates are refused; of the best one: {refused[0][1]}")


def work_of(module: nn.Module, batch: Any, on: Hardware | None, samples: Sequence[int], cut: Cut) -> Workload:
    """What the step costs, with the optimizer that the module makes; AdamW where it makes none that can be tried.

    Args:
        on: for which it is calculated; None: it is measured on this machine.
    """
    optimizer = optimizer_of(module)
    states = states_of(optimizer, module)
    if on is not None:
        return analytic(module, batch, on, samples, states=states, cut=cut)
    updates = torch.optim.AdamW if optimizer is None else like(optimizer)
    return measured(module, batch, samples, CALLS, states, cut, optimizer=updates)


def sizes_of(batch: Any) -> list[int]:
    """Numbers of samples for which costs are found: microbatches are parts of the batch."""
    samples = flatten(batch)[1].size
    return sorted({max(1, samples // parts) for parts in (1, 2, 4, 8, 16)})


def _in_turn(found: Found, refused: Sequence[tuple[Candidate, str]]) -> list[Candidate]:
    """Candidates that fit, the best first, of those that were not refused."""
    fitting = [row.candidate for row in found.table if max(row.estimate.memory) <= found.space.memory]
    before = {candidate for candidate, _ in refused}
    return [candidate for candidate in dict.fromkeys([found.best, *fitting]) if candidate not in before][:TRIED]


def _written(candidate: Candidate, cut: Cut) -> Written:
    return write_stages(candidate, cut, _params(cut, candidate.layout.tensor))


def write_stages(candidate: Candidate, cut: Cut, params: Params | None) -> Written:
    """The program of a candidate whose stages are blocks of `cut`. `params`: what members of the tensor axis have parts of.

    Raises:
        SearchError: work outside of all modules would be in several stages.
    """
    stages = cut.stages(candidate.cuts)
    unnamed = {stage for stage, (a, b) in enumerate(candidate.spans(len(cut.names))) for block in cut.untagged if a <= block < b}
    if len(unnamed) > 1:
        raise SearchError(f"stages {sorted(unnamed)} have work with parameters outside of all submodules, which no tag can divide")
    return write(candidate, stages, params, next(iter(unnamed), None))


def _params(cut: Cut, degree: int) -> Params | None:
    if degree == 1:
        return None
    found: dict[str, Part] = find_params(cut.step.joint_graph, TENSOR, degree, {})
    parts = {name: part for n, part in found.items() for name in cut.all_named([n])}
    ordered = (name for block in cut.params for name in block if name in parts)  # as in the model
    return {name: parts[name].dim if parts[name].blocks == 1 else (parts[name].dim, parts[name].blocks) for name in ordered}


def _checked(written: Written, module: nn.Module, batch: Any, check: Check, states: float) -> tuple[int, str]:
    """Bytes that the program needs of its fullest device, 0 if nothing is checked; and the verdict, if it is not `verified`.

    Raises:
        PiperError: the program is refused, or is not equivalent.
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
