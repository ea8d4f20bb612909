"""A step as an image for TensorBoard. Rows are the streams of the devices, and time runs to the right."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lightning_piper.simulate import Simulation
from lightning_piper.viz.boxes import indices, is_chunk, rows_of
from lightning_piper.viz.colors import color

ROW, GAP, TOP, LEFT = 22, 4, 26, 130  # pixels


def picture(simulation: Simulation, title: str, width: int = 1600) -> np.ndarray:
    """Return an image of height x `width` x 3, uint8. If a box is wide enough, it shows the indices of its
    chunk's tags.
    """
    rows = rows_of(simulation)
    font = ImageFont.load_default()
    image = Image.new("RGB", (width, TOP + len(rows) * (ROW + GAP) + GAP), "white")
    draw = ImageDraw.Draw(image)
    shares = (
        f"bubble {float(simulation.bubble_fraction):.1%}, exposed {float(simulation.exposed_fraction):.1%}"
    )
    draw.text((8, 6), f"{title}: {float(simulation.step_time):.6g} s, {shares}", "#222222", font)
    scale = (width - LEFT - 8) / (float(simulation.step_time) or 1.0)
    for k, ((device, stream), spans) in enumerate(rows.items()):
        y = TOP + k * (ROW + GAP)
        draw.text((8, y + 5), f"device {device} {stream}", "#222222", font)
        for span in spans:
            x, end = LEFT + float(span.start) * scale, LEFT + float(span.end) * scale
            draw.rectangle(
                (x, y, max(end, x + 1), y + ROW), color(span.kind), "#666666" if end - x > 4 else None
            )
            text = ".".join(indices(span)) if is_chunk(span) else ""
            if text and draw.textlength(text, font) < end - x - 4:
                draw.text((x + 3, y + 5), text, "#222222", font)
    return np.asarray(image)
