"""R1, R2, R4 and R5: times of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.paper.setting import FORWARD, Setting, compiled, simulated
from benchmarks.paper.table import compared, gain, percent, show
from lightning_piper.compiler import Compiled
from lightning_piper.simulate import Network

MODELS = {
    "9B": Setting("9B", ranks=4, replicas=4, samples=4, experts=4),
    "1B": Setting("1B", ranks=8, replicas=4, samples=32, experts=4),
}
ALONE = 0.55  # the part of a card that one exchange reaches alone, in one row of R1, R4 and R6
# Assumptions that the tables change one at a time: name -> arguments of `seconds`.
CHANGED: dict[str, dict[str, Any]] = {
    "as calibrated": {},
    "the output layer runs at the full speed of an A100": {"head": True},
    "links across nodes reach a quarter of their bandwidth": {"links": 0.25},
    "one exchange alone reaches 55% of a card": {"alone": ALONE},
    "links take no time": {"links": None},
}


def seconds(
    setting: Setting,
    made: Compiled,
    links: float | None = 1,
    head: bool = False,
    alone: float = 1,
    packed: bool = False,
) -> float:
    """Return the time of a step.

    Args:
        setting: The setting.
        made: The compiled program.
        links: The part of their bandwidth that links across nodes reach. None: links take no time.
        head: Whether the output layer and the loss run at the full speed of an A100.
        alone: The part of a link across nodes that one exchange reaches alone.
        packed: Whether replicas share nodes of 8 GPUs.
    """
    network = Network() if links is None else setting.hardware(links, alone, packed).network(made.plans)
    return float(simulated(setting, made, network, head).end)


def r1(model: str) -> None:
    """Print how much faster interleaved 1F1B is than 1F1B."""
    setting = MODELS[model]
    plain, interleaved = (compiled(setting, name) for name in ("1F1B", "interleaved 1F1B"))

    def rows() -> Iterator[list[object]]:
        for name, changed in CHANGED.items():
            times = [seconds(setting, made, **changed) for made in (plain, interleaved)]
            yield [name, *times, *compared(gain(*times), 5)]

    show([f"{model}, assumption", "1F1B s", "interleaved s", "gain", "paper", "points"], rows())


def r2() -> None:
    """Print what ZeRO-1 costs against replicas that keep the whole optimizer state."""

    def rows() -> Iterator[list[object]]:
        for ranks, packed in ((1, False), (1, True), (8, False)):
            setting = Setting("1B", ranks, replicas=2, samples=8)
            made = [compiled(setting, "1F1B", zero) for zero in (0, 1)]
            times = [seconds(setting, each, packed=packed) for each in made]
            name = f"PP{ranks} x DP2" + (", both replicas on one node" if packed else "")
            yield [name, *times, *compared(gain(*times), 0)]

    show(["1B", "DP s", "ZeRO-1 s", "gain", "paper", "points"], rows())


def r4(model: str) -> None:
    """Print how much faster DualPipeV with overlapped passes is, and without the overlap."""
    setting = MODELS[model]
    other, paper = {"9B": ("interleaved 1F1B", 10), "1B": ("1F1B", 13)}[model]
    plain, overlapped = (compiled(setting, name) for name in (other, "DualPipeV"))

    def rows() -> Iterator[list[object]]:
        for name, changed in CHANGED.items():
            times = [seconds(setting, made, **changed) for made in (plain, overlapped)]
            yield [name, *times, *compared(gain(*times), paper)]
        times = [
            seconds(setting, plain),
            seconds(setting, compiled(setting, "DualPipeV", overlaps=False)),
        ]
        found = compared(gain(*times), 3) if model == "1B" else [percent(gain(*times)), "", ""]
        yield ["passes of an overlap group run in turn", *times, *found]

    show([f"{model}, assumption", f"{other} s", "DualPipeV s", "gain", "paper", "points"], rows())


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
