"""Equivalence by execution: after each directive, does the DAG still compute what it did, and what one device does?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import CapturedStep, flatten
from lightning_piper.capture.eager import Outcome, mixed, run_eagerly
from lightning_piper.directives import Directive, Split, accumulating
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import StepCode
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import Done, apply_program, prepared, run_pipeline
from lightning_piper.verify.cross_sample import CrossSampleDependence, find_dependences
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.report import Agreement, Comparison, Report, Row
from lightning_piper.verify.trial import coarsest

PERTURBATIONS = 3  # of every parameter by one ulp, to measure what rounding does to a result
ALLOWANCE = 8  # a result may be off by this many times its largest movement


def verify_step(step: CapturedStep, module: nn.Module, batch: Any, program: Sequence[Directive], *, seed: int = 0) -> Report:
    """`lightning_piper.verify` for a step that is captured already and a parsed program."""
    step = prepared(step, program)
    leaves = step.inputs(flatten(batch)[0])
    tensors = {step.canonical[n]: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    runner = _Runner(step, tensors, leaves, seed)
    rows: list[Row] = []

    static_check = StaticCheck()

    def after(dag: TrainingDAG, done: Done) -> None:
        static_check(dag, done)
        if done.by.index is not None and isinstance(directive := program[done.by.index], Split):
            runner.splits.append(directive)
        if done.by.apart:
            rows.append(runner.row(dag, done))

    dag = run_pipeline(step, program, after=after)
    return Report(tuple(rows), *runner.against_whole(dag), executed=step.executed)


class _Runner:
    """Reference executions, each run once.

    Attributes:
        splits: the directives that divided the batch so far.
    """

    def __init__(self, step: CapturedStep, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int) -> None:
        self.step, self.tensors, self.leaves, self.seed = step, tensors, leaves, seed
        self.random = step.draws
        self.mixed = mixed(step)
        self.computed = [log.name for log in step.at(step.size).logs if log.computed is not None]
        self.splits: list[Split] = []
        self._single: dict[Any, Outcome] = {}
        self._rounding: dict[Any, dict[str, float]] = {}
        self._whole = (Slice(0, step.size),)
        self._last: tuple[Outcome, Mapping[str, float]] | None = None

    def row(self, dag: TrainingDAG, done: Done) -> Row:
        """Run the DAG and compare it with the one of the row before, and with one device."""
        now, moved = interpret(dag, self.tensors, self.leaves, self.seed), self.rounding(*self._work(dag))
        last, before = self._last or (now, moved)
        self._last = now, moved
        compared = self._compared(last, now, _larger(before, moved))
        return Row(done.by.index, done.by.name, done.contract, compared, self.against_single(dag, now))

    def against_single(self, dag: TrainingDAG, outcome: Outcome) -> Comparison:
        """With one device on the same microbatches."""
        work = self._work(dag)
        found = self._compared(self.single(*work), outcome, self.rounding(*work))
        if found.verdict == "differs" and not self.random and dag.microbatches() is None and self.couplings(dag):
            # One device cannot take the whole batch in one region and parts of it in another one, unless the captured step does.
            found = self._compared(self.single(self._whole, parted=True), outcome, self.rounding(self._whole, parted=True))
        return found

    def against_whole(self, dag: TrainingDAG) -> tuple[Comparison, tuple[str, ...], tuple[CrossSampleDependence, ...]]:
        """The last outcome compared with one device on the whole batch; if they differ, the causes, and operations among them."""
        assert self._last is not None
        outcome, moved = self._last
        alone, moved = self.single(self._whole), _larger(self.rounding(self._whole), moved)
        found, code = compare(alone, outcome, moved), self.step.at(self.step.size)
        cut = any(len(parts) > 1 for parts in dag.slices().values())
        nonlinear = [f"{code.nonlinear}, which is not linear in the gradient of the loss"] if cut and code.nonlinear else []
        if found.verdict == "equal within the bound":
            return found, (*nonlinear, *outcome.approximate), ()
        if found.verdict != "differs":
            return found, tuple(nonlinear), ()
        couplings = self.couplings(dag)
        causes = [f"{c.operation} in region {c.region}" for c in couplings] + _by_microbatch(code, "random")
        causes = nonlinear + (causes or _by_microbatch(code, "state"))
        if not causes and code.meet is not None:  # in the backward pass, say
            causes = [code.meet]
        if not causes:
            found = self._compared(alone, outcome, moved)
        return found, tuple(dict.fromkeys(causes)), couplings

    def _compared(self, expected: Outcome, found: Outcome, moved: Mapping[str, float]) -> Comparison:
        """As `compare`, also where the step computes in a dtype that it fixes, which its parameters' rounding does not tell of."""
        compared = compare(expected, found, moved)
        if compared.verdict == "differs":
            coarse = dict.fromkeys(expected.metrics.keys() | expected.grads.keys() | expected.buffers.keys(), self._coarsest)
            compared = compare(expected, found, _larger(moved, coarse))
        return compared

    @cached_property
    def _coarsest(self) -> float:
        """The rounding unit of the least precise values that the step computes."""
        return coarsest(self.step)

    def couplings(self, dag: TrainingDAG) -> tuple[CrossSampleDependence, ...]:
        """The operations that look across samples which the DAG takes apart."""
        return tuple(find_dependences(self.step, self.tensors, self.leaves, max(dag.slices().values(), key=len)))

    def single(self, slices: tuple[Slice, ...], parted: bool = False) -> Outcome:
        """One device that accumulates over `slices`, or, `parted`, that splits its regions as the program does."""
        key = (slices, len(self.splits) if parted else 0)
        if key not in self._single:
            self._single[key] = self._run_single(self.tensors, slices, parted)
        return self._single[key]

    def _work(self, dag: TrainingDAG) -> tuple[tuple[Slice, ...], bool]:
        """What one device is to work on; random numbers are drawn by slice."""
        slices = dag.microbatches()
        return slices or self._whole, slices is None and self.random

    def _run_single(self, tensors: Mapping[str, torch.Tensor], slices: tuple[Slice, ...], parted: bool) -> Outcome:
        if parted:
            return interpret(apply_program(build_dag(self.step), self.splits), tensors, self.leaves, self.seed)
        if self.random or (self.mixed and len(slices) > 1):
            return interpret(accumulating(self.step, slices), tensors, self.leaves, self.seed)
        found = run_eagerly(self.step, tensors, self.leaves, slices)
        if len(slices) > 1 and self.computed:
            # From values of the whole batch, which what a slice logs does not tell.
            captured = interpret(accumulating(self.step, slices), tensors, self.leaves, self.seed)
            found = replace(found, metrics={**found.metrics, **{name: captured.metrics[name] for name in self.computed}})
        return found

    def rounding(self, slices: tuple[Slice, ...], parted: bool = False) -> dict[str, float]:
        """What rounding can do to each result, measured: how far it moves when every parameter moves by one ulp, and how far
        the reference itself is from the same step in float64."""
        key = (slices, len(self.splits) if parted else 0)
        if key not in self._rounding:
            generator = torch.Generator().manual_seed(0)
            still = self.single(slices, parted)
            others = []
            for _ in range(PERTURBATIONS):
                moved = {n: one_ulp(x, generator) if n in self.step.params else x for n, x in self.tensors.items()}
                others.append(self._run_single(moved, slices, parted))
            if not parted and (precise := self._run_in_float64(slices)) is not None:
                others.append(precise)
            self._rounding[key] = movement(still, others)
        return self._rounding[key]

    def _run_in_float64(self, slices: tuple[Slice, ...]) -> Outcome | None:
        """None where the step cannot be had in float64: captured code has its dtypes, and so have some models."""
        if self.random or (self.mixed and len(slices) > 1):
            return None
        tensors = {n: x.double() if x.is_floating_point() else x for n, x in self.tensors.items()}
        leaves = [x.double() if x.is_floating_point() else x for x in self.leaves]
        try:
            return run_eagerly(self.step, tensors, leaves, slices)
        except RuntimeError:  # a dtype that the model fixes itself meets float64
            return None


