"""R1, R2, R4 and R5: times of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.paper.setting import FORWARD, Setting, compiled, simulated
from benchmarks.paper.table import compared, gain, percent, show
from lightning_piper.compiler import Compiled
from lightning_piper.simulate import Network

LARGE = Setting("9B", ranks=4, replicas=4, samples=4, experts=4)
SMALL = Setting("1B", ranks=8, replicas=4, samples=32, experts=4)
# Assumptions that the tables change one at a time: name -> arguments of `seconds`.
CHANGED: dict[str, dict[str, Any]] = {
    "as calibrated": {},
    "the output layer runs at the full speed of an A100": {"head": True},
    "links across nodes reach a quarter of their bandwidth": {"links": 0.25},
    "links take no time": {"links": None},
}


def seconds(
    setting: Setting,
    made: Compiled,
    links: float | None = 1,
    head: bool = False,
    one_stream: bool = False,
) -> float:
    """Return the time of a step.

    Args:
        setting: The setting.
        made: The compiled program.
        links: The part of their bandwidth that links across nodes reach. None: links take no time.
        head: Whether the output layer and the loss run at the full speed of an A100.
        one_stream: Whether a device sends and receives on one stream.
    """
    network = Network() if links is None else setting.hardware(links).network(made.plans)
    if one_stream:
        network = dataclasses.replace(network, communicators={"send": "pair", "recv": "pair"})
    return float(simulated(setting, made, network, head).end)


def r1() -> None:
    """Print how much faster interleaved 1F1B is than 1F1B, and what one stream for messages costs."""

    def rows() -> Iterator[list[object]]:
        for setting in (LARGE, SMALL):
            plain, interleaved = (compiled(setting, name) for name in ("1F1B", "interleaved 1F1B"))
            for name, changed in CHANGED.items():
                times = [seconds(setting, made, **changed) for made in (plain, interleaved)]
                yield [setting.size, name, *times, *compared(gain(*times), 5)]
            times = [seconds(setting, made, one_stream=True) for made in (plain, interleaved)]
            yield [setting.size, "one stream for sends and receives", *times, *compared(gain(*times), -14)]

    show(["model", "assumption", "1F1B s", "interleaved s", "gain", "paper", "points"], rows())


def r2() -> None:
    """Print what ZeRO-1 costs against replicas that keep the whole optimizer state."""

    def rows() -> Iterator[list[object]]:
        for ranks in (1, 8):
            setting = Setting("1B", ranks, replicas=2, samples=8)
            whole, sharded = (seconds(setting, compiled(setting, "1F1B", zero)) for zero in (0, 1))
            yield [f"PP{ranks} x DP2", whole, sharded, *compared(gain(whole, sharded), 0)]

    show(["1B", "DP s", "ZeRO-1 s", "gain", "paper", "points"], rows())


def r4() -> None:
    """Print how much faster DualPipeV with overlapped passes is, and without the overlap."""

    def rows() -> Iterator[list[object]]:
        for setting, other, paper in ((LARGE, "interleaved 1F1B", 10), (SMALL, "1F1B", 13)):
            plain, overlapped = (compiled(setting, name) for name in (other, "DualPipeV"))
            for name, changed in CHANGED.items():
                times = [seconds(setting, made, **changed) for made in (plain, overlapped)]
                yield [setting.size, name, other, *times, *compared(gain(*times), paper)]
            times = [
                seconds(setting, plain),
                seconds(setting, compiled(setting, "DualPipeV", overlaps=False)),
            ]
            found = compared(gain(*times), 3) if paper == 13 else [percent(gain(*times)), "", ""]
            yield [setting.size, "passes of an overlap group run in turn", other, *times, *found]

    show(["model", "assumption", "against", "its s", "DualPipeV s", "gain", "paper", "points"], rows())


def r5() -> None:
    """Print the throughput of 1F1B as the cluster grows."""

    def rows() -> Iterator[list[object]]:
        first = 0.0
        for ranks in (4, 8):
            for replicas in (1, 2, 4):
                # With twice as many ranks, a stage has half of the layers.
                setting = Setting("9B", ranks, replicas, samples=4, forward=FORWARD * 4 / ranks)
                time = seconds(setting, compiled(setting, "1F1B", zero=0))
                rate = setting.replicas * setting.microbatches * setting.samples / time
                first = first or rate / ranks
                share = rate / (ranks * replicas) / first
                yield [f"PP{ranks} x DP{replicas}", ranks * replicas, time, rate, f"{share:.0%}"]

    show(["9B", "GPUs", "step s", "sequences/s", "of linear"], rows())
