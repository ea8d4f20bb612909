"""When SLURM tells a job to end, it saves once, with all processes between the same two batches, and resumes
from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_piper.checkpoint.files import temporary_of
from tests.distributed.processes import launch_trainings
from tests.strategy.requeued import SAVED, STEPS, train
from tests.strategy.scenarios import equal

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/requeued
ls -a {folder} >> {folder}/there
"""


def run(folder: Path, name: str, checkpoint: str, told: bool) -> list[dict[Any, Any]]:
    return launch_trainings(2, train, folder / name, folder, checkpoint, told)


@pytest.mark.parametrize("checkpoint", ["sharded", pytest.param("consolidated", marks=pytest.mark.long)])
def test_a_job_saves_and_goes_on(checkpoint: str, tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text(SCONTROL.format(folder=tmp_path))
    script.chmod(0o755)
    first, other = run(tmp_path, "not told", checkpoint, told=False)
    assert (
        len(first["losses"]) == STEPS
        and not list(tmp_path.glob("*.ckpt"))
        and not (tmp_path / "requeued").exists()
    )
    told, _ = run(tmp_path, "told", checkpoint, told=True)
    assert equal(told, first)
    assert (tmp_path / "requeued").read_text() == "requeue 1234\n"
    there = (tmp_path / "there").read_text().split()
    assert "hpc_ckpt_1.ckpt" in there and not any(
        name.endswith(".tmp") for name in there
    )  # whole before the job is requeued
    temporary_of(tmp_path / "hpc_ckpt_2.ckpt").touch()  # a save that was interrupted is nothing to go on from
    again = run(tmp_path, "again", checkpoint, told=False)
    for found, wanted in zip(again, (first, other), strict=True):
        assert equal(found["losses"], wanted["losses"][SAVED:])
        assert equal(found["values"], wanted["values"])
