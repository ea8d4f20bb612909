"""Runs, without a browser, the checks that the tab's page makes before it draws a recording."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.profile.board import PLUGIN

CHECK = """
import {readFileSync} from "node:fs";
import {checkName, checkPlan, checkRecord} from "./check.mjs";
for (const [text, plan] of JSON.parse(readFileSync(0))) {
  try {
    const found = JSON.parse(plan), record = JSON.parse(text);
    checkName(record); checkPlan(found); checkRecord(record, found);
    console.log("drawn");
  } catch (error) { console.log(error.message.replaceAll("\\n", " ")); }
}
"""


def judged(pairs: list[tuple[str, str]], folder: Path) -> list[str]:
    """For each step file and its plan file, `drawn` or the message that the page shows instead."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    (folder / "check.mjs").write_text(
        (PLUGIN / "lightning_piper_tensorboard" / "static" / "check.js").read_text()
    )
    (folder / "run.mjs").write_text(CHECK)
    done = subprocess.run(
        [node, str(folder / "run.mjs")],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()
