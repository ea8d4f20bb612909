"""A short version of the example of divided experts: half of the layers, only 1F1B, three steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

SHORT = f"""
import sys

sys.path.insert(0, {str(EXAMPLES)!r})
import moe

moe.STEPS, moe.LAYERS = 3, 2
both = moe.programs()
moe.programs = lambda: {{"1F1B": both["1F1B"]}}
sys.exit(moe.main())
"""


@pytest.fixture
def moe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    import moe

    monkeypatch.setattr(moe, "STEPS", 3)
    monkeypatch.setattr(moe, "LAYERS", 2)
    yield moe
    for name in ("moe", "gpt"):
        sys.modules.pop(name, None)


def test_a_wrong_curve_is_found(moe: Any) -> None:
    single, found = moe.Figures(), moe.Figures()
    single.losses = single.balance = found.balance = [1.0, 1.0, 1.0]
    for curve, agrees in (
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.0 + 1e-11], False),
        ([1.0, 1.0, float("nan")], False),
    ):
        found.losses = curve
        assert moe.compare({"found": found}, single) == agrees


@pytest.mark.long
def test_trains_as_one_device_does(tmp_path: Path) -> None:
    """The example verifies its program, trains in four processes and on one device, and compares."""
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("verified\n") == 1
    assert "The curves agree." in done.stdout
    assert done.stdout.count("1/4.0 of one device's; optimizer state") == 4  # PP2 x EP2
