"""Checkpoints under Lightning's names: a plain Lightning checkpoint is a file, a sharded one a directory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_piper.checkpoint.files import MANIFEST, located, prepare, publish, remove
from lightning_piper.checkpoint.records import check_records
from lightning_piper.checkpoint.sharded import Saving, open_checkpoint, read_whole
from lightning_piper.checkpoint.snapshot import HostRoom, snapshot
from lightning_piper.checkpoint.state import Loading, referenced, resolved
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.either_lightning import is_exactly
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialize import Known
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.placeholders import check_values
from lightning_piper.processes.behind import Behind
from lightning_piper.processes.failure import GRACE
from lightning_piper.processes.world import World, together

KEY = "lightning_piper"  # what a plain Trainer does not need: the seed of the steps' random numbers


@dataclass
class Restored:
    """What a checkpoint brings to a run, from when it is loaded to the end of the run.

    Attributes:
        sharded: it, if it is sharded.
        seed: of the steps' random numbers; None if it was written without this strategy.
        values: of tensors that the module has on the meta device, by canonical name.
    """

    sharded: Loading | None = None
    seed: int | None = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def known(self) -> Known:
        """What it has for a module on the meta device."""
        return Known(self.values, frozenset() if self.sharded is None else self.sharded.waiting)

    def read(self, parts: Ownership) -> None:
        """The module is distributed: read what a sharded checkpoint has of this process's part. Collective."""
        if self.sharded is not None:
            self.sharded.distributed(parts)


