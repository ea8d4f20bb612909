"""A candidate as a program, and as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper.common.units import counted
from lightning_piper.search import Candidate, Layout
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.program_writer import shown, write
from lightning_piper.search.proposal import _params
from lightning_piper.search.report import described
from lightning_piper.simulate import simulate
from tests.search.nets import GPT, Module, tokens


def one_stage(
    schedule: str, microbatches: int, replicas: int = 1, again: int = 0, away: int = 0
) -> Candidate:
    return Candidate(
        Layout(schedule, 1, 1, replicas, 1, 1, microbatches, True), (replicas - 1,), again, away, ()
    )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", 4), ("one_f_one_b", 1)])
def test_one_stage_keeps_as_many_microbatches_as_its_schedule(
    schedule: str, kept: int, replicas: int
) -> None:
    """Though it needs no tag, and nobody waits for it."""
    torch.manual_seed(0)
    module, batch = Module(GPT(2, False)).double(), tokens(8)
    written = write(one_stage(schedule, 4, replicas), [["net"]])
    assert not written.stages
    compiled = piper.compile(module, batch, written.directives)
    devices = simulate(compiled.dag, compiled.plans).devices.values()
    assert [device.peak_in_flight for device in devices] == [kept] * replicas
    assert piper.verify(module, batch, written.directives).verdict == "verified"


def test_parameters_are_named_in_the_order_of_the_model() -> None:
    """Also those of layers for which another one stands."""
    module = Module(GPT(5))
    names = list(_params(blocks_of(module, tokens(4)), 2) or {})
    assert len(names) > 20 and names == [name for name, _ in module.named_parameters() if name in names]


TWO = Layout("zbv", 2, 2, 1, 1, 1, 1, True)
SAID = {
    "one device": one_stage("gpipe", 1),
    "one device; 4 microbatches, all forward passes first": one_stage("gpipe", 4),
    "2 replicas at ZeRO 1": one_stage("gpipe", 1, 2),
    "2 replicas at ZeRO 1; 4 microbatches, alternating forward and backward passes; recomputed": one_stage(
        "one_f_one_b", 4, 2, again=1
    ),
    "one device; offloaded": one_stage("gpipe", 1, away=1),
    "zbv, 4 stages on 2 ranks, 1 microbatch; the first stage offloads": Candidate(
        TWO, (0,) * 4, 0, 1, (1, 2, 3)
    ),
    "zbv, 4 stages on 2 ranks, 1 microbatch; the first stage recomputes; the next stage offloads": Candidate(
        TWO, (0,) * 4, 1, 1, (1, 2, 3)
    ),
    "zbv, 4 stages on 2 ranks, 8 microbatches; the first 2 stages recompute; the next 2 stages "
    "offload": Candidate(TWO._replace(microbatches=8), (0,) * 4, 2, 2, (1, 2, 3)),
}


@pytest.mark.parametrize("said", SAID)
def test_candidates_are_told(said: str) -> None:
    assert described(SAID[said]) == said


def test_blocks_are_told_where_they_are_divided() -> None:
    assert described(Candidate(TWO, (0,) * 4, 0, 0, (1, 3, 4)), 9).endswith("; blocks 1+2+1+5")
    assert "blocks" not in described(one_stage("gpipe", 1), 9)
    assert (counted(1, "program"), counted(2612532, "program")) == ("1 program", "2,612,532 programs")


@pytest.mark.parametrize(
    "directive",
    [
        piper.Place(filter={"PP": 0}, devices=[0]),
        piper.ShardExperts(devices=[0, 1]),
        piper.ShardWeights(params={"a": 0}, devices=[0, 1]),
        piper.ShardSequences(devices=[0, 1]),
    ],
    ids=lambda directive: directive.op,
)
def test_a_printed_directive_is_python(directive: Any) -> None:
    assert eval(shown(directive)) == directive
