"""`verify`: each directive is compared with the graph before it and with one device, and the report says the
result in words.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch

from examples.custom_directive import Checkpoint
from lightning_piper import verify
from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.directives import Directive, parse
from lightning_piper.directives.base import Contract
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import elimination, pipeline
from lightning_piper.schedules import gpipe, one_f_one_b
from lightning_piper.verify import Report, hook, verify_step
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.report import Comparison, ReportRow
from tests.dags import b, f, order, place, split
from tests.models import CASES, DECOMPOSED, captured

# The module; the attribute `lightning_piper.verify` is the function.
equivalence = sys.modules[verify_step.__module__]
ELIMINATE = "eliminate communication"


def report_on(name: str, program: Any, seed: int = 0) -> Report:
    c = captured(name)
    return verify_step(c.step, c.module, c.batch, parse(program), seed=seed)


def stages(name: str) -> int:
    """The number of stages of a model; 0 if it has no tag."""
    regions = captured(name).step.at(captured(name).case.size).regions
    return 1 + max((region.tags["PP"] for region in regions if region.tags), default=-1)


PROGRAMS = {
    "gpipe": lambda count: gpipe(count, 2) if count else [split(2), order({"MB": 0}, {"MB": 1})],
    "1f1b": lambda count: one_f_one_b(count, 3) if count else [split(3), order({"MB": 2}, {"MB": 0})],
}


@pytest.mark.parametrize(
    ("name", "program"),
    [(name, program) for name in CASES for program in PROGRAMS if (name, program) != ("reentered", "1f1b")],
)
def test_every_model_under_every_schedule(name: str, program: str) -> None:
    report = report_on(name, PROGRAMS[program](stages(name)))
    assert report.ok, str(report)
    report.require()
    assert [row.index for row in report.rows] == [None, *range(len(report.rows) - 2), None]
    for row in report.rows:
        assert row.contract == ("reassociated" if row.name == "split" else "bitwise")
        if row.name != "split":
            assert row.before == Comparison("bitwise equal")
        if not CASES[name].reassociates and name not in DECOMPOSED:
            assert row.single == Comparison("bitwise equal")
        assert row.single.verdict != "differs"


def test_a_u_shaped_pipeline_does_not_fit_1f1b() -> None:
    """Stage 0 comes again after stage 1, so stage 1 cannot run backward before stage 0 has run its second
    part.
    """
    with pytest.raises(
        DirectiveError, match=r"directive \d \(order\): field 'filters': this order closes a cycle"
    ):
        report_on("reentered", one_f_one_b(2, 3))


def test_the_report_in_words() -> None:
    """In exact arithmetic nothing moves, so that every word is known."""
    assert str(report_on("exact", one_f_one_b(2, 2))) == (
        "directive                contract      vs the graph before  vs one device, same microbatches\n"
        "capture                  bitwise       bitwise equal        bitwise equal\n"
        "0 place                  bitwise       bitwise equal        bitwise equal\n"
        "1 place                  bitwise       bitwise equal        bitwise equal\n"
        "2 split                  reassociated  bitwise equal        bitwise equal\n"
        "3 order                  bitwise       bitwise equal        bitwise equal\n"
        "4 order                  bitwise       bitwise equal        bitwise equal\n"
        "eliminate communication  bitwise       bitwise equal        bitwise equal\n"
        "verified"
    )


def test_rounding_in_words() -> None:
    text = re.sub(r"\d\.\de-\d\d", "x.xe-xx", str(report_on("used_twice", [split(2)])))
    assert text == (
        "directive                contract      vs the graph before   vs one device, same microbatches\n"
        "capture                  bitwise       bitwise equal         bitwise equal\n"
        "0 split                  reassociated  equal within x.xe-xx  equal within x.xe-xx\n"
        "eliminate communication  bitwise       bitwise equal         equal within x.xe-xx\n"
        "verified"
    )


def test_a_report_of_a_failure() -> None:
    same, wrong = Comparison("bitwise equal"), Comparison("differs", 0.25, "first.weight", 1e-6)
    report = Report(
        (ReportRow(None, "capture", "bitwise", same, same), ReportRow(0, "order", "bitwise", wrong, wrong))
    )
    assert not report.ok
    with pytest.raises(VerificationError) as caught:
        report.require()
    first, *table, verdict, code = str(caught.value).splitlines()
    assert first == "the program does not compute what one device computes:"
    assert verdict == "NOT EQUIVALENT" and code.endswith("Otherwise, report this [PIPER-V001]")
    assert [re.split("  +", line) for line in table] == [
        ["directive", "contract", "vs the graph before", "vs one device, same microbatches"],
        ["capture", "bitwise", "bitwise equal", "bitwise equal"],
        ["0 order", "bitwise", *["differs by 2.5e-01 (first.weight; rounding explains 1.0e-06)"] * 2],
    ]


@pytest.mark.parametrize(
    ("contract", "before", "single", "ok"),
    [
        ("bitwise", "bitwise equal", "bitwise equal", True),
        ("bitwise", "bitwise equal", "equal within rounding", True),
        ("bitwise", "equal within rounding", "bitwise equal", False),
        ("bitwise", "bitwise equal", "differs", False),
        ("reassociated", "equal within rounding", "equal within rounding", True),
        ("reassociated", "differs", "bitwise equal", True),  # its loss is no mean over samples
        ("reassociated", "equal within rounding", "differs", False),
    ],
)
def test_when_a_row_is_right(contract: str, before: Any, single: Any, ok: bool) -> None:
    assert ReportRow(0, "x", contract, Comparison(before), Comparison(single)).ok is ok


SAME, WRONG = Comparison("bitwise equal"), Comparison("differs", 0.25, "first.weight", 1e-6)


@pytest.mark.parametrize(
    ("single", "whole", "causes", "verdict", "said"),
    [
        (SAME, Comparison("equal within rounding"), (), "verified", ""),
        (
            SAME,
            WRONG,
            ("aten.mm in region PP=1",),
            "verified except",
            " aten.mm in region PP=1: differs by 2.5e-01 (first.w",
        ),
        (
            SAME,
            WRONG,
            (),
            "verified except",
            " an operation that was not found: differs by 2.5e-01 (first.weight; ",
        ),
        (WRONG, WRONG, ("aten.mm in region PP=1",), "NOT EQUIVALENT", ""),
    ],
)
def test_the_verdict(
    single: Comparison, whole: Comparison, causes: tuple[str, ...], verdict: str, said: str
) -> None:
    report = Report((ReportRow(None, ELIMINATE, "bitwise", SAME, single),), whole, causes)
    assert report.verdict == verdict and report.ok is (verdict != "NOT EQUIVALENT")
    last = str(report).splitlines()[-1]
    assert last.startswith(verdict + said) and (last == verdict or said)


# Directives that do not keep their promise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reversed(Directive):
    """Adds gradients in reverse order of the slices."""

    op: ClassVar[str] = "reversed"
    contract: ClassVar[Contract] = "bitwise"

    def apply(self, dag: TrainingDAG) -> None:
        for total in list(dag.of_type(Accumulate)):
            dag.rewire(total, inputs=total.inputs[::-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Honest(Reversed):
    contract: ClassVar[Contract] = "reassociated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropping(Directive):
    """Drops one term of the first sum of gradients."""

    op: ClassVar[str] = "dropping"
    contract: ClassVar[Contract] = "reassociated"

    def apply(self, dag: TrainingDAG) -> None:
        total = next(total for total in dag.of_type(Accumulate) if len(total.inputs) > 1)
        dag.rewire(total, inputs=total.inputs[1:])


def test_a_directive_that_only_reassociates_must_say_so() -> None:
    program = [split(3), Reversed()]
    report = report_on("mlp", program)
    assert not report.ok and report.rows[-2].before.verdict == "equal within rounding"
    assert str(report).endswith("NOT EQUIVALENT")
    assert report_on("mlp", [split(3), Honest()]).ok
    assert report_on("exact", [split(2), Reversed()]).ok, "in exact arithmetic it keeps its promise"


def test_a_directive_that_drops_a_gradient_is_stopped_by_the_static_check() -> None:
    with pytest.raises(
        VerificationError, match=r"gradient of second.weight, second.bias .*, samples 0:2 are missing"
    ):
        report_on("mlp", [split(2), Dropping()])


def test_what_the_static_check_cannot_see_is_seen_by_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the static check out of the way, the same directive is found by its numbers, and the first
    gradient is named.
    """
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    report = report_on("mlp", [split(2), Dropping()])
    assert report.verdict == "NOT EQUIVALENT" and [row.ok for row in report.rows] == [
        True,
        True,
        False,
        False,
    ]
    assert report.rows[-1].single.verdict == "differs" and report.rows[-1].single.first == "second.weight"
    assert report.rows[-1].single.distance > 1e-2 > 1e-4 > report.rows[-1].single.allowed


