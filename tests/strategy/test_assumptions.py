"""The assumptions of a program hold, or one warning at the first batch names what breaks them, and by how
much.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

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
    """The values after the training, and the warnings of the strategy."""
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


class Later(Step):
    """Mixes samples only in later batches: in long ones, or in those with a third tensor."""

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        x, y, *more = batch
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(x))
            if more or x.size(1) > 2:
                h = torch.cumprod(h, 0)
        with piper.annotate("PP", 1):
            return self.loss(self, h, self.last(h).mean(1), y)


@pytest.mark.parametrize(
    ("lengths", "more"),
    [((2, 3, 4), False), ((2, 1, 1), True)],
    ids=["batches of another length", "another structure"],
)
def test_a_later_layout_that_may_not_be_cut_is_named_once(lengths: tuple[int, ...], more: bool) -> None:
    g = torch.Generator().manual_seed(3)
    batches: list[tuple[torch.Tensor, ...]] = [
        (torch.randn(8, n, 6, generator=g, dtype=torch.float64), torch.randint(0, CLASSES, (8,), generator=g))
        for n in lengths
    ]
    if more:
        batches[1:] = [(*batch, batch[0]) for batch in batches[1:]]
    (said,) = warned(Later(), batches)
    assert re.search(r"n the first samples, .* differs by \d.* from cumprod at", said)
    assert warned(Later(), batches[:1]) == []


def warned(module: Step, batches: Sequence[tuple[torch.Tensor, ...]]) -> list[str]:
    fit, _ = trainer(local(piper.schedules.one_f_one_b(2, 4)), max_steps=len(batches))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit.fit(module, Batches(batches))
    return [str(each.message) for each in found if "lightning_piper" in each.filename]
