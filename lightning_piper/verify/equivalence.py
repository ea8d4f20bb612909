"""Equivalence by execution: compares the DAG after each directive with the DAG before it, and with one
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import CapturedStep, flatten
from lightning_piper.capture.eager.eager_reference import Outcome, is_lost, mixed, run_eagerly
from lightning_piper.common.units import counted
from lightning_piper.directives import Directive, Split, accumulating
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import LOSS, StepCode
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.gather import rounded_params
from lightning_piper.passes import Done, apply_program, prepared, run_pipeline
from lightning_piper.verify.cross_sample import CrossSampleDependence, find_dependences
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.report import Agreement, Comparison, Report, ReportRow
from lightning_piper.verify.trial import coarsest

# How many times to move every parameter by one ulp, to measure the effect of rounding on a result.
PERTURBATIONS = 3
ALLOWANCE = 8  # a result may differ by this many times the effect of rounding on it


def verify_step(
    step: CapturedStep, module: nn.Module, batch: Any, program: Sequence[Directive], *, seed: int = 0
) -> Report:
    """Verify a captured step and a parsed program: run the static check and the reference interpreter after
    each directive, and compare the results.

    Raises:
        VerificationError: The static check finds a problem. Or a result of one device is NaN.
    """
    step = prepared(step, program)
    leaves = step.inputs(flatten(batch)[0])
    tensors = {
        step.canonical[n]: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]
    }
    runner = _Runner(step, tensors, leaves, seed)
    rows: list[ReportRow] = []

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
    """Reference executions. Each execution runs once, and its outcome is kept.

    Attributes:
        splits: The `split` directives that have been applied so far.
        random: Whether the step draws random numbers.
        mixed: Whether the loss or a logged value has terms with different weights.
        computed: Names of logged values that are computed from other outputs.
        rounded: Parameter -> the dtype to which the last DAG rounds it. One device computes with parameters that are
            rounded in the same way.
    """

    def __init__(
        self,
        step: CapturedStep,
        tensors: Mapping[str, torch.Tensor],
        leaves: Sequence[torch.Tensor],
        seed: int,
    ) -> None:
        self.step, self.tensors, self.leaves, self.seed = step, tensors, leaves, seed
        self.random = step.draws
        self.mixed = mixed(step)
        self.computed = [log.name for log in step.at(step.size).logs if log.computed is not None]
        self.splits: list[Split] = []
        self.rounded: dict[str, torch.dtype] = {}
        # (slices, number of splits if one device splits its regions as the program does, otherwise 0, rounded
        # parameters) -> the outcome of one device, and the effect of rounding on it
        self._single: dict[Any, Outcome] = {}
        self._rounding: dict[Any, dict[str, float]] = {}
        self._whole = (Slice(0, step.size),)
        # the outcome of the last row's DAG, and the effect of rounding on it
        self._last: tuple[Outcome, Mapping[str, float]] | None = None

    def row(self, dag: TrainingDAG, done: Done) -> ReportRow:
        """Run the DAG. Return a row that compares it with the DAG of the previous row and with one device.
        The first row compares the DAG with itself. Before it, raise an error if a result of one device is
        NaN."""
        if self._last is None:
            check_comparable(self.single(self._whole))
        self.rounded = rounded_params(dag)
        now, moved = interpret(dag, self.tensors, self.leaves, self.seed), self.rounding(*self._work(dag))
        last, before = self._last or (now, moved)
        self._last = now, moved
        compared = self._compared(last, now, _maxima(before, moved))
        return ReportRow(done.by.index, done.by.name, done.contract, compared, self.against_single(dag, now))

    def against_single(self, dag: TrainingDAG, outcome: Outcome) -> Comparison:
        """Compare the outcome of a DAG with one device on the same microbatches. If the DAG's passes have
        different microbatches, the device runs the whole batch, or splits its regions as the program does."""
        work = self._work(dag)
        check_comparable(single := self.single(*work), parts=True)
        found = self._compared(single, outcome, self.rounding(*work))
        if (
            found.verdict == "differs"
            and not self.random
            and dag.microbatches() is None
            and self.couplings(dag)
        ):
            # One device cannot run one region on the whole batch and another on parts of it, unless the
            # captured step does.
            found = self._compared(
                self.single(self._whole, parted=True), outcome, self.rounding(self._whole, parted=True)
            )
        return found

    def against_whole(
        self, dag: TrainingDAG
    ) -> tuple[Comparison, tuple[str, ...], tuple[CrossSampleDependence, ...]]:
        """Compare the outcome of the previous row with one device on the whole batch.

        Returns:
            The comparison, its causes as text, and the cross-sample operations among the causes. If the
            outcomes agree, the causes are a nonlinear backward pass of a split step, and approximate
            operations whose bounds were needed. If the outcomes differ, the causes are a nonlinear backward
            pass of a split step, operations that mix samples, and regions that draw random numbers. If there
            are no mixing operations or random numbers, regions that change buffers are causes. Without any of
            these causes, `StepCode.meet` is the cause. Without a cause, the comparison also allows the
            rounding of the step's least precise dtype. If the DAG rounds parameters, this is a further cause, and
            the comparison is with one device that does not round them.
        """
        assert self._last is not None
        if self.rounded:
            texts = _roundings(self.rounded)
            _, causes, couplings = self._against_whole(dag, *self._last)
            self.rounded = {}
            return self._against_whole(dag, *self._last)[0], (*texts, *causes), couplings
        return self._against_whole(dag, *self._last)

    def _against_whole(
        self, dag: TrainingDAG, outcome: Outcome, moved: Mapping[str, float]
    ) -> tuple[Comparison, tuple[str, ...], tuple[CrossSampleDependence, ...]]:
        """Do the work of `against_whole` for one device that rounds the parameters `rounded`."""
        single, moved = self.single(self._whole), _maxima(self.rounding(self._whole), moved)
        found, code = compare(single, outcome, moved), self.step.at(self.step.size)
        cut = any(len(parts) > 1 for parts in dag.slices().values())
        nonlinear = (
            [f"{code.nonlinear}, which is not linear in the gradient of the loss"]
            if cut and code.nonlinear
            else []
        )
        if found.verdict == "equal within the bound":
            return found, (*nonlinear, *outcome.approximate), ()
        if found.verdict != "differs":
            return found, tuple(nonlinear), ()
        couplings = self.couplings(dag)
        causes = [f"{c.operation} in region {c.region}" for c in couplings] + _by_microbatch(code, "random")
        causes = nonlinear + (causes or _by_microbatch(code, "state"))
        if not causes and code.meet is not None:  # `couplings` has only forward operations
            causes = [code.meet]
        if not causes:
            found = self._compared(single, outcome, moved)
        return found, tuple(dict.fromkeys(causes)), couplings

    def _compared(self, expected: Outcome, found: Outcome, moved: Mapping[str, float]) -> Comparison:
        """Compare two outcomes as `compare` does. If they differ, allow the rounding of the step's least
        precise dtype.

        A step may compute in a dtype that it fixes, and the rounding of its parameters does not show this.
        """
        compared = compare(expected, found, moved)
        if compared.verdict == "differs":
            coarse = dict.fromkeys(
                expected.metrics.keys() | expected.grads.keys() | expected.buffers.keys(), self._coarsest
            )
            compared = compare(expected, found, _maxima(moved, coarse))
        return compared

    @cached_property
    def _coarsest(self) -> float:
        """The rounding unit of the least precise dtype in which the step computes values."""
        return coarsest(self.step)

    def couplings(self, dag: TrainingDAG) -> tuple[CrossSampleDependence, ...]:
        """Return the operations that mix samples which the DAG separates."""
        return tuple(
            find_dependences(self.step, self.tensors, self.leaves, max(dag.slices().values(), key=len))
        )

    def single(self, slices: tuple[Slice, ...], parted: bool = False) -> Outcome:
        """Return the outcome of one device that accumulates over `slices`. With `parted`, the device splits
        its regions as the program does.
        """
        key = self._key(slices, parted)
        if key not in self._single:
            self._single[key] = self._run_single(self._read(), slices, parted)
        return self._single[key]

    def _key(self, slices: tuple[Slice, ...], parted: bool) -> Any:
        return slices, len(self.splits) if parted else 0, tuple(self.rounded.items())

    def _read(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers with which one device computes."""
        return {
            n: x.to(self.rounded[n]).to(x.dtype) if n in self.rounded else x for n, x in self.tensors.items()
        }

    def _work(self, dag: TrainingDAG) -> tuple[tuple[Slice, ...], bool]:
        """Return the arguments of `single` for a comparison with `dag`: the slices over which one device
        accumulates, and whether it splits its regions as the program does.
        """
        slices = dag.microbatches()
        return slices or self._whole, slices is None and self.random

    def _run_single(
        self, tensors: Mapping[str, torch.Tensor], slices: tuple[Slice, ...], parted: bool
    ) -> Outcome:
        """Do the work of `single` with these parameters and buffers.

        Run the user's code. Run the captured code instead if the device splits its regions (`parted`), if the
        step draws random numbers, or if only captured code gives its terms their weights on these slices.
        """
        if parted:
            return interpret(
                apply_program(build_dag(self.step), self.splits), tensors, self.leaves, self.seed
            )
        if self.random or self._needs_captured(slices):
            return interpret(accumulating(self.step, slices), tensors, self.leaves, self.seed)
        found = run_eagerly(self.step, tensors, self.leaves, slices)
        if len(slices) > 1 and self.computed:
            # A logged value that is computed on the whole batch does not follow from the values on the
            # slices.
            captured = interpret(accumulating(self.step, slices), tensors, self.leaves, self.seed)
            found = replace(
                found, metrics={**found.metrics, **{name: captured.metrics[name] for name in self.computed}}
            )
        return found

    def _needs_captured(self, slices: tuple[Slice, ...]) -> bool:
        """Return whether the user's code cannot run on these slices instead of the captured code: terms need
        different weights, or the user's code would lose a term."""
        return len(slices) > 1 and (self.mixed or is_lost(self.step, self.tensors, self.leaves, slices))

    def rounding(self, slices: tuple[Slice, ...], parted: bool = False) -> dict[str, float]:
        """Return the effect of rounding on each result.

        The effect is the larger of two distances: the movement of the result when every parameter moves by
        one ulp, and the distance from the same step in float64, if Piper can run it.
        """
        key = self._key(slices, parted)
        if key not in self._rounding:
            generator = torch.Generator().manual_seed(0)
            still = self.single(slices, parted)
            others = []
            for _ in range(PERTURBATIONS):
                moved = {
                    n: one_ulp(x, generator) if n in self.step.params else x for n, x in self._read().items()
                }
                others.append(self._run_single(moved, slices, parted))
            if not parted and (precise := self._run_in_float64(slices)) is not None:
                others.append(precise)
            self._rounding[key] = movement(still, others)
        return self._rounding[key]

    def _run_in_float64(self, slices: tuple[Slice, ...]) -> Outcome | None:
        """Return the outcome of the step in float64; None if Piper does not run the step in float64.

        Piper does not run it if the step draws random numbers, if its code fixes a dtype, or if only captured
        code gives the terms their weights on these slices.
        """
        if self.random or self._needs_captured(slices):
            return None
        tensors = {n: x.double() if x.is_floating_point() else x for n, x in self._read().items()}
        leaves = [x.double() if x.is_floating_point() else x for x in self.leaves]
        try:
            return run_eagerly(self.step, tensors, leaves, slices)
        except RuntimeError:  # a dtype that the model fixes does not fit float64
            return None