def compare(expected: Outcome, found: Outcome, rounding: Mapping[str, float]) -> Comparison:
    """Compare two outcomes; `rounding` holds the measured movement of each result under perturbations of one ulp.

    A result may be off by `ALLOWANCE` times its own movement, and by at least that many eps of its dtype; a gradient, also by what
    operations that only approximate state for it (`Outcome.slack`).
    """
    kinds = ((expected.metrics, found.metrics), (expected.grads, found.grads), (expected.buffers, found.buffers))
    if missing := [name for a, b in kinds for name in sorted(set(a) ^ set(b))]:
        return Comparison("differs", float("inf"), f"only one has {missing[0]}", 0.0)
    worst = Comparison("bitwise equal")
    for name, a, b in _pairs(expected, found):
        if torch.equal(a, b):
            continue
        distance, allowed = _distance(a, b), ALLOWANCE * max(rounding.get(name, 0.0), _eps(name, a, expected))
        verdict: Agreement = "equal within rounding"
        if not distance <= allowed:
            allowed += _slack(name, a, expected, found)
            verdict = "equal within the bound"
        if not distance <= allowed:
            return Comparison("differs", distance, name, allowed)
        further = distance * worst.allowed > worst.distance * allowed
        if worst.first is None or (verdict == worst.verdict and further) or verdict == "equal within the bound" != worst.verdict:
            worst = Comparison(verdict, distance, name, allowed)
    return worst


def movement(still: Outcome, others: Sequence[Outcome]) -> dict[str, float]:
    """By how much each result is another one in the others, at most."""
    largest: dict[str, float] = {}
    for other in others:
        for name, a, b in _pairs(still, other):
            largest[name] = max(largest.get(name, 0.0), _distance(a, b))
    return largest


def _slack(name: str, x: torch.Tensor, *outcomes: Outcome) -> float:
    """How far apart operations that only approximate may have brought two gradients, as `_distance` measures it."""
    slack, scale = sum(outcome.slack.get(name, 0.0) for outcome in outcomes), float(x.double().abs().max())
    return slack / scale if scale else 0.0


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


def one_ulp(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A tensor of which each element is the next number, up or down."""
    up = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    infinity = torch.full_like(x, float("inf"))
    return torch.where(up, torch.nextafter(x, infinity), torch.nextafter(x, -infinity))


def _larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in a.keys() | b.keys()}


def _by_microbatch(code: StepCode, what: str) -> list[str]:
    """What forward passes do once for each microbatch: they draw `random` numbers, or change buffers (`state`)."""
    shown = {"random": "random numbers", "state": "buffers"}[what]
    forward = [(region, interface) for (region, kind), interface in code.interfaces.items() if kind == "F"]
    return [f"{shown} in region {code.regions[region].label}" for region, interface in forward if getattr(interface, what)]
