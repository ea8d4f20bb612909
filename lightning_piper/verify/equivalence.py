"""Equivalence by execution: after each directive, does the DAG still compute what it did, and what one device does?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_piper.capture import CapturedStep, capture, flatten
from lightning_piper.capture.eager import Outcome, run_eagerly
from lightning_piper.directives import Directive, Split, accumulating, apply_program, finish, parse
from lightning_piper.errors import CaptureError, VerificationError
from lightning_piper.ir.build import build_dag
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.values import Slice
from lightning_piper.limits import integer, shown
from lightning_piper.verify.coupling import Coupling, find_couplings
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static import check

PERTURBATIONS = 3  # of every parameter by one ulp, to measure what rounding does to a result
ALLOWANCE = 8  # a result may be off by this many times its largest movement
Verdict = Literal["bitwise equal", "equal within rounding", "differs"]


@dataclass(frozen=True)
class Comparison:
    """How two outcomes of a step agree.

    Attributes:
        verdict: in words.
        distance: the largest difference within one gradient, metric or buffer, relative to its largest value: of that which comes
            nearest to its bound. (A gradient that is zero but for rounding, as of a bias of attention keys, moves by its own size.)
        first: its name; for `differs`, of the first one that is out of bounds.
        allowed: the distance that rounding alone explains for it.
    """

    verdict: Verdict
    distance: float = 0.0
    first: str | None = None
    allowed: float = 0.0

    def __str__(self) -> str:
        if self.verdict == "equal within rounding":
            return f"equal within {self.distance:.1e}"
        if self.verdict == "differs":
            return f"differs by {self.distance:.1e} ({self.first}; rounding explains {self.allowed:.1e})"
        return self.verdict


@dataclass(frozen=True)
class Row:
    """One directive (or the capture itself, `index` None) of a report.

    Attributes:
        before: compared with the DAG before the directive.
        single: compared with one device that accumulates eagerly over the same microbatches.
    """

    index: int | None
    name: str
    contract: str
    before: Comparison
    single: Comparison

    @property
    def ok(self) -> bool:
        """The directive kept its contract, and the result is that of one device on the same microbatches."""
        kept = self.before.verdict == "bitwise equal" or self.contract != "bitwise"
        return kept and self.single.verdict != "differs"


@dataclass(frozen=True)
class Report:
    """What `verify` found; `print` it.

    Attributes:
        rows: one for the capture and one for each directive.
        couplings: where the step looks across the samples of a batch, if microbatches give another result than the whole.
    """

    rows: tuple[Row, ...]
    couplings: tuple[Coupling, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        head = ("directive", "contract", "vs the graph before", "vs one device, same microbatches")
        table = [head, *((_title(r), r.contract, str(r.before), str(r.single)) for r in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        notes = [f"note: {coupling}" for coupling in self.couplings]
        return "\n".join([*lines, *notes, "verified" if self.ok else "NOT EQUIVALENT"])

    def require(self) -> None:
        """Raise a VerificationError unless all is well."""
        if not self.ok:
            raise VerificationError(f"the program does not compute what one device computes:\n{self}")


def _title(row: Row) -> str:
    return row.name if row.index is None else f"{row.index} {row.name}"


def verify(module: nn.Module, batch: Any, directives: Any, *, seed: int = 0) -> Report:
    """Check a program by execution, in this process, directive by directive.

    Args:
        module: a LightningModule with real parameters; not changed.
        batch: the global batch of one step, with data.
        directives: a list of directives or JSON objects, or the path of a JSON file.
        seed: of random numbers (dropout).

    Loss, logged values, all gradients and changed buffers are compared with those of the graph before the directive, and with
    eager execution of `training_step` on one device that accumulates over the same microbatches. A step that draws random
    numbers draws them per region, which eager execution cannot repeat: it is compared with the captured step on one device.
    Where microbatches give another result than the whole batch, the report names the operations that couple the samples.

    Raises:
        CaptureError, DirectiveError: as `compile` does.
        VerificationError: the static check fails.
    """
    program = parse(directives)
    if not isinstance(module, nn.Module):
        raise CaptureError(f"verify: the module is a {type(module).__name__}; give a LightningModule")
    if integer(seed) is None:
        raise CaptureError(f"verify(seed={shown(seed)}): give an integer")
    step = capture(module, batch, device=_device(module))
    return verify_step(step, module, batch, program, seed=seed)


def verify_step(step: CapturedStep, module: nn.Module, batch: Any, program: Sequence[Directive], *, seed: int = 0) -> Report:
    """`verify` for a step that is captured already and a parsed program."""
    leaves = step.inputs(flatten(batch)[0])
    tensors = {step.canonical[n]: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    runner = _Runner(step, tensors, leaves, seed)
    dag = build_dag(step)
    check(dag)
    last, old = interpret(dag, tensors, leaves, seed), runner.rounding(_slices(dag))
    rows = [Row(None, "capture", "bitwise", Comparison("bitwise equal"), runner.against_single(dag, last))]

    def row(dag: TrainingDAG, index: int, directive: Directive) -> None:
        nonlocal last, old
        check(dag)
        if isinstance(directive, Split):
            runner.splits.append(directive)
        runner.parted = dag.microbatches() is None
        now, new = interpret(dag, tensors, leaves, seed), runner.rounding(_slices(dag))
        before = compare(last, now, {name: max(moved, new.get(name, 0.0)) for name, moved in old.items()})
        contract = "reassociated" if index in dag.reassociated else directive.contract
        rows.append(Row(index, directive.op, contract, before, runner.against_single(dag, now)))
        last, old = now, new

    apply_program(dag, program, row)
    finish(dag)
    moved = any(row.contract == "reassociated" and row.before.verdict == "differs" for row in rows)
    return Report(tuple(rows), tuple(find_couplings(step, tensors, leaves, _slices(dag))) if moved else ())


class _Runner:
    """Reference executions, each run once."""

    def __init__(self, step: CapturedStep, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int) -> None:
        self.step, self.tensors, self.leaves, self.seed = step, tensors, leaves, seed
        self.random = any(interface.random for interface in step.at(step.size).interfaces.values())
        # Applied so far, and whether regions have other slices than each other: random numbers are drawn by slice.
        self.splits: list[Split] = []
        self.parted = False
        self._single: dict[Any, Outcome] = {}
        self._rounding: dict[Any, dict[str, float]] = {}

    def against_single(self, dag: TrainingDAG, outcome: Outcome) -> Comparison:
        slices = _slices(dag)
        key = (slices, len(self.splits))
        if key not in self._single:
            self._single[key] = self._run_single(self.tensors, slices)
        return compare(self._single[key], outcome, self.rounding(slices))

    def _run_single(self, tensors: Mapping[str, torch.Tensor], slices: tuple[Slice, ...]) -> Outcome:
        if not self.random:
            return run_eagerly(self.step, tensors, self.leaves, slices)
        if self.parted:
            return interpret(apply_program(build_dag(self.step), self.splits), tensors, self.leaves, self.seed)
        return interpret(accumulating(self.step, slices), tensors, self.leaves, self.seed)

    def rounding(self, slices: tuple[Slice, ...]) -> dict[str, float]:
        """What rounding can do to each result, measured: how far it moves when every parameter moves by one ulp, and how far
        the reference itself is from the same step in float64."""
        key = (slices, len(self.splits))
        if key not in self._rounding:
            generator = torch.Generator().manual_seed(0)
            still = self._run_single(self.tensors, slices)
            others = []
            for _ in range(PERTURBATIONS):
                moved = {n: _one_ulp(x, generator) if n in self.step.params else x for n, x in self.tensors.items()}
                others.append(self._run_single(moved, slices))
            if (precise := self._run_in_float64(slices)) is not None:
                others.append(precise)
            largest: dict[str, float] = {}
            for other in others:
                for name, a, b in _pairs(still, other):
                    largest[name] = max(largest.get(name, 0.0), _distance(a, b))
            self._rounding[key] = largest
        return self._rounding[key]

    def _run_in_float64(self, slices: tuple[Slice, ...]) -> Outcome | None:
        """None where the step cannot be had in float64: captured code has its dtypes, and so have some models."""
        if self.random:
            return None
        tensors = {n: x.double() if x.is_floating_point() else x for n, x in self.tensors.items()}
        leaves = [x.double() if x.is_floating_point() else x for x in self.leaves]
        try:
            return run_eagerly(self.step, tensors, leaves, slices)
        except RuntimeError:  # a dtype that the model fixes itself meets float64
            return None


def compare(expected: Outcome, found: Outcome, rounding: Mapping[str, float]) -> Comparison:
    """Compare two outcomes; `rounding` holds the measured movement of each result under perturbations of one ulp.

    A result may be off by `ALLOWANCE` times its own movement, and by at least that many eps of its dtype.
    """
    kinds = ((expected.metrics, found.metrics), (expected.grads, found.grads), (expected.buffers, found.buffers))
    if missing := [name for a, b in kinds for name in sorted(set(a) ^ set(b))]:
        return Comparison("differs", float("inf"), f"only one has {missing[0]}", 0.0)
    worst = Comparison("bitwise equal")
    for name, a, b in _pairs(expected, found):
        if torch.equal(a, b):
            continue
        distance, allowed = _distance(a, b), ALLOWANCE * max(rounding.get(name, 0.0), _eps(name, a, expected))
        if not distance <= allowed:
            return Comparison("differs", distance, name, allowed)
        if worst.first is None or distance * worst.allowed > worst.distance * allowed:
            worst = Comparison("equal within rounding", distance, name, allowed)
    return worst


def _eps(name: str, x: torch.Tensor, outcome: Outcome) -> float:
    """Rounding unit of a result; metrics are float64 sums of values that have the model's precision."""
    dtypes = [g.dtype for g in outcome.grads.values()] if name in outcome.metrics else [x.dtype]
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)


def _pairs(a: Outcome, b: Outcome) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return [(n, x[n], y[n]) for x, y in ((a.metrics, b.metrics), (a.grads, b.grads), (a.buffers, b.buffers)) for n in x if n in y]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    scale = float(a.abs().max())
    difference = float((a - b).abs().max())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def _one_ulp(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    up = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    infinity = torch.full_like(x, float("inf"))
    return torch.where(up, torch.nextafter(x, infinity), torch.nextafter(x, -infinity))


def _slices(dag: TrainingDAG) -> tuple[Slice, ...]:
    """The microbatches of the whole step; one slice if parts of it are split differently."""
    return dag.microbatches() or (Slice(0, dag.size),)


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))