def _roundings(rounded: Mapping[str, torch.dtype]) -> Iterator[str]:
    """Yield the number of parameters that are rounded to each dtype, as text."""
    for dtype, count in Counter(rounded.values()).items():
        yield f"{counted(count, 'parameter')} rounded to {str(dtype).removeprefix('torch.')} (gather_dtype)"


def check_comparable(single: Outcome, parts: bool = False) -> None:
    """Raise an error if a result of one device is NaN, because NaN is not equal to NaN.

    Args:
        single: The outcome of one device.
        parts: Whether the device accumulates over the program's parts of the batch. Otherwise, it computes the whole
            batch.

    Raises:
        VerificationError: The loss, a logged value, a gradient or a buffer has a NaN.
    """
    how, remedy = "", "Give a batch and parameters for which a plain Trainer does not compute NaN"
    if parts:
        how = " that accumulates over the same parts of the batch"
        remedy = "Give a batch of which each part has a number as its loss, or divide it into fewer parts"
    for what, results in (
        ("the logged value {!r}", single.metrics),
        ("the gradient of {!r}", single.grads),
        ("the new value of buffer {!r}", single.buffers),
    ):
        for name, x in results.items():
            if bool(x.isnan().any()):
                found = "the loss" if name == LOSS else what.format(name)
                raise VerificationError(
                    f"verify: on one device{how}, {found} of this batch {'is' if x.ndim == 0 else 'has a'} NaN, so no "
                    f"program can be compared with it. {remedy} [PIPER-V005]"
                )


