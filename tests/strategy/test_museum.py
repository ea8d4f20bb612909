"""For each step of the museum, the result is that of one device, or a warning names what breaks it, or the
step is refused. No step gives another result without a message.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET
from tests.strategy.museum import EQUAL, NAMED, NOT_LINEAR, PYTHON, STATE, Net, Step

ROUNDING = 1e-12
PROGRAMS = {
    "microbatches": [piper.Place([0]), piper.Split(2)],
    "replicas": [piper.Place([0, 1]), piper.Replicate()],
}
MARKS = [pytest.mark.long]
FEW = {"similarities", "a condition on the size", "mean", "masked", "clamped"}


def of(steps: dict[str, Step]) -> list[Any]:
    return [name if name in FEW else pytest.param(name, marks=MARKS) for name in steps]


def fit(step: Step, strategy: Any) -> tuple[dict[str, Tensor], list[str]]:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(24, width, generator=draw, dtype=torch.float64) for width in (6, 4)))
    module = Net(step)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=8))
    return module.state_dict(), [str(each.message) for each in caught if "lightning_piper" in each.filename]


def compared(step: Step, program: str) -> tuple[float, list[str]]:
    alone, _ = fit(step, "auto")
    state, said = fit(step, piper.PiperStrategy(PROGRAMS[program], transport="local"))
    return max(float((state[name] - x).abs().max()) for name, x in alone.items()), said


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", of(NAMED))
def test_another_result_is_named(name: str, program: str) -> None:
    far, said = compared(NAMED[name], program)
    assert far > ROUNDING and len(said) == 1 and "uncaptured" not in said[0]


@pytest.mark.parametrize("name", of(NOT_LINEAR))
def test_a_backward_pass_that_is_not_linear(name: str) -> None:
    with pytest.raises(piper.DirectiveError, match="the backward pass is not linear"):
        compared(NOT_LINEAR[name], "microbatches")
    far, said = compared(NOT_LINEAR[name], "replicas")
    assert far > ROUNDING and any("DistributedDataParallel does" in text for text in said)


@pytest.mark.parametrize("name", of(STATE))
def test_state_that_follows_from_samples(name: str) -> None:
    far, said = compared(STATE[name], "microbatches")
    assert far > ROUNDING and len(said) == 1
    far, said = compared(STATE[name], "replicas")
    assert far < ROUNDING and "uncaptured" in said[0]


@pytest.mark.parametrize("name", of(PYTHON))
def test_python_state_that_a_step_changes(name: str) -> None:
    with pytest.raises(piper.CaptureError, match="training_step changes self"):
        compared(PYTHON[name], "microbatches")
    far, said = compared(PYTHON[name], "replicas")
    assert far < ROUNDING and "uncaptured" in said[0]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", of(EQUAL))
def test_what_breaks_nothing_is_equal_and_nothing_is_said(name: str, program: str) -> None:
    """The control."""
    far, said = compared(EQUAL[name], program)
    assert far < ROUNDING and said == []
