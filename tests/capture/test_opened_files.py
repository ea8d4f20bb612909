"""A step that opens a file to write into it is not captured."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError


def appends(folder: Path) -> None:
    with open(folder / "texts", "a") as file:
        file.write("text\n")


def writes(folder: Path) -> None:
    (folder / "texts").write_text("text")


def reads(folder: Path) -> None:
    with open(__file__) as file:
        assert file.read()


def discards(folder: Path) -> None:
    with open(os.devnull, "w") as file:
        file.write("text")


def logs(folder: Path) -> None:
    logger = logging.getLogger("lightning_piper.tests.opened")
    handler = logging.FileHandler(folder / "log", delay=True)
    logger.addHandler(handler)
    logger.warning("text")
    logger.removeHandler(handler)
    handler.close()


class Writer(L.LightningModule):
    def __init__(self, write: Callable[[Path], None], folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.write, self.folder = write, folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self.folder)
        return self.layer(batch).mean()


@pytest.mark.parametrize("write", [appends, writes])
def test_a_step_that_writes_a_file_is_refused(write: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"test_opened_files.py:\d+ .*training_step opens a file to write"):
        capture(Writer(write, tmp_path), torch.ones(4, 4)).at(4)
    assert not (tmp_path / "texts").exists()
    write(tmp_path)  # outside of a capture
    assert (tmp_path / "texts").exists()


@pytest.mark.parametrize("use", [reads, discards, logs])
def test_a_step_that_writes_no_file_of_its_own_is_captured(use: Any, tmp_path: Path) -> None:
    assert capture(Writer(use, tmp_path), torch.ones(4, 4)).at(4).regions
