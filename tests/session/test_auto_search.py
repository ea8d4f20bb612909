"""What an automatic search says about its choice."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_piper.search import Found
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.proposal import sizes_of, work_of
from lightning_piper.session import auto_search
from lightning_piper.session.auto_search import WHOLE, _better, _Outcome, _proved, _searched
from lightning_piper.simulate.hardware import Hardware
from tests.moe import Model, batch
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


@pytest.mark.parametrize("allowed", [False, True])
def test_a_whole_module_has_all_experts(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with all experts in each process need 45 KiB; with sharded experts, less by estimate."""
    if allowed:
        monkeypatch.setattr(auto_search, "_without_exchanges", lambda workload: workload)
    module, samples, hardware = Model(), batch(8), Hardware.read("cpu")
    cut = blocks_of(module, samples)
    work = work_of(module, samples, hardware, sizes_of(samples), cut)
    outcome = _searched(module, samples, cut, [WHOLE], work, hardware, devices=2, memory=40_000)
    assert outcome.proposal is None and outcome.is_limited
    assert ("may fit in 39.06 KiB by estimate" in outcome.problem) is allowed, outcome.problem


def test_without_a_program_the_problem_that_names_less_memory_is_told() -> None:
    less, more = _Outcome(0, problem="less", needed=1), _Outcome(0, problem="more", needed=2)
    none = _Outcome(0, problem="none")
    assert _better(more, less).told() == _better(less, more).told() == (None, "less")
    assert _better(none, less).told() == _better(less, none).told() == (None, "less")
