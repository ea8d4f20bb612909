"""`directive_suite`: the full verification of a directive as a pytest class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.directives import Directive, parse, to_json
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import Done, apply_program, run_pipeline
from lightning_piper.testing.equivalence import (
    assert_same,
    mode_of,
    run_interpreter,
    run_plans,
    single_device,
)
from lightning_piper.testing.models import Case, Spec
from lightning_piper.testing.programs import cases, programs
from lightning_piper.verify.static_check import check

# Models with each kind of block except `scored` and `synced`. Some are exact, and one returns to an earlier
# stage.
POOL = (
    Spec(("linear", "residual"), (0, 1), exact=True),
    Spec(("tied", "branch", "tied"), (0, 1, 2), exact=True),
    Spec(("nested", "skip", "auxiliary"), (0, 1, 1), exact=True),
    Spec(("linear", "frozen", "bare", "linear"), (0, 1, 2, 0), exact=True, loss="sum"),
    Spec(("attention", "norm"), (0, 1), loss="tokens"),
    Spec(("conv", "batchnorm", "linear"), (0, 0, 1)),
    Spec(("dropout", "residual", "dropout"), (0, 1, 2)),
    Spec(("auxiliary", "tied", "skip", "tied"), (0, 1, 1, 2), loss="terms"),
    Spec(("linear", "experts", "places"), (0, 0, 1), exact=True),
    Spec(("experts", "crowded", "tied"), (0, 1, 1)),
    Spec(("gathered", "skip", "gathered", "linear"), (0, 1, 1, 2), loss="tokens"),
)


def check_program(case: Case, program: Sequence[Directive]) -> TrainingDAG:
    """Apply a program and check everything after each pass. Returns the DAG from which plans are compiled.

    The check runs the static check, and compares each DAG with the DAG before the pass, as the pass's contract
    says. It compares the plans of a finished DAG with the interpreter, before and after the elimination of
    redundant communication. It compares the last DAG with one device, if random numbers allow this.

    Raises:
        AssertionError: Two outcomes differ.
        PiperError: The program is not valid, or a check found an error.
    """
    held = _EquivalenceHook(case)
    dag = run_pipeline(case.step, program, after=held)
    assert held.last is not None
    parts = dag.microbatches()
    if parts is None and not (case.spec.coupled or case.spec.random):
        whole = single_device(case.spec, case.size, (Slice(0, case.size),))
        assert_same(whole, held.last, mode_of(case, bitwise=False), _terms(dag))
    if parts is not None:
        # Three things change the order of sums. A tied weight's gradients are summed region by region, and all
        # gradients replica by replica. Batch norm of a transposed float64 input returns other strides than
        # torch's shape rules predict, so the captured step selects other kernels than the eager step. Terms of
        # the whole batch are added to the loss last.
        exempt = {"tied", "batchnorm", "synced", "gathered"} & set(case.spec.blocks)
        mode = mode_of(case, bitwise=not exempt and dag.replicas == 1 and not held.regrouped)
        assert_same(single_device(case.spec, case.size, parts), held.last, mode, _terms(dag))
    return dag


class _EquivalenceHook:
    """A hook that compares the DAG after each pass with the DAG before it, and its plans with the
    interpreter.

    Attributes:
        last: The outcome of the DAG after the last pass; None before the first pass.
        regrouped: Whether a pass reassociated sums although its class promises the same bits.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.last: Outcome | None = None
        self._slices: object = None
        self.regrouped = False

    def __call__(self, dag: TrainingDAG, done: Done) -> None:
        """Check the DAG after a pass. If batch statistics or random numbers matter, compare the DAG with the
        DAG before the pass only if the passes of both DAGs work on the same samples."""
        case = self._case
        check(dag, final=done.by.finished)
        now, slices = run_interpreter(case, dag), _work(dag)
        comparable = slices == self._slices or not (case.spec.coupled or case.spec.random)
        if self.last is not None and comparable:
            assert_same(self.last, now, mode_of(case, done.contract == "bitwise"), _terms(dag))
        if done.by.finished:
            assert_same(now, run_plans(case, dag), "bitwise")
        self.last, self._slices = now, slices
        self.regrouped |= done.contract != done.by.contract


