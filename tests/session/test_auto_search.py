"""What an automatic search says about its choice."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from lightning_piper.search import Found
from lightning_piper.session.auto_search import _proved
from tests.search.problems import found, problem


def said(result: Found) -> str:
    proposal: Any = SimpleNamespace(found=result, refused=[])
    return _proved(proposal)


def test_the_best_program_takes_as_much_less_time_as_is_said() -> None:
    """A gap of 100% would be half of the time."""
    some, best = (found(problem(0), budget=budget) for budget in (3, 10**6))
    text = re.fullmatch(r"the best of [\d,]+ programs may take up to (\S+)% less time", said(some))
    assert text is not None
    less = float(text[1]) / 100
    assert abs(less - (1 - 1 / (1 + float(some.gap)))) < 1e-3 and abs(less - float(some.gap)) > 1e-3
    assert best.estimate.time >= some.estimate.time * (1 - less - 1e-3)
    assert "none is predicted to be better" in said(best)
