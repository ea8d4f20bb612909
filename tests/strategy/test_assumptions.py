"""What a program takes for granted holds, or one warning at the first batch names what breaks it, and by how
much.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import lightning_piper as piper
from tests.strategy.assumptions import CLASSES, EQUAL, NAMED, Step
from tests.strategy.fitting import Batches, local, trainer

ROUNDING = 1e-12
QUICK = {
    "SimCLR",
    "a gradient penalty",
    "an average of samples",
    "a condition on the size",
    "an embedding by frequency",
}


def data() -> Batches:
    g = torch.Generator().manual_seed(3)
    return Batches(
        (torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(0, CLASSES, (8,), generator=g))
        for _ in range(3)
    )


def trained(module: Step, strategy: object) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The values afterwards, and what the strategy warned of."""
    fit, _ = trainer(strategy, max_steps=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit.fit(module, data())
    return dict(module.state_dict()), [
        str(each.message) for each in found if "lightning_piper" in each.filename
    ]


def compared(make: type[Step], microbatches: int = 4) -> tuple[float, list[str]]:
    alone, _ = trained(make(), "auto")
    found, said = trained(make(), local(piper.schedules.one_f_one_b(2, microbatches)))
    return max(float((found[name] - x).abs().max()) for name, x in alone.items()), said


@pytest.mark.parametrize("name", EQUAL)
def test_what_may_be_cut_is_equal_and_nothing_is_said(name: str) -> None:
    far, said = compared(EQUAL[name])
    assert far < ROUNDING and said == []


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in NAMED]
)
def test_what_may_not_be_cut_is_named_once(name: str) -> None:
    far, (said,) = compared(NAMED[name])
    assert far > 1e-6
    assert "assumptions.py:" in said and re.search(r"n the first samples, .* differs by \d", said), said


@pytest.mark.long
@pytest.mark.parametrize("name", ["SimCLR", "a condition on the size"])
def test_without_microbatches_all_is_equal_and_nothing_is_said(name: str) -> None:
    far, said = compared(NAMED[name], microbatches=1)
    assert far < ROUNDING and said == []