def _work(dag: TrainingDAG) -> tuple[int, set[tuple[int, str, Slice]]]:
    """Return the number of replicas, and (region, F or B, samples) of each chunk. Batch statistics and random
    numbers depend only on these values.
    """
    return dag.replicas, {(chunk.region, chunk.kind[0], chunk.slice) for chunk in dag.of_type(Chunk)}


def _terms(dag: TrainingDAG) -> int:
    """Return an upper bound of the number of terms of a sum. The longest sum is the gradient of a weight, over
    the samples and positions of all chunks.
    """
    return 8 * dag.size + len(list(dag.of_type(Chunk)))


def directive_suite(
    directive: type[Directive],
    strategy: Callable[[Case, TrainingDAG], st.SearchStrategy[Directive]],
    pool: Sequence[Spec] = POOL,
) -> type:
    """Return a test class for a directive, for example `TestMine = directive_suite(Mine, draw_mine)`.

    The class tests static check, contract and compiled plans with the directive alone and after random
    programs. It also tests that rewrites are deterministic, that the directive's JSON reads back as an equal
    directive, and that malformed JSON raises an error.

    pytest collects the class if its name in the test module begins with `Test`.

    Args:
        directive: The registered directive class.
        strategy: Takes a case and the DAG to rewrite. Returns a hypothesis strategy of instances that are
            valid for this DAG.
        pool: Models to test with.
    """

    # The first example of a model captures the model, which takes long. The user's hypothesis profile sets the
    # number of examples.
    unhurried = settings(
        deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors]
    )

    def drawn(test: Callable[..., None]) -> Callable[..., None]:
        return unhurried(given(st.data(), cases(pool=pool))(test))

    class Suite:
        @drawn
        def test_alone(self, data: st.DataObject, case: Case) -> None:
            """Check static check, contract and plans of the directive alone."""
            check_program(case, [data.draw(strategy(case, build_dag(case.step)))])

        @drawn
        def test_composed(self, data: st.DataObject, case: Case) -> None:
            """Check the directive after a random program of other directives."""
            program = data.draw(programs(case))
            dag = apply_program(build_dag(case.step), program)
            program = [*program, data.draw(strategy(case, dag))]
            note(f"program: {to_json(program)}")
            check_program(case, program)

        @drawn
        def test_deterministic(self, data: st.DataObject, case: Case) -> None:
            """Check that the same rewrite of the same DAG gives the same DAG."""
            one = data.draw(strategy(case, build_dag(case.step)))
            assert len({str(apply_program(build_dag(case.step), [one])) for _ in range(2)}) == 1

        @drawn
        def test_json(self, data: st.DataObject, case: Case) -> None:
            """Check that the JSON and Python forms are equal."""
            one = data.draw(strategy(case, build_dag(case.step)))
            assert parse(to_json([one])) == parse([one])
            assert isinstance(one, directive)

        @drawn
        def test_refuses_malformed(self, data: st.DataObject, case: Case) -> None:
            """Check that unknown, missing and invalid fields raise a DirectiveError that names the
            directive.
            """
            entry = data.draw(strategy(case, build_dag(case.step))).to_json()
            chosen = data.draw(st.sampled_from(_malformed(directive, entry)))
            with pytest.raises(DirectiveError, match=rf"directive 0 \({directive.op}\)"):
                apply_program(build_dag(case.step), parse([chosen]))

    Suite.__name__ = Suite.__qualname__ = f"{directive.__name__}Suite"
    return Suite


def _malformed(directive: type[Directive], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of a directive's JSON, each with one fault: an unknown field, a missing required field, or
    a field with a value that no field accepts.
    """
    fields = {f.name: f for f in dataclasses.fields(directive)}
    needed = [
        n
        for n, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    bad: list[dict[str, Any]] = [{**entry, "no_such_field": 1}]
    bad += [{k: v for k, v in entry.items() if k != name} for name in needed]
    return bad + [{**entry, name: _Senseless()} for name in fields]


class _Senseless:
    """A value that no field of any directive accepts."""
