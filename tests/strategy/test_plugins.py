"""Checkpoint plugins that write elsewhere or later, and the errors for checkpoints that do not exist."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_piper as piper
from tests.strategy.fitting import local, same, sharing_captures, trainer, values
from tests.strategy.models import make


class Renaming(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, f"{path}.elsewhere", storage_options)

    def load_checkpoint(self, path, *args, **options):
        return super().load_checkpoint(f"{path}.elsewhere", *args, **options)

    def remove_checkpoint(self, path):
        Path(f"{path}.elsewhere").unlink()


class InFolders(TorchCheckpointIO):
    """Its folders are written as a whole or not at all: AsyncCheckpointIO saves in a thread, and removes in
    another.
    """

    def __init__(self):
        super().__init__()
        self.one_at_a_time = threading.Lock()

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        with self.one_at_a_time:
            Path(path).mkdir(exist_ok=True)
            super().save_checkpoint(checkpoint, Path(path) / "content", storage_options)

    def load_checkpoint(self, path, *args, **options):
        return super().load_checkpoint(Path(path) / "content", *args, **options)

    def remove_checkpoint(self, path):
        self.removed = str(path)
        with self.one_at_a_time:
            shutil.rmtree(path, ignore_errors=True)  # it may not exist yet


def folders_later():
    return AsyncCheckpointIO(InFolders())


@sharing_captures
@pytest.mark.parametrize("kind", [TorchCheckpointIO, AsyncCheckpointIO, Renaming, InFolders, folders_later])
def test_plugins_write_and_read_in_their_own_way(kind, tmp_path):
    module, loader = make("tied")
    plugin = kind()
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1, monitor=None)
    fit, _ = trainer(local(checkpoint_io=plugin), [save], max_steps=3, enable_checkpointing=True)
    fit.fit(module, loader)
    plugin.teardown()  # an asynchronous one is done then
    left = {path.name.removesuffix(".elsewhere") for path in tmp_path.iterdir()}
    # AsyncCheckpointIO removes at once, also what it has yet to write: an earlier one may be left.
    assert "step=3.ckpt" in left if isinstance(plugin, AsyncCheckpointIO) else left == {"step=3.ckpt"}
    assert kind is not InFolders or plugin.removed.endswith("step=2.ckpt")
    again, loader = make("tied", seed=1)
    fit, _ = trainer(local(checkpoint_io=kind()), max_steps=3)
    fit.fit(again, loader, ckpt_path=tmp_path / "step=3.ckpt")
    assert fit.global_step == 3 and same(values(again), values(module))


@sharing_captures
@pytest.mark.parametrize("kind", [TorchCheckpointIO, AsyncCheckpointIO])
def test_a_plugin_that_was_given_another_method_writes_in_its_own_way(kind, tmp_path):
    plugin, later = kind(), []
    module, loader = make("tied")
    fit, _ = trainer(local(checkpoint_io=plugin), max_steps=1)
    fit.fit(module, loader)
    fit.save_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    plugin.save_checkpoint = lambda *args, **options: later.append((args[1], options))
    fit.save_checkpoint(tmp_path / "b.ckpt", storage_options="mine")
    assert later == [(tmp_path / "b.ckpt", {"storage_options": "mine"})]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@sharing_captures
def test_a_class_whose_save_was_replaced_says_so(tmp_path):
    module, loader = make("tied")
    fit, _ = trainer(local(), max_steps=1)
    fit.fit(module, loader)
    with (
        mock.patch.object(TorchCheckpointIO, "save_checkpoint") as save,
        pytest.raises(
            piper.PiperError, match=r"TorchCheckpointIO\.save_checkpoint wrote nothing to .*a subclass of"
        ),
    ):
        fit.save_checkpoint(tmp_path / "a.ckpt")
    assert save.called and not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["auto", "piper"])
def test_no_checkpoint_is_a_file_not_found_error(strategy, tmp_path):
    module, loader = make("tied")
    fit, _ = trainer("auto" if strategy == "auto" else local(), max_steps=1)
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt") as raised:
        fit.fit(module, loader, ckpt_path=tmp_path / "none.ckpt")
    assert isinstance(raised.value, piper.PiperError) == (strategy == "piper")
    torch.save({}, tmp_path / "some.ckpt")
    with pytest.raises(Exception, match=r"(?s).+") as other:
        fit.fit(module, loader, ckpt_path=tmp_path / "some.ckpt")
    assert not isinstance(other.value, FileNotFoundError)
