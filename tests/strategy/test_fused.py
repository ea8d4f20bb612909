"""Trainings in which devices hold parts of weights that lie next to each other: states and checkpoints are
those of one device.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper import Place, Replicate
from tests.distributed.processes import launch_trainings
from tests.fused import Fusing, fusing, params
from tests.tensors import divided, far, fit, stages

ROUNDING = 1e-13  # measured: 2e-15
ABOUT = {"params": params(fusing(bias=False))}
PROGRAMS: dict[str, list[Any]] = {
    "stages": [*stages([[0, 1], [2, 3]]), divided([[0, 1], [2, 3]], sequence=True, **ABOUT)],
    "zero3": [Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"]), divided(None, **ABOUT),
              Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True)],
    "four": [Place(filter={}, devices=[0, 1, 2, 3]), divided([0, 1, 2, 3], **ABOUT)],
}  # fmt: skip


def alone(**options: Any) -> tuple[Fusing, Any]:
    module = fusing(bias=False)
    return module, fit(module, "auto", **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains_as_one_device_and_goes_on_alone(name, tmp_path):
    module = fusing(bias=False)
    trainer = fit(module, piper.PiperStrategy(PROGRAMS[name], transport="local"), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    other, _ = alone(max_epochs=2)
    assert far(module, other) < ROUNDING
    assert all(x.is_contiguous() for x in module.parameters())
    again, _ = alone(max_epochs=3, ckpt_path=str(tmp_path / "first.ckpt"))
    through, _ = alone(max_epochs=3)
    assert far(again, through) < ROUNDING


def train(rank: int, folder: Path, name: str, epochs: int, before: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"batch": 4, "replica": rank // 2} if name == "zero3" else {}
    module = fusing(bias=False)
    trainer = fit(
        module,
        piper.PiperStrategy(PROGRAMS[name], checkpoint="sharded"),
        devices=4,
        use_distributed_sampler=False,
        max_epochs=epochs,
        ckpt_path=before and str(folder / f"{before}.ckpt"),
        gradient_clip_val=0.1,
        **options,
    )
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return module.state_dict()


@pytest.mark.long  # checkpoints in shards for other programs are tested in test_sharded_checkpoint.py
@pytest.mark.parametrize("names", [("stages", "zero3", "four")], ids=" ".join)
def test_processes_go_on_with_what_other_programs_have_saved_in_shards(names, tmp_path):
    """Elements lie in another order in each of the files: of runs over two, over two and shards, over
    four.
    """
    before = None
    for epochs, name in enumerate(names, 1):
        outcomes = launch_trainings(
            4, train, tmp_path / name, tmp_path, name, epochs, before, limit=timedelta(seconds=800)
        )
        module, before = alone(max_epochs=epochs, gradient_clip_val=0.1)[0], name
        for outcome in outcomes:
            assert (
                max(float((x - outcome[key]).abs().max()) for key, x in module.state_dict().items())
                < ROUNDING
            )
    assert torch.equal(outcomes[0]["blocks.0.qkv.weight"], outcomes[3]["blocks.0.qkv.weight"])
