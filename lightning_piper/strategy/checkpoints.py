"""Checkpoints under Lightning's names: a plain Lightning checkpoint is a file, a sharded one a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lightning_piper.checkpoint.files import MANIFEST, located, prepare, publish, remove
from lightning_piper.checkpoint.records import check_records
from lightning_piper.checkpoint.sharded import open_checkpoint, read_whole
from lightning_piper.checkpoint.state import Loading, referenced, resolved
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialize import Known
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.placeholders import check_values
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
    if not _is_ours(io, path):
        io.save_checkpoint(content, path, storage_options=storage_options)
        return
    path = Path(path)
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
    if not _is_ours(io, path) and not _is_sharded(Path(path)):
        io.remove_checkpoint(path)
    else:
        remove(Path(path))


def found_at(path: str | Path, io: CheckpointIO, world: World) -> tuple[str, bool]:
    """Where a checkpoint is, and whether it is sharded. Collective.

    Raises:
        CheckpointNotFoundError: there is none.
        PiperError: the processes disagree.
    """

    def look() -> tuple[str, bool]:
        if "://" in str(path):
            return str(path), False
        if _is_ours(io, path):
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
    if not _is_ours(io, path):
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
    if storage_options is not None or type(io) is not TorchCheckpointIO:
        raise PiperError(
            "PiperStrategy(checkpoint='sharded') writes by torch.distributed.checkpoint: storage_options and checkpoint plugins "
            f"({type(io).__name__}) do not apply; leave them out, or use checkpoint='consolidated'"
        )


def _is_sharded(path: Path) -> bool:
    """A plugin may write directories of its own."""
    return (path / MANIFEST).is_file()


def _is_ours(io: CheckpointIO, path: str | Path) -> bool:
    return type(io) is TorchCheckpointIO and "://" not in str(path)


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