# The graph that runs


REPLICAS = [
    *gpipe(2, 2, devices=[[0, 2], [1, 3]]),
    {"op": "replicate", "filter": {}, "devices": [[0, 2], [1, 3]], "shard_params": True},
]


def test_the_last_row_is_the_graph_that_runs() -> None:
    """Without the sums over replicas that its order makes redundant; a program that has none keeps its
    bits.
    """
    report = report_on("mlp", REPLICAS)
    assert report.verdict == "verified" and report.rows[-1].contract == "reassociated"
    assert report.rows[-1].name == ELIMINATE and report.rows[-1].before.verdict != "differs"
    assert report_on("mlp", gpipe(2, 2)).rows[-1].contract == "bitwise"


def test_what_eliminates_communication_is_held_to_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost term, which the static check does not get to see here, and another order of a sum that is not
    admitted.
    """
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    right = elimination._together
    monkeypatch.setattr(elimination, "_together", lambda dag, scatters: right(dag, scatters[1:] or scatters))
    report = report_on("mlp", REPLICAS)
    assert [row.ok for row in report.rows] == [True] * (len(REPLICAS) + 1) + [
        False
    ] and report.verdict == "NOT EQUIVALENT"
    assert report.rows[-1].single.verdict == report.rows[-1].before.verdict == "differs"
    monkeypatch.setattr(elimination, "_together", lambda dag, scatters: right(dag, scatters[::-1]))
    monkeypatch.setattr(pipeline, "eliminate", lambda dag: elimination.eliminate(dag) and None)
    silent = report_on("mlp", REPLICAS)
    assert silent.rows[-1].single.verdict == "equal within rounding" and not silent.rows[-1].ok


# A pass that runs twice, and regions that are split differently


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twice(Directive):
    """Runs each forward pass again for its backward pass; if `lame`, always on the samples of one microbatch."""

    op: ClassVar[str] = "twice"
    contract: ClassVar[Contract] = "bitwise"
    lame: bool = False

    def apply(self, dag: TrainingDAG) -> None:
        Checkpoint(filter={}).apply(dag)
        again = [chunk for chunk in dag.of_type(Chunk) if "RECOMPUTED" in chunk.tags]
        for chunk in again if self.lame else []:
            dag.change(chunk, slice=again[0].slice)


@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_a_pass_that_runs_twice_has_the_same_microbatches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`conv` has a batch norm: one device on the whole batch gives another result than on microbatches."""
    program = [*place(*range(stages(name))), split(2)]
    report = report_on(name, [*program, Twice()])
    assert all(row.single == SAME for row in report.rows), str(report)
    assert report.verdict == ("verified except" if name == "conv" else "verified")
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    assert report_on(name, [*program, Twice(lame=True)]).verdict == "NOT EQUIVALENT"


