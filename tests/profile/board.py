"""Starts TensorBoard as a user does, with this package's entry point."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "lightning_piper" / "profile" / "plugin"
LIMIT = 300.0  # seconds, longer than anything here takes on a slow machine


def installed(folder: Path) -> list[str]:
    """The folders that an installation adds to Python's path. Writes the entry point that pyproject.toml
    names into `folder`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"lightning_piper-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["tensorboard_plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[tensorboard_plugins]", *lines]) + "\n")
    return [str(folder), str(PLUGIN), str(ROOT)]


def environment(paths: list[str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


@contextmanager
def tensorboard(logdir: Path, paths: list[str]) -> Iterator[str]:
    """Runs TensorBoard on a log directory, and yields its address."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logdir),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        command,
        env=environment(paths),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=logdir,
        start_new_session=True,
    )
    try:
        yield _address(process)
    finally:
        process.kill()
        process.wait(LIMIT)


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    said, end = b"", time.monotonic() + LIMIT
    while time.monotonic() < end:
        ready, _, _ = select.select([process.stdout], [], [], end - time.monotonic())
        part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        assert part, f"TensorBoard did not start: {said.decode()}"
        said += part
        if match := re.search(rb"(http://[\d.]+:\d+/)", said):
            return match[1].decode()
    raise AssertionError(f"TensorBoard did not say its address: {said.decode()}")
