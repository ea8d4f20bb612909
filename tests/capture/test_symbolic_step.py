"""One trace for many shapes: with sizes filled in, it has the text and the results of a trace of these
shapes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_piper.capture import CapturedStep, capture, flatten
from lightning_piper.capture.eager.eager_reference import Outcome, mixed
from lightning_piper.capture.joint.sizes import SizeNumbers, SizeSymbols, take_numbers
from lightning_piper.capture.steps import captured_step as capturing
from lightning_piper.ir.regions import LOSS, StepCode
from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.build import build_dag
from lightning_piper.verify.interpreter import interpret
from tests.groups import marked
from tests.lengths import Branching, Causal, Counting, Ignoring, Paced, Sound, sound, tokens
from tests.models import DECOMPOSED, DETERMINISTIC, captured
from tests.reference import cut, differences, distance, plain

MODELS = {"causal": (Causal, tokens), "ignoring": (Ignoring, tokens), "sound": (Sound, sound)}


class Steps:
    """The captured step of a model, and fresh captures of it."""

    def __init__(
        self, make: type[L.LightningModule], batch: Any = tokens, size: int = 4, length: int = 6
    ) -> None:
        torch.manual_seed(0)
        self.module, self.batch = make(), batch
        self.step = capture(self.module, batch(size, length))
        self.step.at(size)

    def shaped(self, size: int, length: int) -> CapturedStep:
        found = self.step.shaped(flatten(self.batch(size, length))[1])
        return found if found.size == size else found.resized(size)

    def run(self, step: CapturedStep, size: int, length: int) -> Outcome:
        tensors = dict(self.module.named_parameters())
        return interpret(build_dag(step), tensors, step.inputs(flatten(self.batch(size, length))[0]))

    def fresh(self, size: int, length: int) -> CapturedStep:
        return capture(self.module, self.batch(size, length))


@pytest.fixture(scope="module", params=marked(MODELS, ["causal"]))
def steps(request: pytest.FixtureRequest) -> Steps:
    found = Steps(*MODELS[request.param])
    found.shaped(4, 7).at(4)
    return found


def looks_of(code: StepCode) -> Any:
    """Return everything of a step's code that other packages read, without the graph's names."""
    passes = {**{key: (i, code.code[key]) for key, i in code.interfaces.items()}, **code.split_passes}
    logs = [(log.name, dict(log.kwargs)) for log in code.logs]
    return (
        code.size,
        code.batch_specs,
        logs,
        {
            key: ([out.kind for out in i.outputs], i.inputs, i.params, i.batch, c.outputs)
            for key, (i, c) in passes.items()
        },
    )


@settings(max_examples=10, phases=[Phase.generate], deadline=None)
@given(size=st.integers(2, 6), length=st.integers(4, 30))
def test_any_shape_gives_the_bits_of_a_trace_of_that_shape(steps: Steps, size: int, length: int) -> None:
    step, fresh = steps.shaped(size, length), steps.fresh(size, length)
    assert looks_of(step.at(size)) == looks_of(fresh.at(size))
    assert differences(steps.run(step, size, length), steps.run(fresh, size, length)) == []
    assert steps.step.traces == 2  # of the first batch, and one with symbols
    # The control: one place more gives something else.
    other = steps.run(steps.shaped(size, length + 1), size, length + 1)
    assert set(differences(steps.run(step, size, length), other)) == {*other.metrics, *other.grads}


@pytest.mark.long
def test_one_sample_and_one_place_have_traces_of_their_own() -> None:
    steps = Steps(Causal)
    for size, length in ((1, 5), (1, 9), (3, 1), (2, 2)):
        found, expected = steps.shaped(size, length), steps.fresh(size, length)
        assert differences(steps.run(found, size, length), steps.run(expected, size, length)) == []
    assert steps.step.traces == 4  # the first batch, one sample, one place, and neither


def test_a_branch_on_a_length_is_taken_as_python_takes_it() -> None:
    steps = Steps(Branching)
    for length in (8, 25, 20, 21):
        found = steps.run(steps.shaped(4, length), 4, length)
        assert differences(found, steps.run(steps.fresh(4, length), 4, length)) == []
    assert steps.step.traces == 3  # of the first batch, and one for short and for long ones


def test_code_that_counts_is_traced_for_each_length() -> None:
    steps = Steps(Counting)
    for length in (8, 9):
        found = steps.run(steps.shaped(4, length), 4, length)
        assert differences(found, steps.run(steps.fresh(4, length), 4, length)) == []
    assert steps.step.traces == 3 and not steps.step._symbolic.steps


def test_a_trace_that_says_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(Causal)
    own = Causal.training_step

    def wrong(self: Causal, batch: Any, batch_idx: int) -> Tensor:
        loss = own(self, batch, batch_idx)
        return loss if type(batch[0].shape[1]) is int else loss * 2

    monkeypatch.setattr(Causal, "training_step", wrong)
    found = steps.run(steps.shaped(4, 9), 4, 9)
    assert differences(found, steps.run(steps.fresh(4, 9), 4, 9)) == [] and not steps.step._symbolic.steps


@pytest.mark.long
def test_numbers_that_meet_a_length() -> None:
    steps = Steps(Paced)
    for length in (8, 9, 6, 8):
        steps.step.reads.history.batch_idx = 5
        fresh = steps.fresh(4, length)
        fresh.reads.history.batch_idx = 5
        found = steps.run(steps.shaped(4, length), 4, length)
        assert differences(found, steps.run(fresh, 4, length)) == []
        fresh.reads.history.batch_idx = 6  # the control
        assert differences(found, steps.run(fresh, 4, length)) != []


@pytest.mark.parametrize("name", marked(DETERMINISTIC, ["conv"]))
def test_many_sizes_come_from_one_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all models of the tests, whatever they do; one sample has a trace of its own."""
    monkeypatch.setattr(capturing, "MANY_SIZES", 1)
    c = captured(name)
    step = capture(c.module, c.batch, context=c.case.context)
    step.at(c.case.size)
    for size in (c.case.size - 1, 2, 1):
        dag = build_dag(step, size)
        found = interpret(dag, c.tensors, step.inputs(flatten(cut(c.batch, 0, size))[0]))
        moved = [LOSS] if mixed(step) else []  # terms with weights of their own are added up in float64
        if name in DECOMPOSED:
            assert distance(found, plain(c, [size])) < 1e-6  # of float32, relative
        else:
            assert set(differences(found, plain(c, [size]))) <= set(moved)
    assert step.traces == 3 and differences(found, plain(c, [2])) != []


