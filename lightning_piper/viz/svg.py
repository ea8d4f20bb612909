"""A simulated step as an SVG chart. Rows are the streams of the devices, and time runs to the right."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from lightning_piper.common.limits import shown
from lightning_piper.errors import PiperError
from lightning_piper.simulate import Simulation, Span
from lightning_piper.viz.boxes import Row, indices, is_chunk, rows_of
from lightning_piper.viz.colors import color, rank

_ROW, _GAP, _DEVICE_GAP, _TOP, _BOTTOM, _RIGHT = 24, 4, 10, 40, 34, 20  # pixels
_LETTER = 6.2  # width of a letter in pixels, in the font below
_BOX = 26  # width of the shortest chunk in pixels, unless the chart would get too wide
_WIDTHS = (800, 12_000)  # smallest and largest width of a row in pixels
# Characters that XML does not allow.
_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.r text{text-anchor:middle}.r rect{stroke:#666;stroke-width:.5}"
    ".a line{stroke:#ddd}.a text{text-anchor:middle}"
)


def svg_chart(simulation: Simulation) -> str:
    """Return the text of an SVG file.

    Each span that takes time is a box. The box of a chunk shows the indices of the chunk's tags, such as
    stage and microbatch, if it is wide enough. The tooltip of each box shows its name, times and node. The
    color of a box shows the pass or the operation.

    Raises:
        PiperError: `simulation` is not a `Simulation`.
    """
    if not isinstance(simulation, Simulation):
        raise PiperError(
            f"svg_chart: {shown(simulation)} is not a Simulation. Give the result of simulate [PIPER-A001]"
        )
    rows = rows_of(simulation)
    titles = [f"device {device}  {stream}" for device, stream in rows]
    left = 16 + math.ceil(_LETTER * max((len(title) for title in titles), default=0))
    width = _width(simulation, rows)
    step = float(simulation.step_time)
    scale = width / step if step else 0.0
    tops = _tops(rows)
    bottom = (tops[-1] if tops else _TOP) + _ROW + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + _RIGHT}" '
        f'height="{bottom + _BOTTOM}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_legend(simulation, rows, left),
        *_axis(step, scale, left, bottom),
    ]
    for spans, title, y in zip(rows.values(), titles, tops, strict=True):
        parts.append(f'<text x="8" y="{y + 16}">{_clean(title)}</text><g class="r">')
        lanes = _lanes(spans)
        height = _ROW / (max(lanes) + 1)
        parts += [
            _box(span, left, y + lane * height, height, scale)
            for span, lane in zip(spans, lanes, strict=True)
        ]
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


def _tops(rows: Iterable[Row]) -> list[int]:
    """Return the y coordinate of each row's upper edge in pixels, with larger gaps between devices."""
    tops: list[int] = []
    before = None
    for device, _ in rows:
        tops.append(tops[-1] + _ROW + (_GAP if device == before else _DEVICE_GAP) if tops else _TOP)
        before = device
    return tops


def _width(simulation: Simulation, rows: dict[Row, list[Span]]) -> int:
    """Return the width of a row in pixels, which makes the shortest chunk `_BOX` wide, within the limits of
    `_WIDTHS`. Without chunks, the width is the smallest."""
    shortest = min(
        (span.end - span.start for spans in rows.values() for span in spans if is_chunk(span)), default=0
    )
    if not shortest:
        return _WIDTHS[0]
    return min(max(math.ceil(_BOX * float(simulation.step_time / shortest)), _WIDTHS[0]), _WIDTHS[1])


def _box(span: Span, left: float, y: float, height: float, scale: float) -> str:
    """Return the SVG element of a span: a box with a tooltip. The box of a chunk also has a text if the box is
    wide enough and has the full height of a row.

    Args:
        left: the x coordinate of time 0.
        y: the y coordinate of the box.
        scale: pixels for each unit of time.
    """
    x, width = left + float(span.start) * scale, float(span.end - span.start) * scale
    by = "" if span.origin is None else f", directive {span.origin}"
    about = f"{span.kind} {span.label}" if not is_chunk(span) and span.label != span.kind else span.label
    times = f"{float(span.start):.6g} to {float(span.end):.6g} ({float(span.end - span.start):.6g})"
    title = f"{about} on device {span.device}, stream {span.stream}: {times}, node %{span.node}{by}"
    box = (
        f'<g><title>{_clean(title)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}" fill="{color(span.kind)}"/>'
    )
    text = ".".join(indices(span)) if is_chunk(span) else ""
    if text and len(text) * _LETTER < width and height == _ROW:
        box += f'<text x="{x + width / 2:.2f}" y="{y + 16:.2f}">{_clean(text)}</text>'
    return box + "</g>"


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Return the lane of each span, from 0 on: the first one that is free when the span starts.

    The spans of a row are in one lane unless they overlap. Messages of several channels may overlap on one
    stream.
    """
    free: list[object] = []
    lanes = []
    for span in spans:  # sorted by start
        lane = next((k for k, end in enumerate(free) if end <= span.start), len(free))  # type: ignore[operator]
        free[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes


def _legend(simulation: Simulation, rows: dict[Row, list[Span]], left: int) -> list[str]:
    """Return the SVG elements of the legend: a color for each kind of span in the rows, and the step time,
    the share of the bubble and the share of exposed communication."""
    kinds = sorted({span.kind for spans in rows.values() for span in spans}, key=rank)
    parts, x = [], float(left)
    for kind in kinds:
        parts.append(
            f'<rect x="{x:.1f}" y="10" width="14" height="14" fill="{color(kind)}" stroke="#666" '
            'stroke-width=".5"/>'
        )
        parts.append(f'<text x="{x + 19:.1f}" y="21">{_clean(kind)}</text>')
        x += 36 + _LETTER * len(kind)
    shares = (
        f"bubble {float(simulation.bubble_fraction):.1%}, exposed communication "
        f"{float(simulation.exposed_fraction):.1%}"
    )
    parts.append(f'<text x="{x:.1f}" y="21">step time {float(simulation.step_time):.6g}, {shares}</text>')
    return parts


def _axis(step: float, scale: float, left: int, bottom: int) -> list[str]:
    parts = ['<g class="a">']
    for tick in _ticks(step, step * scale / 80):
        x = left + tick * scale
        parts.append(f'<line x1="{x:.2f}" y1="{_TOP}" x2="{x:.2f}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x:.2f}" y="{bottom + 18}">{tick:.6g}</text>')
    return [*parts, "</g>"]


def _ticks(step: float, most: float) -> list[float]:
    """Return the times of the axis's marks: equally spaced, from 0 up to `step`, about `most` of them or
    fewer. Their distance is 1, 2 or 5 times a power of ten. If `step` is 0, return `[0.0]`."""
    if not step:
        return [0.0]
    least = step / max(most, 1)
    power = 10.0 ** math.floor(math.log10(least))
    unit = next(k * power for k in (1, 2, 5, 10) if k * power >= least * 0.999)
    return [k * unit for k in range(int(step / unit * 1.000001) + 1)]


def _clean(text: str) -> str:
    """Return text for an XML document, with `?` for each character that XML does not allow."""
    return escape(_FORBIDDEN.sub("?", text))
