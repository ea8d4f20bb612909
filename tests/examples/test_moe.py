"""The example of divided experts, in short: half of the layers, 1F1B alone, three steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

SHORT = f"""
import sys

sys.path.insert(0, {str(EXAMPLES)!r})
import moe

moe.STEPS, moe.LAYERS = 3, 2
both = moe.programs()
moe.programs = lambda: {{"1F1B": both["1F1B"]}}
status = moe.main()
if status == 0 and moe.rank_zero_only.rank == 0:
    single, wrong = moe.Figures(), moe.Figures()
    single.losses = single.balance = [1.0, 1.0, 1.0]
    for curve in ([1.0, 1.0, 1.0 + 1e-11], [1.0, 1.0, float("nan")]):
        wrong.losses, wrong.balance = curve, single.balance
        assert not moe.compare({{"wrong": wrong}}, single)
sys.exit(status)
"""


def test_trains_as_one_device_does(tmp_path: Path) -> None:
    """The example verifies its program, trains in four processes and on one device, and compares; a wrong curve is found."""
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("verified\n") == 1
    assert "The curves agree." in done.stdout
    assert done.stdout.count("1/4.0 of one device's; optimizer state") == 4  # PP2 x EP2
