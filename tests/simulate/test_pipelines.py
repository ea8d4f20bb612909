"""Pipelines in virtual time: closed forms, cases computed by hand, and properties of every plan."""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import Any

import pytest
import torch

from lightning_piper.compiler import Compiled
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import TensorSpec
from lightning_piper.plan.instructions import (
    AllGatherInstruction,
    AllReduceInstruction,
    ReduceScatterInstruction,
)
from lightning_piper.simulate import Link, Network, Number, Simulation, simulate
from tests.groups import marked
from tests.models import CASES
from tests.plan.programs import place, split
from tests.simulate.programs import ROW, captured, compiled, pipeline

SCHEDULES = ["gpipe", "one_f_one_b"]
DURATIONS: list[tuple[Number, Number]] = [
    (1, 2),
    (Fraction(1, 3), Fraction(5, 7)),
    (Fraction(2), Fraction(1, 10)),
    (0, 1),
]


def run(program: Compiled, durations: Any = None, network: Network | None = None) -> Simulation:
    more = {} if durations is None else {"durations": durations}
    return simulate(program.dag, program.plans, network=network, **more)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", marked([1, 3, 8, 32], [1, 3, 8]))
def test_bubbles_are_those_of_the_closed_form(schedule: str, stages: int, microbatches: int) -> None:
    """With free communication each device idles for (PP - 1)(F + B)."""
    for f, b in DURATIONS:
        result = run(pipeline(schedule, stages, microbatches), {"F": f, "B": b})
        assert result.step_time == (microbatches + stages - 1) * (f + b)
        for device in range(stages):
            figures = result.devices[device]
            assert figures.busy == microbatches * (f + b)
            assert figures.bubble == figures.idle == (stages - 1) * (f + b)
            assert figures.exposed == 0
        assert result.bubble_fraction == Fraction(stages - 1, microbatches + stages - 1)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_activations_in_flight_are_those_of_the_closed_form(stages: int, microbatches: int) -> None:
    for schedule, kept in (
        ("gpipe", lambda stage: microbatches),
        ("one_f_one_b", lambda stage: min(stages - stage, microbatches)),
    ):
        result = run(pipeline(schedule, stages, microbatches))
        assert [result.devices[d].peak_in_flight for d in range(stages)] == [
            kept(stage) for stage in range(stages)
        ]


def test_floats_give_floats_and_fractions_stay_exact() -> None:
    program = pipeline("one_f_one_b", 4, 8)
    exact = run(program, {"F": Fraction(1, 3), "B": Fraction(2, 3)})
    assert exact.step_time == 11 and isinstance(exact.step_time, Fraction)
    rough = run(program, {"F": 1 / 3, "B": 2 / 3})
    assert rough.step_time == pytest.approx(11) and isinstance(rough.step_time, float)


def boxes(result: Simulation, device: int, *kinds: str) -> list[tuple[str, Number, Number]]:
    return [(s.label, s.start, s.end) for s in result.timeline if s.device == device and s.kind in kinds]


def test_latency_computed_by_hand() -> None:
    """GPipe, two stages, two microbatches, F=1, B=2, each message takes 1.

    stage 0  F0 F1 .  .  .  .  .  B0 B0 B1 B1
    stage 1  .  .  F0 F1 B0 B0 B1 B1 .  .  .
    time     0  1  2  3  4  5  6  7  8  9  10
    """
    result = run(pipeline("gpipe", 2, 2), network=Network(Link(latency=1)))
    assert boxes(result, 0, "F", "B") == [
        ("F[PP=0,MB=0]", 0, 1), ("F[PP=0,MB=1]", 1, 2), ("B[PP=0,MB=0]", 7, 9), ("B[PP=0,MB=1]", 9, 11),
    ]  # fmt: skip
    assert boxes(result, 1, "F", "B") == [
        ("F[PP=1,MB=0]", 2, 3), ("F[PP=1,MB=1]", 3, 4), ("B[PP=1,MB=0]", 4, 6), ("B[PP=1,MB=1]", 6, 8),
    ]  # fmt: skip
    assert boxes(result, 0, "send", "recv") == [
        ("send", 1, 2),
        ("send", 2, 3),
        ("recv", 6, 7),
        ("recv", 8, 9),
    ]
    assert boxes(result, 1, "send", "recv") == [
        ("recv", 1, 2),
        ("recv", 2, 3),
        ("send", 6, 7),
        ("send", 8, 9),
    ]
    assert result.step_time == 11
    # Stage 0 waits from 2 to 6 for the gradient to be computed, then one unit for it to come.
    assert (result.devices[0].bubble, result.devices[0].exposed) == (4, 1)
    # Stage 1 waits one unit for the first activation to be computed, one for it to come, and has nothing to
    # do after 8.
    assert (result.devices[1].bubble, result.devices[1].exposed) == (4, 1)
    assert result.devices[0].streams == {"compute": (6, 5), "metrics": (2, 9), "recv": (2, 9), "send": (2, 9)}


def test_bandwidth_computed_by_hand() -> None:
    """One channel is slow: each activation takes 16 / 8 = 2 units, the second waits for the first."""
    network = Network(channels={(0, 1): Link(bandwidth=8)})
    result = run(pipeline("gpipe", 2, 2), {"F": 1, "B": 2}, network)
    assert ROW == 16
    assert boxes(result, 1, "recv") == [("recv", 1, 3), ("recv", 3, 5)]
    assert boxes(result, 1, "F") == [("F[PP=1,MB=0]", 3, 4), ("F[PP=1,MB=1]", 5, 6)]
    assert boxes(result, 0, "recv") == [("recv", 8, 8), ("recv", 10, 10)]
    assert result.devices[1].exposed == 3 and result.step_time == 12


