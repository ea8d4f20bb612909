"""R6: how much longer exchanges of tokens take while the replicas sum gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.paper.setting import compiled, simulated
from benchmarks.paper.step_times import ALONE, MODELS
from benchmarks.paper.table import show
from lightning_piper.simulate.engine import Span, Trace

PAPER = 1.46
# Name of a row -> the part of a card that one exchange reaches alone, and the arguments of `compiled`.
WAYS: dict[str, tuple[float, dict[str, Any]]] = {
    "sums beside the exchanges": (1, {}),
    "one exchange alone reaches 50% of a card": (0.5, {}),
    "one exchange alone reaches 55% of a card": (ALONE, {}),
    "one stream for both": (1, {"stream": "reduce"}),
    "sums of 1 GB": (1, {"bucket": 1000}),
}


def exchanges(trace: Trace) -> Iterator[tuple[Span, bool]]:
    """Yield the exchanges of tokens of each device, and whether a sum of the device runs during the whole
    exchange. An exchange does not count if a sum runs during a part of it."""
    sums: dict[int, list[Span]] = {}
    for span in trace.spans:
        if span.kind in ("reduce", "reduce_scatter") and span.stream == "reduce":
            sums.setdefault(span.device, []).append(span)
    for span in trace.spans:
        if span.kind == "all_to_all":
            own = sums.get(span.device, [])
            if any(each.start <= span.start and span.end <= each.end for each in own):
                yield span, True
            elif not any(each.start < span.end and span.start < each.end for each in own):
                yield span, False


def slowdown(trace: Trace) -> tuple[float, float, int]:
    """Return the mean seconds of an exchange without a sum at the same time, and with one, and how many
    exchanges have one. Exchanges of counts are too short to matter, and do not count."""
    found = [(float(span.end - span.start), during) for span, during in exchanges(trace)]
    longest = max(time for time, _ in found)
    found = [(time, during) for time, during in found if time > longest / 10]
    means = []
    for kind in (False, True):
        times = [time for time, during in found if during is kind]
        means.append(sum(times) / len(times) if times else 0.0)
    return means[0], means[1], sum(during for _, during in found)


def r6(model: str) -> None:
    """Print how much longer exchanges of tokens take while the replicas sum gradients, and what helps."""
    setting = MODELS[model]

    def rows() -> Iterator[list[object]]:
        for name, (links, options) in WAYS.items():
            made = compiled(setting, "interleaved 1F1B", zero=0, **options)
            trace = simulated(setting, made, setting.hardware(alone=links).network(made.plans))
            alone, during, count = slowdown(trace)
            ratio = f"{during / alone:.2f}" if during else ""
            yield [name, 1e3 * alone, 1e3 * during if count else "", count, ratio, PAPER, float(trace.end)]

    show([model, "alone ms", "during a sum ms", "exchanges", "ratio", "paper", "step s"], rows())