def save_in_one_go(io: CheckpointIO, content: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
    """Write under a temporary name and rename: a save that is interrupted leaves the earlier file as it was.

    Remote files and other plugins than Lightning's own are written in their own way.

    Raises:
        PiperError: there are tensors whose values are on other processes.
    """
    check_values(content)
    plain = of_files(io, path)
    if plain is None:
        io.save_checkpoint(content, path, storage_options=storage_options)
        return
    io, path = plain, Path(path)
    temporary = prepare(path)
    try:
        io.save_checkpoint(content, temporary, storage_options=storage_options)
        if not temporary.exists():
            raise PiperError(
                f"{type(io).__name__}.save_checkpoint has been replaced, and wrote nothing to {temporary}; write elsewhere, or "
                "later, in a plugin of your own: a subclass of TorchCheckpointIO or CheckpointIO"
            )
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_in_one_go(io: CheckpointIO, path: str | Path) -> None:
    """Remove a file or directory."""
    if of_files(io, path) is None and not _is_sharded(Path(path)):
        io.remove_checkpoint(path)
    else:
        remove(Path(path))


class Saves:
    """How a strategy's checkpoints get to their files: at once, or, with Lightning's `AsyncCheckpointIO`, behind the training.

    Then what is saved is copied, in host memory that each checkpoint uses again, and written by a thread, in the way in which it
    would be written at once: so it is whole or absent. There is one write at a time. What fails is raised by the next save, or at
    the end of the run.
    """

    def __init__(self) -> None:
        self._behind, self._room = Behind("piper-checkpoints"), HostRoom()
        self._planned: Saving | None = None

    def __reduce__(self) -> Any:
        return Saves, ()  # a copy of the strategy writes for itself

    def plain(self, io: CheckpointIO, content: dict[str, Any], path: str | Path, storage_options: Any | None, behind: bool) -> None:
        """Save a checkpoint that is one file.

        Args:
            behind: write it behind the training.

        Raises:
            Exception: it cannot be saved, or the one before could not.
        """
        self.wait()
        if not behind:
            save_in_one_go(io, content, path, storage_options)
            return
        check_values(content)
        copy = snapshot(content, self._room)
        self._behind.start(lambda: save_in_one_go(io, copy, path, storage_options))

    def sharded(self, path: str | Path, ranges: Sequence[TensorRange], content: dict[str, Any], world: World, behind: bool) -> None:
        """Save a sharded checkpoint. Collective.

        Args:
            ranges, content: as `tensor_ranges` and `common` of `checkpoint.sharded.save`.
            behind: write it behind the training.

        Raises:
            PiperError: on every process: it cannot be saved, or the one before could not.
        """
        self.wait()
        self._planned = saving = Saving(path, ranges, content, world, self._planned)
        if not behind:
            saving.write(world)
            return
        saving.copy(self._room)
        apart = world.apart("checkpoints behind the training")
        self._behind.start(lambda: saving.write(apart))

    def remove(self, io: CheckpointIO, path: str | Path) -> None:
        """Remove a checkpoint: not before the one that is being written is whole."""
        self._behind.then(lambda: remove_in_one_go(io, path))

    def wait(self) -> None:
        """Until everything is written.

        Raises:
            Exception: with which that has failed.
        """
        self._behind.wait()

    def end(self, failed: bool) -> None:
        """The run is over. After a failure a write gets as long as other processes then have.

        Raises:
            Exception: the last write has failed; after a failure this is a warning.
        """
        try:
            self._behind.wait(GRACE if failed else None)
        except Exception as error:
            if not failed:
                raise
            warnings.warn(f"the last checkpoint is not complete, use the one before: {type(error).__name__}: {error}", stacklevel=2)
        self._room, self._planned = HostRoom(), None


def found_at(path: str | Path, io: CheckpointIO, world: World) -> tuple[str, bool]:
    """Where a checkpoint is, and whether it is sharded. Collective.

    Raises:
        CheckpointNotFoundError: there is none.
        PiperError: the processes disagree.
    """

    def look() -> tuple[str, bool]:
        if "://" in str(path):
            return str(path), False
        if of_files(io, path) is not None:
            place = located(Path(path))
            return str(place), place.is_dir()
        return str(path), _is_sharded(Path(path))

    found = together(world, f"loading {path}", look)
    if len(set(found)) > 1:
        raise PiperError(f"the processes find different checkpoints under {path}, by rank: {found}; give them all the same one")
    return found[0]


def read_plain(path: str | Path, io: CheckpointIO, world: World, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The content of a checkpoint that is one file, which `read` gives, if it is what was saved. Collective.

    Remote files and other plugins than Lightning's own are read in their own way.

    Raises:
        PiperError: on every process, if on one it is damaged or cannot be read.
    """
    if of_files(io, path) is None:
        return read()
    check_records(path, world)
    content: dict[str, Any] = {}
    together(world, f"loading {path}", lambda: content.update(read()))
    return content


def check_target(path: str | Path, storage_options: Any | None, io: CheckpointIO) -> None:
    """Can a sharded checkpoint be written there?

    Raises:
        PiperError: not in this way.
    """
    if "://" in str(path):
        raise PiperError(f"a sharded checkpoint cannot be written to {path}; give a directory that all processes share")
    if storage_options is not None or of_files(io, path) is None:
        raise PiperError(
            "PiperStrategy(checkpoint='sharded') writes by torch.distributed.checkpoint: storage_options and checkpoint plugins "
            f"but AsyncCheckpointIO() ({type(io).__name__}) do not apply; leave them out, or use checkpoint='consolidated'"
        )


def _is_sharded(path: Path) -> bool:
    """A plugin may write directories of its own."""
    return (path / MANIFEST).is_file()


def of_files(io: CheckpointIO, path: str | Path) -> TorchCheckpointIO | None:
    """Lightning's own plugin for files, if it is what writes there, at once or behind the training."""
    found = io.checkpoint_io if is_exactly(io, AsyncCheckpointIO) and not _is_changed(io) else io  # type: ignore[attr-defined]
    return found if type(found) is TorchCheckpointIO and not _is_changed(found) and "://" not in str(path) else None


def _is_changed(io: CheckpointIO) -> bool:
    """A plugin of the user's is also one of Lightning's that was given other methods."""
    return any(name in vars(io) for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint"))


def is_behind(io: CheckpointIO, path: str | Path) -> bool:
    """Is what is saved there to be written behind the training, in the way of this package?"""
    return is_exactly(io, AsyncCheckpointIO) and of_files(io, path) is not None


def seed_of(content: Mapping[str, Any]) -> int | None:
    """The seed that a checkpoint brings; None if it was written without this strategy."""
    seed = content.get(KEY, {}).get("seed")
    return int(seed) if seed is not None else None


def consolidate(path: str | os.PathLike[str], out: str | os.PathLike[str], weights_only: bool = True) -> None:
    """Make a plain Lightning checkpoint of a sharded one, in one process that has room for all of it.

    Args:
        path: of the sharded checkpoint.
        out: of the file that is written.
        weights_only: refuse content that could run code, such as hyper-parameters of classes of yours.

    Raises:
        PiperError: there is no sharded checkpoint, or it is damaged.
    """
    opened = open_checkpoint(os.fspath(path), World(0, 1, torch.device("cpu")), weights_only)
    content = resolved(opened.common, read_whole(opened, sorted(referenced(opened.common))))
    save_in_one_go(TorchCheckpointIO(), content, Path(out), None)
