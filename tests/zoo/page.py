"""Makes docs/zoo.md from trainings: `python -m tests.zoo.page` trains all kinds and writes the page; with
names of kinds it writes only their rows.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.zoo.compared import LEVELS, cases, verdict
from tests.zoo.train import KINDS, MODULES, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
AT_ONCE = 4  # kinds that are trained in one launch
HEAD = """# Kinds of modules

This page shows how typical LightningModules train under `PiperStrategy`. The columns are:

- `one`: one device;
- `replicate`: data parallelism on two processes, without directives;
- `zero1`, `zero2`, `zero3`: the same with sharded optimizer state, then gradients too, then parameters too;
- `stages`: two stages on two processes. Each stage has one half of the submodules, in the order in which the module makes
  them. `-` means that the module does not have two submodules.

The modules (`tests/zoo/`) are written in the plain style of Lightning's examples, not for this package. The tests fit,
validate, save and resume each module, in double precision and with fixed random numbers. They train it in `replicate`, in
`stages` and at one of the ZeRO levels, and compare the verdicts with this page. `make zoo` trains all modules at all levels
and writes the page. The verdicts are:

- **proved**: Piper captured the step and checked the program. Losses, logged values, buffers and parameters equal the values
  of a plain Trainer on one device with the whole batch, also after resuming.
- **verified except**: Piper captured the step and checked the program, but the loss [is not exact in
  replicas](losses.md#what-is-not-exact). A warning says so. The values equal DDP's values: both take the mean of the
  replicas' losses.
- **executed**: the step, or a part of it, [runs uncaptured](uncaptured.md), and a warning says why. In replicas the values
  equal DDP's values. On one device and in stages they equal the values of a plain Trainer.
- **refused**: Piper or Lightning raises an error that says why, and all processes end.
- **fails**: torch or other code raises an error, for example because a hook reads [sharded
  parameters](limits.md#hooks-and-callbacks).
"""
COLUMNS = [
    f"| kind | what the module contains | {' | '.join(LEVELS)} | why |",
    "|---" * (len(LEVELS) + 3) + "|",
]
Cells = dict[tuple[str, str], tuple[str, str]]


def measured(names: Sequence[str]) -> Cells:
    """The verdicts on these kinds at all levels."""
    with tempfile.TemporaryDirectory() as folder:
        trained = outcomes(cases(names, LEVELS), Path(folder))
    return {(name, level): verdict(KINDS[name], level, trained) for name in names for level in LEVELS}


def reason(text: str) -> str:
    """The first sentence of a message, without names of files."""
    text = re.sub(r" ?\[PIPER-\w+\]", "", text)
    text = re.sub(r"\S*/(\w+\.py):\d+ \(", r"(", " ".join(text.split()))
    text = re.sub(r"^.*? runs uncaptured .*? Reason: ", "", re.sub(r"^\w+Error: ", "", text))
    text = text.replace(f"{PAGE.parents[1]}/", "")  # without the folder of this machine
    said = re.split(r"; |\. [A-Z]", text)[0].rstrip(".")
    return said.replace("|", "\\|").replace("*", "\\*")


def row(name: str, found: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    shorts = [found[name, level][0] for level in LEVELS]
    why = dict.fromkeys(
        reason(long) for short, long in (found[name, level] for level in LEVELS) if short != "proved"
    )
    return f"| {name} | {KINDS[name].what} | {' | '.join(shorts)} | {'<br>'.join(why)} |"


def page(rows: Mapping[str, str]) -> str:
    """The text of the page, given the row of each kind."""
    parts = [HEAD]
    for module in MODULES:
        title = " ".join((module.__doc__ or "").split()).rstrip(".")
        known = [rows[kind.name] for kind in module.KINDS if kind.name in rows]
        parts.append("\n".join([f"## {title}\n", *COLUMNS, *known]) + "\n")
    return "\n".join(parts)


def cells(text: str) -> dict[tuple[str, str], str]:
    """The verdicts that the text of a page contains."""
    rows = [
        [cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    return {
        (row[0][2:], level): short
        for row in rows
        if row[0][2:] in KINDS
        for level, short in zip(LEVELS, row[2:], strict=False)
    }


def main(names: Sequence[str]) -> None:
    """Train kinds, a few at a time, and write their rows into the page."""
    for at in range(0, len(names), AT_ONCE):
        some = names[at : at + AT_ONCE]
        found = measured(some)
        text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        rows = {line[2:].split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
        PAGE.write_text(page({**rows, **{name: row(name, found) for name in some}}), encoding="utf-8")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main(sys.argv[1:] or list(KINDS))
