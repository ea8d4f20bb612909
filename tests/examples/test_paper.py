"""The parts of the page of the paper's claims: calibration, limits of memory, and what counts as overlap."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.0")

from benchmarks.paper.contention import slowdown
from benchmarks.paper.lines import BUILDERS, length
from benchmarks.paper.memory import Assumption, Held, first, held, peaks
from benchmarks.paper.one_stream import Model, issued, step
from benchmarks.paper.setting import FORWARD, Setting, captured, compiled, durations, in_turn, simulated
from lightning_piper import Order, schedules
from lightning_piper.schedules.interleaving import interleaved_rows
from lightning_piper.schedules.pipeline import one_f_one_b_rows
from lightning_piper.simulate.engine import Span, Trace
from tests.schedules.torch_schedules import with_messages

TINY = Setting("tiny", ranks=2, replicas=2, samples=1, experts=2)


@pytest.mark.parametrize("each", [1, 2])
def test_a_middle_stage_takes_the_calibrated_time(each: int) -> None:
    """Also if each rank has two stages, which together have the layers of one stage of 1F1B."""
    stages = each * TINY.ranks
    regions = captured(TINY, stages).at(TINY.samples).regions
    middle = [r.index for r in regions if r.tags["PP"] // each == TINY.ranks // 2]
    full, fast = durations(TINY, stages), durations(TINY, stages, head=True)
    if each == 2:
        # The last rank of the tiny model has the middle stage and the output layer.
        assert sum(fast[r, "F"] for r in middle) < sum(full[r, "F"] for r in middle)
    assert sum(full[r, "F"] for r in middle) == pytest.approx(FORWARD)


@pytest.mark.long
def test_links_that_take_longer_lengthen_the_step() -> None:
    made = compiled(TINY, "DualPipeV")
    ends = [
        float(simulated(TINY, made, TINY.hardware(share).network(made.plans)).end) for share in (1, 0.001)
    ]
    assert ends[0] < ends[1]


def test_passes_in_turn_are_the_same_passes_without_overlap() -> None:
    orders = [each for each in schedules.dualpipev(4, 4) if isinstance(each, Order)]
    for order in orders:
        flat = in_turn(order).filters
        passes = [one for g in order.filters for one in (g if isinstance(g, list) else [g])]
        assert flat == passes
    assert any(isinstance(group, list) for order in orders for group in order.filters)


def test_the_first_microbatch_that_does_not_fit() -> None:
    assert [first(10e9, 1e9, memory) for memory in (40e9, 80e9)] == [31, 71]  # 30 and 70 fit exactly
    assert first(41e9, 1e9, 40e9) == 1


def test_each_assumption_about_memory_changes_its_limits_only() -> None:
    """A device with 4 GB of parameters in a pipeline of one rank, with two microbatches and two replicas."""
    gb = 10**9
    setting = Setting("tiny", ranks=1, replicas=2, samples=1)
    plans = {z: [Held(4 * gb, g * gb, w * gb, gb)] for z, g, w in ((1, 4, 0), (2, 2, 0), (3, 2, 1))}
    each = {"all": [1.0 * gb], "min-cut": [0.5 * gb]}

    def limits(*args: object, **kwargs: object) -> list[int]:
        return Assumption("", *args, **kwargs).limits(setting, plans, each)  # type: ignore[arg-type]

    # ZeRO-1: 4 of parameters, 4 of gradients, 4 of states. ZeRO-3: 2 + 2 + 4 + 1, and the other system 2 + 4 + 4 + 4.
    assert limits() == [29, 31, 29, 32, 27]
    assert limits("min-cut") == [57, 61, 29, 63, 27]
    assert limits(memory=30) == [19, 21, 19, 22, 17]
    assert limits(apart=True) == [25, 31, 25, 32, 23]


@pytest.mark.long
def test_growing_memory_is_proportional_to_the_samples() -> None:
    for zero in (1, 3):
        one, two = (held(compiled(TINY._replace(samples=n), "1F1B", zero), range(2)) for n in (2, 4))
        for small, large in zip(one, two, strict=True):
            assert (large.gradients, large.gathered) == (small.gradients, small.gathered)
            assert large.growing == pytest.approx(2 * small.growing, rel=0.01)


def test_exchanges_beside_a_sum_are_told_apart() -> None:
    def span(kind: str, start: float, end: float, device: int = 0) -> Span:
        return Span(device, "reduce" if kind == "reduce" else "alltoall", start, end, 0, "", kind, None)

    spans = [
        span("reduce", 10, 20),
        span("all_to_all", 0, 1),
        span("all_to_all", 12, 14),
        span("all_to_all", 9, 12),  # a part of it is beside the sum
        span("all_to_all", 12, 15, device=1),  # the sum is on another device
        span("all_to_all", 30, 30.01),  # counts
    ]
    assert slowdown(Trace(spans=spans)) == (2, 2, 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_passes_and_messages_are_issued_in_torchs_order(ranks: int) -> None:
    rows = interleaved_rows(ranks, 2 * ranks, 2)
    made: list[list[str]] = [[] for _ in range(ranks)]
    for (stage, kind, microbatch), rank, receiver in issued(rows, 2 * ranks):
        made[rank].append(f"{stage}{kind}{microbatch}")
        if receiver != rank:
            made[rank].append(f"{stage}SEND_{kind}{microbatch}")
            made[receiver].append(f"{stage + (1 if kind == 'F' else -1)}RECV_{kind}{microbatch}")
    flat = [[action for group in row for action in group] for row in rows]
    assert made == with_messages(flat, 2 * ranks)


def test_one_stream_for_messages_delays_interleaved_passes_only() -> None:
    rows = one_f_one_b_rows(4, 8)
    assert step(rows, 4, Model(4), False) == step(rows, 4, Model(4), True) == (8 + 3) * 3
    rows = interleaved_rows(4, 8, 2)
    assert step(rows, 8, Model(4), False) == 8 * 3 + 3 * 3 / 2  # half of the bubble
    assert step(rows, 8, Model(4), True) == 33.5
    # Two ranks, one microbatch: two passes of 1 and 2 on each rank, and two messages.
    assert step(one_f_one_b_rows(2, 1), 2, Model(2, message=10), True) == 3 + 3 + 20


def test_programs_are_no_longer_than_the_papers() -> None:
    assert all(0 < sum(map(length, functions)) <= paper for functions, paper in BUILDERS.values())
    assert length(length) == 10  # without its docstring


def test_memory_grows_by_two_stage_bytes_with_a_window_of_gathers() -> None:
    """Parameters, gradients and two states of Adam, half of each. Plain replicas need twice as much."""
    two, four, eight = peaks(3)
    assert (eight - four) / 4 == 2 and (four - two) / 2 <= 2.01
    two, four, eight = peaks(0)
    assert (eight - four) / 4 == (four - two) / 2 == 4