def test_a_measured_transfer_takes_its_own_time() -> None:
    program = pipeline("gpipe", 2, 2)
    first = next(i.node for i in program.plans[0].instructions if i.op == "send")
    result = run(program, {"F": 1, "B": 2, f"%{first}": 5}, Network(Link(latency=1)))
    assert boxes(result, 1, "recv") == [("recv", 1, 6), ("recv", 6, 7)]


def test_collectives_go_round_a_ring() -> None:
    """Four members, 80 bytes: three steps of 1 + 20 / 10 each, twice for an all-reduce."""
    network = Network(groups={(0, 1, 2, 3): Link(latency=1, bandwidth=10)})
    spec = TensorSpec((10,), torch.float64, (1,))
    bucket = Bucket(("weight",), (TensorSpec((2560,), torch.uint8, (1,)),), Mesh.flat(4), torch.uint8)
    about = {"node": 0, "label": "", "writes": (0,), "members": (0, 1, 2, 3), "communicator": "data"}
    assert network.collective(AllReduceInstruction(**about, tensors=(spec,))) == 18
    gather = AllGatherInstruction(**about, bucket=bucket, kept=False)
    scatter = ReduceScatterInstruction(**about, bucket=bucket)
    assert gather.nbytes == scatter.nbytes == 2560
    assert network.collective(gather) == network.collective(scatter) == 195
    assert network.collective(AllReduceInstruction(**{**about, "members": (0, 1)}, tensors=(spec,))) == 0


def test_sums_over_replicas_overlap_with_the_backward_pass() -> None:
    """The later stage's gradients travel while the first stage computes; the first stage's are waited for."""
    program = compiled("mlp", [{"op": "place", "filter": {}, "devices": [0, 1]}, *split(2),
                               {"op": "replicate", "filter": {}, "devices": [0, 1]}])  # fmt: skip
    result = run(program, network=Network(Link(latency=10), groups={(0, 1): Link(latency=1)}))
    assert [(s, e) for _, s, e in boxes(result, 0, "reduce")] == [(4, 6), (10, 12), (12, 14)]
    assert result.step_time == 14
    for figures in result.devices.values():
        assert (figures.busy, figures.exposed, figures.bubble) == (12, 2, 0)


def test_compute_streams_run_side_by_side() -> None:
    first, second = place(captured("mlp").step, 1)
    result = run(compiled("mlp", [first, {**second, "stream": "side"}, *split(2)]))
    assert boxes(result, 0, "F")[1:3] == [("F[PP=0,MB=1]", 1, 2), ("F[PP=1,MB=0]", 1, 2)]
    assert result.devices[0].busy == result.step_time == 9  # 12 units of work
    assert result.devices[0].streams == {"compute": (6, 3), "side": (6, 3)}


def test_bookkeeping_takes_the_time_it_is_given() -> None:
    """Three sums of the gradients of four microbatches, one of them not in place."""
    program = pipeline("gpipe", 2, 4)
    slow = run(program, {"F": 1, "B": 2, "add": Fraction(1, 2)})
    assert len(boxes(slow, 1, "add")) == 3
    assert slow.devices[1].busy == run(program).devices[1].busy + Fraction(3, 2)
    assert not boxes(run(program), 1, "add")


@pytest.mark.parametrize("name", CASES)
def test_work_follows_what_it_needs(name: str) -> None:
    """Whatever the times: nothing begins before what it reads is there, and a stream does one thing at
    once.
    """
    program = compiled(name, [*place(captured(name).step, 3), *split(3)])
    times = {chunk.id: Fraction(1 + chunk.id * 7 % 5, 3) for chunk in program.dag.of_type(Chunk)}
    result = run(program, lambda chunk: times[chunk.id], Network(Link(Fraction(1, 4), 100)))
    spans = {(s.device, s.node): s for s in result.timeline}
    last: dict[tuple[int, str], Number] = {}
    for span in result.timeline:
        if span.kind in "FB":
            assert span.end - span.start == times[span.node]
            assert span.start >= last.get((span.device, span.stream), 0)
            last[span.device, span.stream] = span.end
        for source in program.dag.graph.predecessors(span.node):
            made = spans.get((span.device, source))
            assert made is None or made.end <= span.start, f"{span} begins before {made} is done"
    assert result.step_time >= max(s.end for s in result.timeline)
    for figures in result.devices.values():
        assert (
            figures.busy + figures.idle == result.step_time == figures.busy + figures.bubble + figures.exposed
        )
        assert min(figures.bubble, figures.exposed) >= 0


def test_the_result_is_always_the_same() -> None:
    program = pipeline("one_f_one_b", 4, 8)
    network = Network(Link(0.1, 1e3))
    assert run(program, network=network) == run(program, network=network)
    assert run(program, network=network) != run(program)


def operations(program: Compiled) -> int:
    """How many functions of Python and C a simulation calls; the number does not depend on the machine's
    speed.
    """
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run(program, network=Network(Link(1)))
    finally:
        sys.setprofile(before)
    return count


def test_operations_grow_with_the_instructions() -> None:
    def per_instruction(stages: int, microbatches: int) -> float:
        program = pipeline("one_f_one_b", stages, microbatches)
        simulate(program.dag, program.plans)  # what passes need is found once for each code
        return operations(program) / sum(len(plan.instructions) for plan in program.plans.values())

    small = per_instruction(2, 8)
    assert per_instruction(8, 32) < 1.1 * small
    assert per_instruction(2, 128) < 1.1 * small
