"""The pictures in docs/schedules.md.

    python -m tests.schedules.pictures               # draws every picture of the page again
    python -m tests.schedules.pictures gpipe 4 8     # prints one picture, with its call

To show a new schedule, write its call into the page, indented by four spaces, such as `gpipe(4, 8)` with an
empty line after it. Then draw the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lightning_piper.simulate import simulate
from lightning_piper.viz import text_chart
from tests.simulate.programs import pipeline

PATH = Path(__file__).parents[2] / "docs" / "schedules.md"
CALL = r"    (?P<name>\w+)\((?P<stages>\d+), (?P<microbatches>\d+)\)\n\n"
PICTURE = re.compile(rf"^{CALL}(?P<chart>(    device  .*\n(    .*\n)+)?)", re.MULTILINE)


def picture(name: str, stages: int, microbatches: int) -> str:
    """Return the simulated step of a schedule as an indented block of text."""
    program = pipeline(name, stages, microbatches)
    halves = {"BW[PP=0]": 2} if any(c.label.startswith("BW[PP=0") for c in program.dag.nodes.values()) else {}
    result = simulate(program.dag, program.plans, {"F": 1, "B": 2, "BI": 1, "BW": 1, **halves})
    return "".join(f"    {line}\n" for line in text_chart(result, width=110).splitlines())


def drawn(found: re.Match[str]) -> str:
    """Return a call of the page with its picture as the simulator gives it."""
    call = f"    {found['name']}({found['stages']}, {found['microbatches']})\n\n"
    chart = picture(found["name"], int(found["stages"]), int(found["microbatches"]))
    return call + chart if found["chart"] else f"{call}{chart}\n"


def page(text: str) -> str:
    """Return the text of docs/schedules.md with its pictures as the simulator gives them."""
    return PICTURE.sub(drawn, text)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        name, stages, microbatches = sys.argv[1:]
        print(f"    {name}({stages}, {microbatches})\n")
        print(picture(name, int(stages), int(microbatches)), end="")
