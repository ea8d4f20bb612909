"""Losses whose denominators and weights are drawn as functions of the number of samples and of counts: on parts
of the batch they give the result of the whole batch, or Piper says that it does not know their weights.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.capture.eager.eager_reference import run_eagerly
from lightning_piper.capture.losses import loss_weights
from lightning_piper.capture.losses.denominators import ONE, SAMPLES, _evaluate, stats_of
from lightning_piper.compiler import compile_step
from lightning_piper.directives import accumulating
from lightning_piper.errors import CaptureError, VerificationError
from lightning_piper.ir.values import Slice
from lightning_piper.verify.interpreter import interpret
from tests.capture.test_loss_terms import SIZE, Model, batch, distance, each, number

ROUNDING = 1e-6  # a quotient of integers is a float32
PYTHON, TENSOR, LATER = "python", "tensor", "later"  # LATER: a number that Python takes out of a tensor
# expression -> its kind. p: outputs of the samples. r: weights of the samples, and a mask.
COUNTS = {
    "len(p)": PYTHON,
    "p.shape[0]": PYTHON,
    "p.numel()": PYTHON,
    "number(p)": TENSOR,
    "torch.tensor(len(p))": TENSOR,
    "p.new_ones(len(p)).sum()": TENSOR,
    "r[1].double().sum()": TENSOR,
    "r[1].double().mean()": TENSOR,
    "r[0].sum()": TENSOR,
    "r[1].sum().item()": LATER,
}
ANY_KIND = (
    "({0} + {1})",
    "({0} - 0.5)",
    "({0} * {1})",
    "({0} / {1})",
    "({0} // {1} + 1)",
    "({0} % {1} + 1)",
    "{0} ** 0.5",
)
NUMBERS = ("max({0}, {1})", "min({0}, {1})", "(round({0}) + 1)", "(int({0} / {1}) + 1)")
CHOICES = ("({0} if {0} > {1} else {1})", "({1} if {0} > 3 else 2)")
TENSORS = ("{0}.clamp(min={1})", "{0}.clamp(max={1})", "(({0} / {1}).long() + 1)", "{0}.double().sqrt()",
           "torch.where({0} > {1}, {0}, 1.0)", "torch.maximum({0}, torch.tensor({1}))", "{0}.double().reciprocal()",
           "torch.add({0}, 1, alpha={1})", "({0} / 3).floor().add(1)", "{0}.double().log1p()")  # fmt: skip
LOSSES = ("p.square().sum() / {0}", "p.square().mean() * {0}", "p.square().mean() / {0}",
          "(p.square() / {0}).sum()", "(p.square() * {0}).mean()", "(each(p, y) * r[1]).sum() / {0}",
          "p.square().sum() / {0} + 0.1 * p.mean()", "p.mean() - p.square().sum() * (1 / {0})",
          "(p.square().sum(1) + p.sum() / {0}).mean()")  # fmt: skip
OF_NUMBERS = (
    "torch.add(p.mean(), p.square().sum(), alpha={0})",
    "(p.square().sum(1) * p.new_full((len(p),), {0})).sum()",
    "p.square().sum() / p.new_full((len(p),), {0}).sum()",
    "p.square().sum() / (r[0] + {0}).sum()",
)
LIMITS = ("1", "2", "3.0", "4", "5.0", "6", "9.0", "12", "24", "100")
PARTS = (
    (Slice(0, 6), Slice(6, 12)),
    (Slice(0, 6), Slice(6, 9), Slice(9, 12)),
    (Slice(0, 4), Slice(4, 8), Slice(8, 12)),
    (Slice(0, 11), Slice(11, 12)),
)
REPLICAS = "replicas"


@st.composite
def denominators(draw: Any) -> tuple[str, str]:
    """Draw an expression, and its kind."""
    found, kind = draw(st.sampled_from([*COUNTS.items()]))
    for _ in range(draw(st.integers(0, 2))):
        of_kind = {PYTHON: (*NUMBERS, *CHOICES), TENSOR: TENSORS, LATER: NUMBERS}[kind]
        found = draw(st.sampled_from([*ANY_KIND, *of_kind])).format(found, draw(st.sampled_from(LIMITS)))
    return found, kind


@st.composite
def losses(draw: Any) -> str:
    """Draw a loss as source text."""
    found, kind = draw(denominators())
    if draw(st.booleans()):
        other, of_other = draw(denominators())
        found = draw(st.sampled_from(["({} + {})", "({} * {})", "({} / {})"])).format(found, other)
        kind = kind if kind == of_other else TENSOR
    return str(draw(st.sampled_from([*LOSSES, *(OF_NUMBERS if kind == PYTHON else ())])).format(found))


def verdict(loss: str, parts: Any) -> str:
    """Return how the loss on the parts compares with the loss on the whole batch.

    `wrong`: it differs, and Piper counts its weights as known.
    """
    space = {"torch": torch, "number": number, "each": each}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Model(eval(f"lambda m, p, y, r: {loss}", space))
    leaves = batch()
    try:
        step = capture(module, leaves)
        code = step.at(SIZE)
        tensors = {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
        whole = run_eagerly(step, tensors, leaves, [Slice(0, SIZE)])
        if not (finite(whole.metrics) and finite(whole.grads)):
            return "not finite on one device"
        if parts == REPLICAS:
            program = [
                piper.Place(filter={}, devices=[0, 1]),
                piper.Replicate(filter={}, devices=[0, 1]),
                piper.Split(filter={}, dim_name="MB", num_microbatches=3),
            ]
            found = interpret(compile_step(step, program).dag, tensors, leaves)
        else:
            found = interpret(accumulating(step, parts), tensors, leaves)
    except CaptureError:
        return "refused"
    except VerificationError:  # NaN on two replicas count as different values
        found = None
    if found is not None and distance(whole, found) < ROUNDING:
        return "equal"
    if code.assumed:
        return "said"
    if (found is None or not finite(found.metrics)) and "r[" in loss:
        return "divided by a count that is 0 in a part"
    return "wrong"


def finite(values: dict[str, Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in values.values())


@settings(
    max_examples=int(os.environ.get("STEPS", 0)) or (10_000 if settings.default.max_examples > 100 else 12)
)  # type: ignore[union-attr]
@given(loss=losses(), parts=st.sampled_from([*PARTS, REPLICAS]))
def test_no_denominator_is_wrong_in_silence(tally: Counter[str], loss: str, parts: Any) -> None:
    note(loss)
    found = verdict(loss, parts)
    tally[f"denominators that were drawn: {found}"] += 1
    assert found != "wrong"


def test_denominators_that_are_judged_by_two_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    for limit, judged in (("min=4", ONE), ("max=4", SAMPLES)):
        loss = f"p.square().sum() / number(p).clamp({limit})"
        assert verdict(loss, PARTS[1]) == "equal"
        with monkeypatch.context() as patch:
            patch.setattr(loss_weights, "simplified", lambda found, judged=judged: judged)
            assert verdict(loss, PARTS[1]) == "wrong"


@pytest.mark.long
def test_drawn_losses_find_denominators_that_are_judged_by_two_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""

    def by_two_values(expression: Any) -> Any:
        if not stats_of(expression):
            one, two = (float(_evaluate(expression, {}, [torch.tensor(n).double()])) for n in (1, 2))
            if one and two / one in (1.0, 2.0):
                return SAMPLES if two / one == 2.0 else ONE
        return expression

    monkeypatch.setattr(loss_weights, "simplified", by_two_values)
    quick = settings(
        max_examples=300, derandomize=True, deadline=None, database=None, phases=[Phase.generate]
    )
    find(losses(), lambda loss: verdict(loss, PARTS[1]) == "wrong", settings=quick)