def test_a_coupled_region_that_is_split_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_on("conv", [split(2, PP=0)])
    assert report.verdict == "verified except" and report.causes == tuple(
        f"{c.operation} in region {c.region}" for c in report.couplings
    )
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    assert report_on("conv", [split(2, PP=0), Dropping()]).verdict == "NOT EQUIVALENT"


# Comparison


def outcome(**changes: Any) -> Outcome:
    x = torch.tensor([1.0, -2.0, 4.0])
    values: dict[str, Any] = {
        "loss": torch.tensor(3.0, dtype=torch.float64),
        "a": x,
        "b": 2 * x,
        "mean": x,
        **changes,
    }
    return Outcome({LOSS: values["loss"]}, {"a": values["a"], "b": values["b"]}, {"mean": values["mean"]})


A = torch.tensor([1.0, -2.0, 4.0])
EPS = torch.finfo(torch.float32).eps


def test_equal_outcomes_are_bitwise_equal() -> None:
    assert compare(outcome(), outcome(), {}) == Comparison("bitwise equal")


@pytest.mark.parametrize("name", ["a", "b", "mean", "loss"])
@pytest.mark.parametrize("movement", [0.0, 1e-5])
def test_a_difference_is_flagged_beyond_what_rounding_explains(name: str, movement: float) -> None:
    """Allowed is 8 times the measured movement, at least 8 eps; a hundredfold of it is flagged, half of it is
    not.
    """
    allowed = 8 * max(movement, EPS)
    rounding = {LOSS: movement, "a": movement, "b": movement, "mean": movement}
    clean = {"a": A, "b": 2 * A, "mean": A, "loss": torch.tensor(3.0, dtype=torch.float64)}[name]
    shift = torch.zeros_like(clean)
    shift.view(-1)[-1] = float(clean.abs().max())
    for factor, verdict in ((0.5, "equal within rounding"), (100, "differs"), (2, "differs")):
        found = compare(outcome(), outcome(**{name: clean + shift * allowed * factor}), rounding)
        assert (found.verdict, found.first) == (verdict, LOSS if name == "loss" else name)
        assert found.distance == pytest.approx(allowed * factor, rel=0.2) and found.allowed == pytest.approx(
            allowed
        )


