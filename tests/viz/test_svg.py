"""The SVG chart: valid XML, boxes where the simulation says, text that cannot break it."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

from lightning_piper.simulate import Link, Network, Simulation, simulate
from lightning_piper.viz import svg_chart
from lightning_piper.viz.colors import color
from tests.simulate.programs import pipeline

NS = "{http://www.w3.org/2000/svg}"


def result(microbatches: int = 4, stages: int = 3, latency: float = 0.25) -> Simulation:
    program = pipeline("one_f_one_b", stages, microbatches)
    return simulate(program.dag, program.plans, network=Network(Link(latency)))


def boxes(text: str) -> list[tuple[str, dict[str, str], str | None]]:
    """Return title, attributes and text of each box."""
    root = ET.fromstring(text)
    found = []
    for group in root.iter(f"{NS}g"):
        title, rect, shown = group.find(f"{NS}title"), group.find(f"{NS}rect"), group.find(f"{NS}text")
        if title is not None and rect is not None:
            found.append((title.text or "", rect.attrib, None if shown is None else shown.text))
    return found


def test_boxes_are_where_the_simulation_says() -> None:
    simulation = result()
    found = boxes(svg_chart(simulation))
    assert len(found) == len([s for s in simulation.timeline if s.end > s.start])
    by_title = {title: (attributes, shown) for title, attributes, shown in found}
    (title,) = (
        t for t in by_title if t.startswith("F[PP=0,MB=1] on device 0, stream compute: 1 to 2 (1), node %")
    )
    assert title.endswith(", directive 3")
    first, shown = next(value for t, value in by_title.items() if t.startswith("F[PP=0,MB=0]"))
    second, _ = by_title[title]
    assert shown == "0.0" and first["fill"] == color("F")
    assert float(second["x"]) == pytest.approx(float(first["x"]) + float(first["width"]), abs=0.02)
    backward = next(attributes for t, (attributes, _) in by_title.items() if t.startswith("B[PP=0,MB=0]"))
    assert float(backward["width"]) == pytest.approx(2 * float(first["width"]), abs=0.02) and backward[
        "fill"
    ] == color("B")
    assert backward["y"] == first["y"]


def test_rows_axis_and_legend_are_labeled() -> None:
    root = ET.fromstring(svg_chart(result()))
    texts = [t.text for t in root.iter(f"{NS}text")]
    for wanted in ("device 0  compute", "device 2  recv", "F", "B", "send", "recv", "reduce", "0", "2", "20"):
        assert wanted in texts
    assert any(t and t.startswith("step time 20, bubble 35.8%, exposed communication 4.2%") for t in texts)
    height = float(root.attrib["height"])
    assert all(0 <= float(r.attrib.get("y", 0)) <= height for r in root.iter(f"{NS}rect"))


def test_free_communication_has_no_rows() -> None:
    texts = [t.text for t in ET.fromstring(svg_chart(result(latency=0))).iter(f"{NS}text")]
    assert "device 0  compute" in texts and "device 0  send" not in texts


def test_messages_that_overlap_do_not_hide_each_other() -> None:
    """The middle stage sends to both sides; with a long latency both are under way at once."""
    simulation = result(latency=5)
    middle = [s for s in simulation.timeline if (s.device, s.stream) == (1, "send")]
    assert any(a.start < b.end and b.start < a.end for a in middle for b in middle if a is not b)
    drawn = [a for title, a, _ in boxes(svg_chart(simulation)) if "on device 1, stream send" in title]
    rects = [(float(a["x"]), float(a["y"]), float(a["width"]), float(a["height"])) for a in drawn]
    for i, (x, y, w, h) in enumerate(rects):
        for u, v, t, g in rects[i + 1 :]:
            assert x + w <= u + 0.02 or u + t <= x + 0.02 or y + h <= v + 0.02 or v + g <= y + 0.02


def test_a_users_text_is_escaped() -> None:
    simulation = result()
    hostile = """F[<script>"&'\x00]]>=1,MB=<b>]"""
    timeline = tuple(
        s._replace(label=hostile, stream="<i>&") if s.kind == "F" else s for s in simulation.timeline
    )
    found = boxes(svg_chart(dataclasses.replace(simulation, timeline=timeline)))
    titles = [title for title, _, _ in found if "script" in title]
    assert titles and all(
        t.startswith("""F[<script>"&'?]]>=1,MB=<b>] on device """) and "stream <i>&:" in t for t in titles
    )


def test_a_step_without_time() -> None:
    program = pipeline("gpipe", 2, 2)
    assert boxes(svg_chart(simulate(program.dag, program.plans, {"F": 0, "B": 0}))) == []


def test_ten_thousand_boxes() -> None:
    text = svg_chart(result(microbatches=256, stages=8))
    assert len(boxes(text)) > 10_000
    assert len(text) < 300 * 12_000  # bytes grow with the boxes, and no faster
    width = re.search(r'width="(\d+)"', text)
    assert width and int(width[1]) < 13_000
