"""A simulated step as text, like the pictures in papers on pipelines: a row for each device, time runs to the right."""

from __future__ import annotations

import math

from lightning_piper.errors import PiperError
from lightning_piper.limits import WIDTH, shown
from lightning_piper.simulate import Number, Simulation
from lightning_piper.viz.boxes import distinct_names, is_chunk, rows_of

_IDLE, _REST = ".", "-"


def text_chart(simulation: Simulation, width: int = 120) -> str:
    """Chunks by device (and stream, where a device has several compute streams).

    `F3` begins a forward pass of microbatch 3, `-` goes on with it, `.` is idle; in a box that is too narrow, the pass alone is
    shown. Tag indices that are the same in a whole row are left out.

    Args:
        simulation: what to show.
        width: of the chart in characters, without the names of the rows.

    Raises:
        PiperError: this is no simulation, or no width.
    """
    if not isinstance(simulation, Simulation):
        raise PiperError(f"text_chart: {shown(simulation)} is no Simulation; give what simulate returned")
    if not isinstance(width, int) or not 0 < width <= WIDTH:
        raise PiperError(f"text_chart(width={shown(width)}): give a number of characters from 1 to {WIDTH}")
    rows = {row: chunks for row, spans in rows_of(simulation).items() if (chunks := [s for s in spans if is_chunk(s)])}
    if not rows:
        return "no chunk takes any time"
    shortest = min(span.end - span.start for spans in rows.values() for span in spans)
    # Whole characters for the shortest chunk, if they fit: then equal work looks equal.
    per_chunk = min(int(width * shortest / simulation.step_time), 6)
    scale = per_chunk / shortest if per_chunk else width / simulation.step_time
    columns = max(1, round(simulation.step_time * scale))
    several = len({device for device, _ in rows}) < len(rows)
    titles = [f"{device} {stream}" if several else str(device) for device, stream in rows]
    margin = max(len("device"), *(len(title) for title in titles))
    lines = ["device".ljust(margin) + f"  one column is {float(1 / scale):.4g}, the step takes {float(simulation.step_time):.6g}"]
    for title, spans in zip(titles, rows.values(), strict=True):
        line = [_IDLE] * columns
        for span, name in zip(spans, distinct_names(spans), strict=True):
            start = min(_column(span.start * scale), columns - 1)
            room = max(1, _column(span.end * scale) - start)
            line[start : start + room] = (name if len(name) <= room else span.kind[:room]).ljust(room, _REST)
        lines.append(title.ljust(margin) + "  " + "".join(line[:columns]))
    return "\n".join(lines)


def _column(time: Number) -> int:
    """Rounded down, so that work of equal length looks equal; floats a hair below a column's edge are on it."""
    return math.floor(time + 1e-6)