def test_differences_are_relative_to_the_largest_entry() -> None:
    small = A.clone()
    small[0] += 100 * EPS  # of 4
    assert compare(outcome(), outcome(a=small), {}).verdict == "differs"
    huge = torch.tensor([1.0, -2.0, 400.0])
    moved = huge + torch.tensor([100 * EPS, 0.0, 0.0])
    assert compare(outcome(a=huge), outcome(a=moved), {}).verdict == "equal within rounding"


def test_the_result_that_is_nearest_to_its_bound_is_named() -> None:
    first, second = A * (1 + 2 * EPS), 2 * A * (1 + 4 * EPS)
    found = compare(outcome(), outcome(a=first, b=second), {})
    assert found.verdict == "equal within rounding" and found.first == "b"
    assert found.distance == pytest.approx(4 * EPS, rel=0.2)
    # What is nothing but rounding moves by its own size, and does not hide how well the rest agrees.
    found = compare(outcome(), outcome(a=first, b=3 * A), {"b": 0.5})
    assert found.verdict == "equal within rounding" and found.first == "a"
    assert found.distance == pytest.approx(2 * EPS, rel=0.2)


def test_the_first_that_is_out_of_bounds_is_named() -> None:
    assert compare(outcome(), outcome(a=A * (1 + 2 * EPS), b=3 * A), {}).first == "b"
    assert compare(outcome(), outcome(a=2 * A, b=4 * A), {}).first == "a"


def test_nan_and_nothing_for_something_differ() -> None:
    nan = outcome(a=torch.tensor([1.0, float("nan"), 4.0]))
    assert compare(outcome(), nan, {}).verdict == "differs"
    zeros = outcome(a=torch.zeros(3))
    assert compare(zeros, outcome(a=torch.tensor([0.0, 1e-30, 0.0])), {}).verdict == "differs"
    assert compare(zeros, outcome(a=torch.zeros(3)), {}).verdict == "bitwise equal"


def test_equal_infinities_hide_no_difference() -> None:
    infinite = torch.tensor([float("inf"), 1.0, 2.0], dtype=A.dtype)
    near, far = (infinite * torch.tensor([1.0, 1.0, 1 + x], dtype=A.dtype) for x in (2 * EPS, 0.1))
    assert compare(outcome(a=infinite), outcome(a=near), {}).verdict == "equal within rounding"
    assert compare(outcome(a=infinite), outcome(a=far), {}).verdict == "differs"
    assert compare(outcome(a=infinite), outcome(a=-infinite), {}).verdict == "differs"


