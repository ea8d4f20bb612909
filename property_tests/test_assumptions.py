"""No step trains in silence as one device would not: it is equal, or a warning or an error says why not."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections import Counter
from typing import Any

import lightning as L
import pytest
from hypothesis import assume, given, settings
from torch import Tensor

import lightning_piper as piper
from lightning_piper.errors import PiperError
from lightning_piper.session import verification
from property_tests.assumptions import (
    BREAKING,
    BREAKING_LOSSES,
    KEEPING,
    KEEPING_LOSSES,
    PROGRAMS,
    Drawn,
    Net,
    drawn,
)
from property_tests.test_steps import QUIET, Batches

ROUNDING = 1e-10
KEPT = [Drawn(middle=name) for name in KEEPING] + [Drawn(loss=name) for name in KEEPING_LOSSES]
BROKEN = [Drawn(middle=name) for name in BREAKING] + [Drawn(loss=name) for name in BREAKING_LOSSES]


def name(step: Drawn) -> str:
    return step.middle if step.middle != "plain" else step.loss


class Losses(L.Callback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.found += [outputs["loss"].detach().clone(), trainer.callback_metrics["loss"].clone()]


def fitted(step: Drawn, strategy: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Losses, logged values and what the module has at the end, and what the strategy warned of."""
    module, losses = Net(step), Losses()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **QUIET}
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[losses],
        accumulate_grad_batches=step.accumulated,
        gradient_clip_val=0.1 if step.clipped else None,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Batches(step.batches()))
    found = {f"loss {i}": x.double() for i, x in enumerate(losses.found)} | module.state_dict()
    return found, [str(each.message) for each in caught if "lightning_piper" in each.filename]


def verdict(step: Drawn) -> str:
    """`equal`, `equal, and said`, `said`, `refused`, or `silent`."""
    try:
        alone, _ = fitted(step, "auto")
    except RuntimeError as error:  # a loss of frozen layers alone
        assume("does not require grad" not in str(error))
        raise
    strategy = piper.PiperStrategy(PROGRAMS[step.program](), transport="local")
    try:
        found, said = fitted(step, strategy)
    except PiperError:
        return "refused"
    except ValueError as error:  # the step's own, for a microbatch of one sample
        if any("was captured for" in note for note in getattr(error, "__notes__", ())):
            return "refused"
        raise
    far = max(float((found[name] - x).abs().max()) for name, x in alone.items())
    if far < ROUNDING:
        return "equal, and said" if said else "equal"
    return "said" if said else "silent"


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@settings(
    max_examples=int(os.environ.get("STEPS", 0)) or (10_000 if settings.default.max_examples > 100 else 4)
)  # type: ignore[union-attr]
@given(step=drawn())
def test_no_step_differs_in_silence(tally: Counter[str], step: Drawn) -> None:
    found = verdict(step)
    tally[f"steps whose assumptions were drawn: {found}"] += 1
    assert found != "silent"


@pytest.mark.long
@pytest.mark.parametrize("step", BROKEN, ids=name)
def test_what_breaks_an_assumption_is_said(step: Drawn) -> None:
    assert verdict(step) != "silent"


@pytest.mark.long
@pytest.mark.parametrize("step", KEPT, ids=name)
def test_what_keeps_them_is_equal_and_nothing_is_said(step: Drawn) -> None:
    """The control: no false alarm."""
    assert verdict(dataclasses.replace(step, program="stages of replicas")) == "equal"


@pytest.mark.parametrize("middle", ["instance norm over samples", "instance norm with running statistics"])
def test_what_a_graph_shows_is_said_without_a_trial(middle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in steps that draw random numbers, for which nothing is tried."""
    monkeypatch.setattr(verification, "_tried", lambda *args: None)
    assert verdict(Drawn(middle=middle)) == "said"


def test_a_difference_that_nothing_says_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(verification, "_warn", lambda *args: None)
    assert verdict(Drawn(loss="pairs")) == "silent"
