"""The stages of one program may have different levels of ZeRO: which combinations are searched, and that the
program that is written trains as one device does.
"""

from __future__ import annotations

import pytest
import torch

from lightning_piper.compiler import compile, verify
from lightning_piper.directives import Replicate
from lightning_piper.errors import PiperError
from lightning_piper.search import Block, Candidate, Layout, Space, Work, Workload
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.choices import everything
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.chain import copy_of
from lightning_piper.search.proposal import _written
from lightning_piper.search.report import described
from tests.search.nets import GPT, Module, tokens
from tests.search.problems import best_of_all, found, problem

MIXED = (109,)  # a problem whose best candidate has stages of different levels
LEVELS = {
    "three of one": ("one_f_one_b", 1, 4, (3, 3, 1, 0)),
    "interleaved": ("interleaved_one_f_one_b", 2, 2, (3, 2, 1, 1)),
    "folded": ("zbv", 2, 2, (3, 3, 3, 1)),
    "dual": ("dualpipev", 2, 2, (2, 1, 1, 0)),
    "split": ("zero_bubble", 1, 2, (2, 1)),
}
TIED = {
    "apart": ("one_f_one_b", 1, 3, (3, 2, 1)),
    "on one device": ("zbv", 2, 2, (2, 2, 1, 1)),
    "interleaved": ("interleaved_one_f_one_b", 2, 2, (3, 3, 1, 1)),
}


def candidate(name: str, per_rank: int, ranks: int, levels: tuple[int, ...]) -> Candidate:
    """A candidate with two replicas, two microbatches for each rank, and uneven cuts of six blocks or more."""
    stages = per_rank * ranks
    cuts = (1, *range(3, 1 + stages))
    return Candidate(Layout(name, per_rank, ranks, 2, 1, 1, 2 * ranks, True), levels, 0, 0, cuts)


def verdict(tied: bool, wanted: Candidate) -> str:
    """The verdict of `verify` on a candidate's program, which is executed and compared with one device."""
    torch.manual_seed(0)
    module, batch = Module(GPT(5, tied)).double(), tokens(4 * wanted.layout.ranks)
    written = _written(wanted, blocks_of(module, batch))
    replicates = [directive for directive in written.directives if isinstance(directive, Replicate)]
    assert len(replicates) == len(set(wanted.levels))
    annotated = copy_of(module)
    written.annotate(annotated)
    assert max(bytes_needed(compile(annotated, batch, written.directives), 2.0).values()) > 0
    report = verify(annotated, batch, written.directives)
    report.require()
    return report.verdict


@pytest.mark.parametrize("name", LEVELS)
def test_stages_of_several_levels_train_as_one_device_does(name: str) -> None:
    assert verdict(False, candidate(*LEVELS[name])) == "verified"


@pytest.mark.parametrize("name", TIED)
def test_so_do_those_that_have_a_parameter_in_common(name: str) -> None:
    assert verdict(True, candidate(*TIED[name])) == "verified"


REFUSED = {
    "sharded in one of them": ("one_f_one_b", 1, 2, (1, 0)),
    "kept whole by one of a device": ("zbv", 2, 2, (3, 3, 1, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_are_refused_are_no_candidates(name: str) -> None:
    """A parameter in common is sharded everywhere or nowhere, and on one device whole between its uses or
    not.
    """
    wanted = candidate(*REFUSED[name])
    with pytest.raises(PiperError, match=r"used in several regions|between their uses"):
        verdict(True, wanted)
    assert not any(set(wanted.levels) <= set(levels) for levels in levels_of(True, wanted.layout))
    assert any(set(wanted.levels) <= set(levels) for levels in levels_of(False, wanted.layout))


def test_others_are() -> None:
    for wanted in (candidate(*own) for own in TIED.values()):
        assert any(set(wanted.levels) <= set(levels) for levels in levels_of(True, wanted.layout))


def levels_of(tied: bool, layout: Layout) -> list[tuple[int, ...]]:
    """The combinations of levels that are searched for six blocks. If `tied`, the first and the last have a
    parameter in common.
    """
    blocks = tuple(
        Block(f"{k}", {(1, 1): Work(1, 1, 1, 0, 0, 0)}, {f"{k % 5 if tied else k}": 8}) for k in range(6)
    )
    return Space(Workload(blocks, 64, 2), problem(0).hardware, 8, 10**6).levels_of(layout)


@pytest.mark.parametrize("seed", MIXED)
def test_the_best_may_have_several_levels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: a search that gives all stages one level does not find it."""
    space = problem(seed)
    wanted, best = best_of_all(space), found(space, budget=10**6)
    assert best.estimate.time == wanted and len(set(best.best.levels)) > 1
    every = Space.levels_of
    monkeypatch.setattr(
        Space,
        "levels_of",
        lambda self, layout: [(level,) for any_of in every(self, layout) for level in any_of],
    )
    uniform = found(space, budget=10**6)
    assert uniform.estimate.time > best.estimate.time and len(set(uniform.best.levels)) == 1


def test_levels_are_told() -> None:
    mixed = candidate(*LEVELS["three of one"])
    assert "2 replicas at ZeRO 3+1+0 (2+1+1 stages) on adjacent devices" in described(mixed)
    assert "2 replicas at ZeRO 1 on adjacent" in described(mixed._replace(levels=(1,) * 4))


def test_a_choice_is_the_sum_of_its_halves() -> None:
    """Down to single ones, each of which is another candidate."""
    layout = Layout("one_f_one_b", 1, 3, 2, 1, 1, 4, True)
    left, ones = [everything(layout, (3, 1, 0))], []
    assert left[0].kinds == 10 * 10
    while left:
        choice = left.pop()
        halves = choice.halves()
        assert sum(half.kinds for half in halves) == choice.kinds or choice.kinds == 1
        left += halves
        ones += [] if halves else [choice]
    made = {choice.candidate((1, 2)) for choice in ones}
    assert len(made) == len(ones) == 100 and all(len(own) == 1 for choice in ones for own in choice.options())
    assert all(choice.least == choice.most for choice in ones)
    assert all(list(one.levels) == sorted(one.levels, reverse=True) for one in made)
