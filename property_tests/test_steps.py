"""Random steps over Python state that hooks change: each fits as plain Lightning fits it, or says why it does
not.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from hypothesis import Phase, find, given, note, settings

import lightning_piper as piper
from lightning_piper.capture.python_state.state_reads import StateReads
from lightning_piper.errors import CaptureError, PiperError
from property_tests.steps import Drawn, drawn_steps

EPOCHS = 2
ROUNDING = 1e-12  # relative; microbatches add up in another order
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Batches:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Record(L.Callback):
    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self.found[f"{step}.loss"] = outputs["loss"].clone()
        self.found |= {
            f"{step}.log.{name}": value.clone() for name, value in trainer.callback_metrics.items()
        }


def fitted(drawn: Drawn, strategy: Any = "auto") -> dict[str, torch.Tensor]:
    """Losses, logged values, and what the module has at the end."""
    module, record = drawn.module(), Record()
    steps = len(drawn.batches) * (EPOCHS if len(drawn.batches) < 5 else 1)
    run = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, callbacks=[record], **QUIET
    )  # type: ignore[arg-type]
    run.fit(module, Batches(drawn.batches))
    return record.found | module.state_dict()


def planned(drawn: Drawn) -> dict[str, torch.Tensor]:
    program = piper.schedules.one_f_one_b(2, drawn.microbatches)
    return fitted(drawn, piper.PiperStrategy(program, transport="local"))


def differs(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [
        name
        for name, x in wanted.items()
        if x.dtype != found[name].dtype
        or not torch.allclose(
            found[name].double(),
            x.double(),
            rtol=ROUNDING if x.dtype == torch.float64 else 1e-6,
            atol=1e-10,
            equal_nan=True,
        )
    ]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@settings(
    max_examples=int(os.environ.get("STEPS", 0)) or (5000 if settings.default.max_examples > 100 else 8)
)  # type: ignore[union-attr]
@given(drawn=drawn_steps())
def test_steps_that_read_python_state(tally: Counter[str], drawn: Drawn) -> None:
    note(drawn.text)
    try:
        wanted = fitted(drawn)
    except Exception:
        tally["steps that plain Lightning does not run"] += 1
        return
    if not all(x.isfinite().all() for x in wanted.values()) or any(
        x.abs().max() > 1e6 for x in wanted.values()
    ):
        tally["steps that diverge"] += 1
        return
    try:
        found = planned(drawn)
    except PiperError as error:
        assert "now differs from the captured step" not in str(error), error  # no guard saw it
        assert ".py:" in str(error) or "self." in str(error) or "'" in str(error), error
        tally[f"steps, each refused: {str(error).partition(': ')[2][:70]}"] += 1
        return
    assert not differs(found, wanted)
    tally["steps, each fitted as plain Lightning does"] += 1


@pytest.mark.long
def test_without_guards_a_difference_is_found() -> None:
    """Negative control."""

    def wrong(drawn: Drawn) -> bool:
        try:
            wanted = fitted(drawn)
            with mock.patch.object(StateReads, "hold", lambda self: True):
                return bool(differs(planned(drawn), wanted))
        except CaptureError as error:
            return "now differs from the captured step" in str(error)
        except Exception:
            return False

    quick = settings(max_examples=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    find(drawn_steps(), wrong, settings=quick)