def compare(expected: Outcome, found: Outcome, rounding: Mapping[str, float]) -> Comparison:
    """Compare two outcomes. They differ if only one of them has some result.

    A result may differ by `ALLOWANCE` times its entry in `rounding`, or by `ALLOWANCE` eps of its dtype if
    that is more. A gradient may also differ by the error bounds that approximate operations state for it
    (`Outcome.slack`).

    Args:
        expected: The reference.
        found: The outcome to judge.
        rounding: Result -> the effect of rounding on it (`_Runner.rounding`).

    Returns:
        "differs" with the first result that differs too much. Otherwise the weakest verdict of all results,
        with the result whose distance is the largest in proportion to what is allowed; "bitwise equal"
        without a result.
    """
    kinds = (
        (expected.metrics, found.metrics),
        (expected.grads, found.grads),
        (expected.buffers, found.buffers),
    )
    if missing := [name for a, b in kinds for name in sorted(set(a) ^ set(b))]:
        return Comparison("differs", float("inf"), f"only one of the two runs has {missing[0]}", 0.0)
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
        if (
            worst.first is None
            or (verdict == worst.verdict and further)
            or verdict == "equal within the bound" != worst.verdict
        ):
            worst = Comparison(verdict, distance, name, allowed)
    return worst


def movement(still: Outcome, others: Sequence[Outcome]) -> dict[str, float]:
    """Return the largest distance of each result from the same result in the other outcomes. A result that
    does not occur in another outcome is absent."""
    largest: dict[str, float] = {}
    for other in others:
        for name, a, b in _pairs(still, other):
            largest[name] = max(largest.get(name, 0.0), _distance(a, b))
    return largest


