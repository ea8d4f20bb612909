"""The tables of the PIPER tab that compare two steps, without a browser: node runs their code."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.profile.board import PLUGIN

# `document` makes elements that have only what the tables use: children, attributes and a style.
TABLE = """
import {readFileSync} from "node:fs";
const text = (child) => typeof child === "string" ? child : child.children.map(text).join("");
globalThis.document = {createElement: (tag) => ({
  tag, children: [], style: {}, setAttribute() {}, append(...more) { this.children.push(...more); },
})};
const {deviceTable} = await import("./panels.js");
const [step, other] = JSON.parse(readFileSync(0));
const [, body] = deviceTable(step, other ?? undefined).children;
console.log(JSON.stringify(body.children.map((row) => row.children.map(text))));
"""


def rows(step: Any, other: Any, folder: Path) -> list[list[str]]:
    """Return the texts of the table of devices."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    for path in (PLUGIN / "lightning_piper_tensorboard" / "static").glob("*.js"):
        (folder / path.name).write_text(path.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(TABLE)
    done = subprocess.run(
        [node, str(folder / "run.js")],
        input=json.dumps([step, other]),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: list[list[str]] = json.loads(done.stdout)
    return found


def step_of(devices: int, busy: float) -> dict[str, Any]:
    figures = {"busy": busy, "exposed": 0.25, "bubble": 0.5, "peak_bytes": 2000, "peak_in_flight": 1}
    return {"step_time": 1.0, "devices": {str(device): figures for device in range(devices)}}


def test_devices_of_either_step_have_a_row(tmp_path: Path) -> None:
    more = rows(step_of(1, 0.5), step_of(3, 0.75), tmp_path)
    assert [row[0] for row in more] == ["device 0", "device 1", "device 2"]
    assert "→" in more[0][1] and not more[0][1].startswith("→")  # both values
    assert all(cell.startswith("→ ") for cell in more[1][1:])  # only B has the device
    fewer = rows(step_of(3, 0.5), step_of(1, 0.75), tmp_path)
    assert [row[0] for row in fewer] == ["device 0", "device 1", "device 2"]
    assert not any("→" in cell for cell in fewer[1])  # only A has it


def test_one_step_has_no_arrows(tmp_path: Path) -> None:
    assert not any("→" in cell for row in rows(step_of(2, 0.5), None, tmp_path) for cell in row)
