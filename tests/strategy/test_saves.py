"""Checkpoints that are written in the background are the same as others; each is whole or absent, and no
failure goes unnoticed.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_piper as piper
from lightning_piper.checkpoint.late_copies import LateCopies
from lightning_piper.strategy import checkpoints, consolidate
from tests.strategy.fitting import local, sharing_captures, trainer, values
from tests.strategy.models import make
from tests.strategy.scenarios import equal
from tests.strategy.sharded import dp2

KINDS = ("consolidated", "sharded")
PATIENCE = 300.0  # seconds


class Gate(L.Callback):
    """Lets background writes that start within `holding` wait, after the copies, until the step `opens` is over."""

    def __init__(self, opens: int) -> None:
        self.opens, self.gate = opens, threading.Event()
        self.seen: dict[int, set[str]] = {}

    def holding(self) -> Any:
        make_copies = LateCopies.make

        def held(copies: LateCopies) -> None:
            make_copies(copies)
            self.gate.wait(PATIENCE)

        return mock.patch.object(LateCopies, "make", held)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        folder = Path(trainer.default_root_dir)
        self.seen[trainer.global_step] = {path.name for path in folder.glob("*.ckpt")}
        if trainer.global_step >= self.opens:
            self.gate.set()


class SaveAt(L.Callback):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(Path(trainer.default_root_dir, f"{trainer.global_step}.ckpt"))


@sharing_captures
def fit(
    folder: Path, kind: Any, io: Any, *callbacks: L.Callback, steps: int = 4, **options: Any
) -> tuple[L.Trainer, Any]:
    """A training with ZeRO-1 and all devices in this process."""
    module, loader = make("dropout", samples=16, batch_size=8)  # two steps in an epoch
    strategy = local(dp2(1), checkpoint=kind, checkpoint_io=io)
    torch.manual_seed(3)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    run, _ = trainer(
        strategy, callbacks, max_steps=steps, default_root_dir=folder, enable_checkpointing=saves
    )
    run.fit(module, loader, **options)
    return run, values(module)


def content(path: Path, kind: str) -> dict[str, Any]:
    if kind == "sharded":
        assert path.is_dir()
        consolidate(path, path := path.with_suffix(".plain"))
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_later_is_what_was_there(kind: str, tmp_path: Path) -> None:
    """Also while two more steps change all of it; without the copies these are seen."""
    fit(tmp_path / "now", kind, None, SaveAt(1))
    expected = content(tmp_path / "now" / "1.ckpt", kind)
    for copied in (True, False):
        folder, gate = tmp_path / f"later {copied}", Gate(3)
        without: AbstractContextManager[Any] = nullcontext()
        if not copied:
            name = "copied" if kind == "sharded" else "copied_memory"
            without = mock.patch.object(LateCopies, name, lambda self, tensor: tensor)
        with gate.holding(), without:
            fit(folder, kind, AsyncCheckpointIO(), SaveAt(1), gate)
        assert gate.seen == {1: set(), 2: set(), 3: set(), 4: gate.seen[4]}
        found = content(folder / "1.ckpt", kind)
        assert equal(found, expected) == copied
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_only_valid_checkpoint_is_not_removed(kind: str, tmp_path: Path) -> None:
    """`save_top_k=1` removes the first one when the second one is whole, which waits until after the third
    step.
    """
    gate, make_copies, count = Gate(3), LateCopies.make, 0

    def second_is_held(copies: LateCopies) -> None:
        nonlocal count
        count += 1
        make_copies(copies)
        if count == 2:
            gate.gate.wait(PATIENCE)

    class Fewer(ModelCheckpoint):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step in (1, 2, 4):
                super().on_train_batch_end(trainer, *args)

    keep = Fewer(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1, monitor=None)
    with mock.patch.object(LateCopies, "make", second_is_held):
        fit(tmp_path, kind, AsyncCheckpointIO(), keep, gate)
    assert gate.seen[3] == {"step=1.ckpt"}
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"step=4.ckpt"}


def full(*args: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def where(kind: str) -> Any:
    owner: Any = torch.distributed.checkpoint.FileSystemWriter if kind == "sharded" else TorchCheckpointIO
    return mock.patch.object(owner, "write_data" if kind == "sharded" else "save_checkpoint", full)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps, saved", [((2, 3), 3), ((2,), 4)])
def test_a_full_disk_is_an_error_of_the_next_save_or_of_the_fit(
    kind: str, steps: Any, saved: int, tmp_path: Path
) -> None:
    fit(tmp_path, kind, AsyncCheckpointIO(), SaveAt(1), steps=1)
    reached = []

    class Counting(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            reached.append(trainer.global_step)

    with where(kind), pytest.raises((OSError, piper.PiperError), match="No space left on device"):
        fit(tmp_path, kind, AsyncCheckpointIO(), Counting(), SaveAt(*steps))
    assert reached[-1] == saved
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]
    assert content(tmp_path / "1.ckpt", kind)["global_step"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_with_the_training_is_a_warning(kind: str, tmp_path: Path) -> None:
    class Failing(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                raise ValueError("of the user's")

    warned = pytest.warns(
        UserWarning, match=r"is not complete: .*No space left.* Use the checkpoint before it"
    )
    with where(kind), warned, pytest.raises(ValueError, match="of the user's"):
        fit(tmp_path, kind, AsyncCheckpointIO(), SaveAt(2), Failing())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_one_is_the_newest_that_is_whole(kind: str, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last=True, save_top_k=-1)
    _, expected = fit(tmp_path / "whole", kind, AsyncCheckpointIO(), steps=4)
    fit(tmp_path, kind, AsyncCheckpointIO(), save, steps=2)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_last=True, save_top_k=-1)
    with where(kind), pytest.raises((OSError, piper.PiperError), match="No space left"):
        fit(tmp_path, kind, AsyncCheckpointIO(), save, steps=4, ckpt_path="last")
    run, found = fit(tmp_path, kind, AsyncCheckpointIO(), save, steps=4, ckpt_path="last")
    assert equal(found, expected)
    run.save_checkpoint(tmp_path / "after.ckpt")  # nothing waits for it, so it is there now
    assert content(tmp_path / "after.ckpt", kind)["global_step"] == 4


def test_a_link_to_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_last="link")
    with pytest.raises(piper.PiperError, match=r"save_last='link'.*Use save_last=True"):
        fit(tmp_path, "consolidated", AsyncCheckpointIO(), save)
    fit(tmp_path, "consolidated", None, save)


def test_which_plugins_write_behind_the_training_in_this_way() -> None:
    class Own(TorchCheckpointIO):
        pass

    assert checkpoints.is_behind(AsyncCheckpointIO(TorchCheckpointIO()), "a.ckpt")
    assert checkpoints.is_behind(AsyncCheckpointIO(TorchCheckpointIO()), "memory://a.ckpt")
    assert not checkpoints.is_behind(AsyncCheckpointIO(TorchCheckpointIO()), "https://x/a.ckpt")
    assert not checkpoints.is_behind(AsyncCheckpointIO(Own()), "a.ckpt")
    assert not checkpoints.is_behind(TorchCheckpointIO(), "a.ckpt")
    theirs = piper.PiperStrategy(checkpoint_io=pytorch_lightning.plugins.AsyncCheckpointIO())
    assert checkpoints.is_behind(theirs.checkpoint_io, "a.ckpt")


def test_a_plugin_that_sharded_checkpoints_do_not_support_is_named() -> None:
    class Own(TorchCheckpointIO):
        pass

    for io in (Own(), AsyncCheckpointIO(Own())):
        with pytest.raises(piper.PiperError, match=r"does not support the checkpoint plugin Own\. Remove it"):
            checkpoints.check_target("a.ckpt", None, io)
    checkpoints.check_target("a.ckpt", None, AsyncCheckpointIO(TorchCheckpointIO()))


def test_a_file_is_in_permanent_storage_before_it_gets_its_name(tmp_path: Path) -> None:
    """The flush of a whole file, and only then the rename."""
    path, calls = tmp_path / "a.ckpt", []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        calls.append(os.fstat(handle).st_ino)
        fsync(handle)

    def renamed(source: Any, target: Any) -> None:
        calls.append(str(target) if Path(target) == path else None)
        replace(source, target)

    with mock.patch.object(os, "fsync", flushed), mock.patch.object(os, "replace", renamed):
        checkpoints.save_in_one_go(TorchCheckpointIO(), {"x": torch.ones(3)}, path, None)
    file = path.stat().st_ino
    assert file in calls[: calls.index(str(path))]


@pytest.mark.parametrize("saved", [1, 2])
def test_an_uncaptured_fit_loads_a_state_for_each_of_its_optimizers(saved: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    first, _ = trainer(piper.PiperStrategy(capture="never"), max_steps=2)
    first.fit(*make("mlp"))
    first.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    content["optimizer_states"] *= saved
    torch.save(content, path)
    second, _ = trainer(piper.PiperStrategy(capture="never"), max_steps=3)
    words = r"the states of 2 optimizers, but this fit has 1\. Resume from"
    with nullcontext() if saved == 1 else pytest.raises(piper.PiperError, match=words):
        second.fit(*make("mlp"), ckpt_path=path)