def stale_length(original: Any, hit: Callable[[], None]) -> Any:
    """The first batch's sizes are used for all batches."""
    first: list[Any] = []

    def at(self: SizeNumbers, values: Sequence[int]) -> Any:
        first.append(original(self, values))
        if first[-1] != first[0]:
            hit()
        return first[-1][0], first[0][1]

    return at


def conditions_not_checked(original: Any, hit: Callable[[], None]) -> Any:
    def conditions(self: SizeSymbols) -> Any:
        holds = original(self)

        def always(*values: int) -> bool:
            if not holds(*values):
                hit()
            return True

        return always

    return conditions


def dimensions_not_told_apart(original: Any, hit: Callable[[], None]) -> Any:
    """The number of samples is confused with the length."""

    def values(self: SizeSymbols, specs: Any) -> Any:
        found = original(self, specs)
        if found is None or len(set(found)) == 1:
            return found
        hit()
        return tuple(reversed(found))

    return values


@pytest.mark.parametrize("seed, owner, name", [
    (stale_length, SizeNumbers, "at"),
    (conditions_not_checked, SizeSymbols, "conditions"),
    pytest.param(dimensions_not_told_apart, SizeSymbols, "values", marks=pytest.mark.long),
])  # fmt: skip
def test_seeded_faults_show(seed: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault is one that the comparison with fresh captures finds, unless the comparison with the first
    trace does before.
    """
    steps, hits = Steps(Branching), []
    monkeypatch.setattr(owner, name, seed(getattr(owner, name), lambda: hits.append(name)))
    wrong = 0
    for length in (8, 12, 25):
        try:
            found = steps.run(steps.shaped(4, length), 4, length)
        except RuntimeError:  # of sizes that do not fit
            wrong += 1
            continue
        wrong += differences(found, steps.run(steps.fresh(4, length), 4, length)) != []
    assert hits and (wrong or not steps.step._symbolic.steps)


class Measured(Causal):
    """A module that gives a metric object a tensor whose dimensions are the samples and the length."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.measure(loss, batch[0])
        self.log("mean", self.mean)
        return loss

    def measure(self, loss: Tensor, x: Tensor) -> None:
        self.mean.update(x.sum(1))
        self.mean.update(loss.detach())


class Weighted(Measured):
    def measure(self, loss: Tensor, x: Tensor) -> None:
        self.mean.update(loss.detach(), weight=x.shape[1])


class Counted(Measured):
    def measure(self, loss: Tensor, x: Tensor) -> None:
        self.mean.update(torch.arange(x.shape[1]).float())


@pytest.mark.parametrize(
    "make, traces", marked([(Measured, 2), (Weighted, 3), (Counted, 3)], [(Weighted, 3)])
)
def test_metric_objects_get_the_same_at_any_length(make: type[Measured], traces: int) -> None:
    steps = Steps(make)
    for length in (7, 9):
        code, fresh = steps.shaped(4, length).at(4), steps.fresh(4, length).at(4)
        assert looks_of(code) == looks_of(fresh)
        assert list(map(str, code.metrics.events)) == list(map(str, fresh.metrics.events))
        assert (code.metrics.terms, list(code.metrics.whole)) == (
            fresh.metrics.terms,
            list(fresh.metrics.whole),
        )
        for a, b in zip(code.metrics.calls, fresh.metrics.calls, strict=True):
            assert a.arguments(a.tensors, None) == b.arguments(b.tensors, None)
        assert all(len(find([])) == length for find in code.metrics.whole.values())
    assert steps.step.traces == traces  # sizes among the arguments take a trace for each


def test_a_size_that_a_graph_reads_twice_is_one_number() -> None:
    symbols = SizeSymbols(frozenset({(0, 0), (0, 1)}))
    _, (tensor,) = symbols.fakes((TensorSpec.of(torch.empty(4, 6, device="meta")),), torch.device("cpu"))
    numbers, graph = SizeNumbers(symbols), torch.fx.Graph()
    x = graph.placeholder("x")
    for dim in (0, 1, 0, 0):
        graph.call_function(torch.ops.aten.sym_size.int, (x, dim)).meta["val"] = tensor.shape[dim]
    take_numbers(graph, numbers)
    assert numbers.at([5, 7]) == ((5, 7), (5, 7))
