"""On a GPU, steps that run uncaptured give bit for bit what Lightning gives."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import lightning_piper as piper
from tests.strategy import partial_capture
from tests.strategy.uncaptured import KINDS, fit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("kind", KINDS)
def test_one_gpu_trains_as_without_the_strategy(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fit(kind, lambda: "auto", 1, tmp_path / "plain", accelerator="cuda")
        own = fit(kind, piper.PiperStrategy, 1, tmp_path / "own", accelerator="cuda")
    assert own["seen"] == plain["seen"] and own["losses"] == plain["losses"]
    for part in ("values", "saved"):
        assert all(torch.equal(own[part][name], value) for name, value in plain[part].items())


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_the_rest_of_a_step_that_is_captured_in_part_trains_as_without_the_strategy() -> None:
    module, alone = partial_capture.made("Branch"), partial_capture.made("Branch", parts=4)
    strategy = piper.PiperStrategy(partial_capture.program("Branch"), transport="local")
    partial_capture.fit(module, strategy, accelerator="cuda")
    partial_capture.fit(alone, "auto", accelerator="cuda")
    for name, value in alone.state_dict().items():
        assert torch.allclose(module.state_dict()[name].cpu(), value.cpu(), rtol=0, atol=1e-13), name
