"""A simulated step as text, like the charts in pipeline papers: one row for each device, or for each of its
streams with chunks, and time runs to the right.
"""

from __future__ import annotations

import math

from lightning_piper.common.limits import WIDTH, integer, shown
from lightning_piper.errors import PiperError
from lightning_piper.simulate import Number, Simulation
from lightning_piper.viz.boxes import distinct_names, is_chunk, rows_of

_IDLE, _REST = ".", "-"  # an idle column; the columns of a box after its name


def text_chart(simulation: Simulation, width: int = 120) -> str:
    """Return a chart of the chunks by device, and by stream if a device has several streams with chunks.

    `F3` starts a forward pass of microbatch 3, `-` continues it, and `.` is idle. A box that is too narrow for
    its name shows only the pass, cut to the box. A name leaves out the index of a tag if all chunks of the row
    have the same index. If no chunk takes any time, the chart is a sentence that says so.

    Args:
        simulation: The simulation to show.
        width: The largest width of the chart in characters, without the names of the rows (default: 120).

    Raises:
        PiperError: `simulation` is not a `Simulation`, or `width` is not an integer from 1 to
            `common.limits.WIDTH`.
    """
    if not isinstance(simulation, Simulation):
        raise PiperError(
            f"text_chart: {shown(simulation)} is not a Simulation. Give the result of simulate [PIPER-A001]"
        )
    if not 0 < (integer(width) or 0) <= WIDTH:
        raise PiperError(
            f"text_chart(width={shown(width)}) is not usable. Give a number of characters from 1 to {WIDTH} [PIPER-A001]"
        )
    rows = {
        row: chunks
        for row, spans in rows_of(simulation).items()
        if (chunks := [s for s in spans if is_chunk(s)])
    }
    if not rows:
        return "no chunk takes any time"
    shortest = min(span.end - span.start for spans in rows.values() for span in spans)
    # If the width allows, use a whole number of characters (at most 6) for the shortest chunk, so that chunks
    # of equal time have boxes of equal width.
    per_chunk = min(int(width * shortest / simulation.step_time), 6)
    scale = per_chunk / shortest if per_chunk else width / simulation.step_time
    columns = max(1, round(simulation.step_time * scale))
    several = len({device for device, _ in rows}) < len(rows)
    titles = [f"{device} {stream}" if several else str(device) for device, stream in rows]
    margin = max(len("device"), *(len(title) for title in titles))
    lines = [
        "device".ljust(margin)
        + f"  one column is {float(1 / scale):.4g}, the step takes {float(simulation.step_time):.6g}"
    ]
    for title, spans in zip(titles, rows.values(), strict=True):
        line = [_IDLE] * columns
        for span, name in zip(spans, distinct_names(spans), strict=True):
            start = min(_column(span.start * scale), columns - 1)
            room = max(1, _column(span.end * scale) - start)
            line[start : start + room] = (name if len(name) <= room else span.kind[:room]).ljust(room, _REST)
        lines.append(title.ljust(margin) + "  " + "".join(line[:columns]))
    return "\n".join(lines)


def _column(time: Number) -> int:
    """Return the column in which a time lies. The offset keeps a time just below a column, because of float
    rounding, in this column.

    Args:
        time: the time in columns.
    """
    return math.floor(time + 1e-6)
