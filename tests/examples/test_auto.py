"""The example of a GPT-2 that does not fit on one device, and the gallery, which has all examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_gallery_has_all_examples() -> None:
    gallery = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")]
    assert examples and all(f"(../examples/{name})" in gallery for name in examples)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_devices_train_what_one_has_no_room_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shared = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(devices: int) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            str(ROOT / "examples" / "auto.py"),
            "--devices",
            str(devices),
            "--steps",
            "2",
        ]
        environment = {**os.environ, **shared, "PYTHONPATH": paths}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=800, cwd=tmp_path
        )

    two = run(2)
    assert two.returncode == 0 and two.stdout.count("after 2 steps") == 2, (
        two.stdout[-3000:] + two.stderr[-3000:]
    )
    one = run(1)
    assert one.returncode != 0 and "memory" in one.stderr.lower(), one.stdout[-3000:] + one.stderr[-3000:]