def _slack(name: str, x: torch.Tensor, *outcomes: Outcome) -> float:
    """Return the distance, as in `_distance`, that approximate operations allow between two gradients."""
    slack, scale = sum(outcome.slack.get(name, 0.0) for outcome in outcomes), float(x.double().abs().max())
    return slack / scale if scale else 0.0


def _eps(name: str, x: torch.Tensor, outcome: Outcome) -> float:
    """Return the rounding unit of a result. Metrics are float64 sums of values in the model's precision."""
    dtypes = [g.dtype for g in outcome.grads.values()] if name in outcome.metrics else [x.dtype]
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)


def _pairs(a: Outcome, b: Outcome) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return [
        (n, x[n], y[n])
        for x, y in ((a.metrics, b.metrics), (a.grads, b.grads), (a.buffers, b.buffers))
        for n in x
        if n in y
    ]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    scale = float(a.abs().nan_to_num(posinf=0.0).max())
    difference = float(torch.where(a == b, 0.0, a - b).abs().max())  # two infinities are equal
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def one_ulp(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor in which each element is the next larger or the next smaller number."""
    up = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    infinity = torch.full_like(x, float("inf"))
    return torch.where(up, torch.nextafter(x, infinity), torch.nextafter(x, -infinity))


def _maxima(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in a.keys() | b.keys()}


def _by_microbatch(code: StepCode, what: str) -> list[str]:
    """Return descriptions of forward passes that do something once for each microbatch.

    Args:
        code: The captured code.
        what: `random` for passes that draw random numbers, `state` for passes that change buffers.
    """
    shown = {"random": "random numbers", "state": "buffers"}[what]
    forward = [(region, interface) for (region, kind), interface in code.interfaces.items() if kind == "F"]
    return [
        f"{shown} in region {code.regions[region].label}"
        for region, interface in forward
        if getattr(interface, what)
    ]
