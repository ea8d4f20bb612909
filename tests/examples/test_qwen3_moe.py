"""The programs of the paper for Qwen3-MoE: they are correct on the tiny model, and train it as one device
does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

import lightning_piper as piper
from examples.qwen3_moe.model import Qwen3Moe, on_meta
from examples.qwen3_moe.programs import SCHEDULES, program, replicas_inside, simplified_dualpipe
from examples.qwen3_moe.train import agree
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse

ROOT = Path(__file__).parents[2]


def tiny(stages: int) -> Qwen3Moe:
    torch.manual_seed(0)
    return Qwen3Moe("tiny", stages)


def tokens() -> torch.Tensor:
    return torch.randint(64, (16, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size, least, most", [("1B", 1.0e9, 1.2e9), ("9B", 9.0e9, 9.6e9)])
def test_the_sizes_are_right(size: str, least: float, most: float) -> None:
    model = on_meta(size, 8)
    count = sum(p.numel() for p in model.parameters())
    assert least < count < most and all(p.is_meta for p in model.parameters())


def test_simplified_dualpipe_is_verified() -> None:
    directives = simplified_dualpipe([0, 1], [2, 3])
    assert len(directives) <= 11  # as many as the paper's
    report = piper.verify(tiny(4), tokens(), directives)
    assert report.verdict == "verified", report


@pytest.mark.long
@pytest.mark.parametrize("per_rank", [1, 2])
def test_all_programs_pass_the_static_check(per_rank: int) -> None:
    step = piper.compile(tiny(2 * per_rank), tokens(), []).step
    for schedule, (_, stages) in SCHEDULES.items():
        for zero in range(4) if stages == per_rank else ():
            directives = program(schedule, replicas_inside(2, 4), 4, zero, experts=2)
            assert len(compile_step(step, tuple(parse(directives))).plans) == 8


@pytest.mark.parametrize(
    "losses, same", [([1.0, 2.0], True), ([1.0, 2.0 + 1e-5], False), ([float("nan"), 2.0], False)]
)
def test_other_losses_are_found(losses: list[float], same: bool) -> None:
    assert agree(losses, [1.0, 2.0]) == same


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_processes_train_as_one_device_does() -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "examples.qwen3_moe.train", "--steps", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 2: loss" in done.stdout
