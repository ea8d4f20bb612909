"""The bubbles and activations of the builders' programs equal those of the published tables, as exact
fractions.

F, B and W are the durations of a forward pass, of a whole backward pass and of its half BW; F&B is the
duration of an F and a B that overlap. The first stage of a captured model sends no gradient to an earlier
stage: its BW is its whole backward pass, and takes as long as the whole backward pass of another stage.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import pytest

from lightning_piper.simulate import Number, Simulation, simulate
from tests.groups import marked
from tests.simulate.programs import pipeline

GRID: list[tuple[int, int]] = [
    (2, 2),
    (2, 4),
    (4, 2),
    (4, 4),
    (8, 2),
]  # the number of stages, and of microbatches for each stage
Times = tuple[Number, Number, Number]  # F, BI, W
EQUAL: list[Times] = [(1, 1, 1), (Fraction(2, 3),) * 3]
ALIKE: list[Times] = [*EQUAL, (3, 3, 1), (Fraction(5, 7), Fraction(5, 7), Fraction(1, 2))]  # F = BI >= W
SHORT: list[Times] = [
    *ALIKE,
    (3, 2, 1),
    (2, 3, 1),
    (2, 3, 2),
    (Fraction(4, 3), 2, Fraction(7, 6)),
]  # W <= min(F, BI)
ANY: list[Times] = [*SHORT, (1, 2, 3), (Fraction(1, 3), 2, Fraction(7, 5))]


@functools.cache
def run(
    schedule: str, stages: int, microbatches: int, times: Times, pair: Number | None = None
) -> Simulation:
    f, i, w = times
    program = pipeline(schedule, stages, microbatches)
    table: dict[str, Any] = {"F": f, "B": i + w, "BI": i, "BW": w}
    table |= (
        {"BW[PP=0]": i + w}
        if schedule in ("zero_bubble", "zb_h2", "zbv", "v_half", "v_min", "dualpipev", "dualpipe")
        else {}
    )
    return simulate(program.dag, program.plans, table | ({} if pair is None else {"F&B": pair}))


def bubbles(result: Simulation) -> list[Number]:
    assert all(figures.exposed == 0 for figures in result.devices.values()), "communication is free"
    return [figures.bubble for figures in result.devices.values()]


def activations(result: Simulation, device: int) -> int:
    """The largest number of activations that a device keeps at once; each lasts from the beginning of F to
    the end of the backward pass, for one stage and microbatch.
    """
    spans = [span for span in result.timeline if span.device == device and span.kind in ("F", "B", "BW")]
    changes = sorted((span.start, 1) if span.kind == "F" else (span.end, -1) for span in spans)
    return max(sum(change for _, change in changes[: k + 1]) for k in range(len(changes)))


@pytest.mark.parametrize(("stages", "each"), GRID)
def test_zero_bubble(stages: int, each: int) -> None:
    """(PP - 1)(F + B - 2W) if W <= min(F, BI). With a longer W, gradients wait behind it on their way."""
    for times in ANY:
        f, i, w = times
        if times not in SHORT:
            assert min(bubbles(run("zero_bubble", stages, each * stages, times))) > (stages - 1) * (f + i - w)
            continue
        assert (
            bubbles(run("zero_bubble", stages, each * stages, times))
            == [(stages - 1) * (f + i + w - 2 * w)] * stages
        )


@pytest.mark.parametrize(("stages", "each"), GRID)
def test_interleaved(stages: int, each: int) -> None:
    """(PP - 1)(F + B) / v, F and B those of the v stages of a device; for microbatches that are a multiple of
    the PP devices.
    """
    ranks, v = stages // 2, 2
    for times in ANY:
        whole = v * sum(times)
        expected = Fraction((ranks - 1) * whole) / v
        assert bubbles(run("interleaved_one_f_one_b", stages, each * stages, times)) == [expected] * ranks


@pytest.mark.parametrize(("stages", "each"), GRID)
def test_zbv(stages: int, each: int) -> None:
    """With F = BI = W, each device waits only until its first microbatch comes, or at the end: (PP / 2 - 1)
    F.
    """
    for times in EQUAL:
        assert bubbles(run("zbv", stages, each * stages, times)) == [(stages // 2 - 1) * times[0]] * (
            stages // 2
        )


@pytest.mark.parametrize(("stages", "each"), GRID)
def test_zb_h2(stages: int, each: int) -> None:
    """With F = BI = W and 2 PP - 1 microbatches or more, each device waits only at the begin and the end: (PP
    - 1) F, for the optimizer runs when all gradients are there. It keeps 2 PP - 1 microbatches.
    """
    count = each * stages
    for times in EQUAL:
        result = run("zb_h2", stages, count, times)
        assert bubbles(result) == [(stages - 1) * times[0]] * stages
        assert [activations(result, device) for device in result.devices] == [2 * stages - 1] * stages
        assert [figures.peak_in_flight for figures in result.devices.values()] == [2 * stages - 1] * stages
    assert min(bubbles(run("zb_h2", stages, 1, (1, 1, 1)))) > stages - 1, (
        "the control: too few microbatches to fill it"
    )
    for times in ((3, 3, 1), (3, 2, 1), (1, 2, 3)):
        assert (
            run("zb_h2", stages, count, times).step_time < run("zero_bubble", stages, count, times).step_time
        )


V_RANKS = [1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("ranks", marked(V_RANKS, V_RANKS[:4]))
@pytest.mark.parametrize("each", [2, 3])
def test_v_min(ranks: int, each: int) -> None:
    """With F = BI = W, activations are the paper's floor((R + 4) / 3) microbatches of both stages of a rank,
    and the bubble is its 2 / 3 of 1F1B's: (4R - 5) F, and one or two more if 3 divides R.
    """
    for times in EQUAL:
        result = run("v_min", 2 * ranks, each * ranks, times)
        more = {3: 1, 6: 2}.get(ranks, 0)
        expected = (4 * ranks - 5 + more) * times[0] if ranks > 1 else 0
        assert bubbles(result) == [expected] * ranks
        assert max(activations(result, device) for device in result.devices) == 2 * ((ranks + 4) // 3)
    assert ranks == 1 or expected < bubbles(run("one_f_one_b", ranks, each * ranks, (2 * times[0],) * 3))[0]


@pytest.mark.parametrize("ranks", marked(V_RANKS, V_RANKS[:4]))
@pytest.mark.parametrize("each", [2, 3])
def test_v_half(ranks: int, each: int) -> None:
    """With F = BI = W, activations are the paper's floor((R + 2) / 2) microbatches of both stages of a rank,
    and the bubble is at most half of 1F1B's 6 R F.
    """
    for times in EQUAL:
        result = run("v_half", 2 * ranks, each * ranks, times)
        assert max(bubbles(result)) == min(bubbles(result)) <= 3 * ranks * times[0]
        assert max(activations(result, device) for device in result.devices) == 2 * ((ranks + 2) // 2)


def test_v_schedules_keep_a_third_and_a_half() -> None:
    """Of what ZB-V keeps, which is what 1F1B keeps; of six ranks, so that floors cut off little. They pay in
    time.
    """
    kept, time = {}, {}
    for name in ("v_min", "v_half", "zbv"):
        result = run(name, 16, 24, (1, 1, 1))
        kept[name] = max(activations(result, device) for device in result.devices)
        time[name] = result.step_time
    assert kept == {"v_min": 8, "v_half": 10, "zbv": 16}
    assert time["v_min"] > time["v_half"] > time["zbv"]


@pytest.mark.parametrize(("stages", "each"), GRID)
@pytest.mark.parametrize("schedule", ["dualpipev", "dualpipe"])
def test_dualpipe(schedule: str, stages: int, each: int) -> None:
    """(PP / 2 - 1)(F&B + B - 3W) if F = BI >= W. All devices have it if F&B = F + B; if pairs save time,
    devices with more of them wait longer, and the formula is that of the device that waits longest.
    """
    if schedule == "dualpipev" and stages == 2:
        return
    for times in ALIKE:
        f, i, w = times
        whole = f + i + w
        for saved in (0, Fraction(1, 2) * min(f, i + w), min(f, i + w)):
            found = bubbles(run(schedule, stages, each * stages, times, whole - saved))
            expected = (Fraction(stages, 2) - 1) * (whole - saved + i + w - 3 * w)
            assert max(found) == expected
            assert saved or set(found) == {expected}


@pytest.mark.parametrize(("stages", "each"), GRID)
def test_activations(stages: int, each: int) -> None:
    """Of stages, per device: 1F1B PP - rank, ZB1P PP, ZB-V PP, DualPipe and DualPipeV PP + 1, if F = BI =
    W.
    """
    count = each * stages
    half = stages // 2
    expected = {
        "one_f_one_b": [stages - rank for rank in range(stages)],
        "zero_bubble": [stages] * stages,
        "interleaved_one_f_one_b": [half + 2 * (half - 1 - rank) + 1 for rank in range(half)],
        "zbv": [stages] * half,
        "dualpipev": [stages + 1] * half,
        "dualpipe": [stages + 1] * stages,
        "gpipe": [count] * stages,
    }
    for schedule, wanted in expected.items():
        result = run(schedule, stages, count, (1, 1, 1))
        assert [activations(result, device) for device in result.devices] == wanted, schedule