def test_a_result_that_only_one_has_differs() -> None:
    less = outcome()
    del less.grads["b"]  # type: ignore[attr-defined]
    found = compare(outcome(), less, {})
    assert (found.verdict, found.first) == ("differs", "only one of the two runs has b")
    less = outcome()
    del less.buffers["mean"]  # type: ignore[attr-defined]
    assert compare(less, outcome(), {}).first == "only one of the two runs has mean"
    less = outcome()
    del less.metrics[LOSS]  # type: ignore[attr-defined]
    assert compare(outcome(), less, {}).first == f"only one of the two runs has {LOSS}"


# `verify` from a module


def test_verify_takes_what_the_user_has() -> None:
    c = captured("mlp")
    program = [*place(0, 1), split(2), order(f(0, 0), f(0, 1), b(0))]
    report = verify(c.module, c.batch, program)
    assert report.ok and [row.name for row in report.rows] == [
        "capture",
        "place",
        "place",
        "split",
        "order",
        ELIMINATE,
    ]


def test_verify_refuses_what_compile_refuses() -> None:
    c = captured("mlp")
    with pytest.raises(DirectiveError, match="directive 0"):
        verify(c.module, c.batch, [{"op": "plac"}])
    with pytest.raises(DirectiveError, match="leaves 1 without a device"):
        verify(c.module, c.batch, place(0))


def test_random_steps_are_compared_with_the_captured_step() -> None:
    programs = [
        gpipe(2, 2),
        [split(2), split(2, "UB", MB=0)],
        [split(3), split(2, "UB", MB=0)],
        [split(2, PP=1), *place(0, 1)],
    ]
    for program in programs:
        report = report_on("dropout", program, seed=1)
        assert report.verdict == "verified except" and report.couplings == ()
        assert "verified except random numbers in region PP=" in str(report)
        assert {row.single.verdict for row in report.rows} == {"bitwise equal"}


def test_random_steps_are_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a lost contribution is seen under dropout, too."""
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    assert not report_on("dropout", [split(2), Dropping()]).ok


def test_the_models_have_what_they_are_there_for() -> None:
    """The control of the matrix above."""
    steps = [captured(name).step.at(captured(name).case.size) for name in CASES]
    kinds = {
        out.kind for step in steps for interface in step.interfaces.values() for out in interface.outputs
    }
    assert kinds == {"activation", "saved", "cotangent", "grad", "buffer", "loss", "log"}


class _Logarithm(L.LightningModule):
    """The loss is NaN for a negative input. With `gradient`, only the gradient of the weight is NaN."""

    def __init__(self, gradient: bool = False) -> None:
        super().__init__()
        self.fc, self.gradient = torch.nn.Linear(2, 2), gradient

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        made = self.fc(batch)
        return (0 * made).sqrt().sum() if self.gradient else (made * 0 + batch).log().sum()


@pytest.mark.parametrize(("gradient", "found"), [(False, "the loss"), (True, "the gradient of 'fc.weight'")])
def test_a_result_of_one_device_that_is_nan(gradient: bool, found: str) -> None:
    with pytest.raises(
        VerificationError, match=f"on one device, {found} of this batch (has a NaN|is NaN)"
    ) as caught:
        verify(_Logarithm(gradient), -torch.ones(4, 2), [split(2)])
    assert "Give a batch and parameters" in str(caught.value)
    assert verify(_Logarithm(), torch.ones(4, 2), [split(2)]).ok


class _Deviation(L.LightningModule):
    """The loss of a part is NaN if its samples are equal, and the loss of the whole batch is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        deviation = (batch - batch.mean()).square().mean()
        return self.fc(batch).mean() + 0 * deviation.log()


def test_a_result_of_one_device_that_is_nan_only_for_a_part_of_the_batch() -> None:
    batch = torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    with pytest.raises(
        VerificationError, match="over the same parts of the batch, the loss of this batch is NaN"
    ):
        verify(_Deviation(), batch, [split(2)])
    assert verify(_Deviation(), batch, []).ok
    assert verify(_Deviation(), batch[torch.tensor([0, 2, 1, 3])], [split(2)]).ok
