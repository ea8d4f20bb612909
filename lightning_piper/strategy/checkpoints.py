"""Saving, finding and loading a strategy's checkpoints. A plain Lightning checkpoint is a file. A sharded
checkpoint is a directory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

from lightning_piper.checkpoint.distributed_folder import is_distributed, read_distributed
from lightning_piper.checkpoint.files import MANIFEST
from lightning_piper.checkpoint.late_copies import HostRoom, LateCopies
from lightning_piper.checkpoint.locations import checkpoints_in, is_remote, is_writable, location_of
from lightning_piper.checkpoint.records import check_records
from lightning_piper.checkpoint.sharded_checkpoint import Saving, open_checkpoint, read_whole
from lightning_piper.checkpoint.snapshot import snapshot
from lightning_piper.checkpoint.state import Loading, referenced, resolved
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.common.lightning_packages import is_a, is_exactly
from lightning_piper.common.module_copies import finalized
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.holdings.materialization import Known
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.placeholders import check_values
from lightning_piper.processes.background import BackgroundThread
from lightning_piper.processes.failure import GRACE
from lightning_piper.processes.world import World, together
from lightning_piper.strategy._lightning import without_loader_states

# Key of the entry that a fit adds to its checkpoints: `seed`, the seed of the steps' random numbers, `loaders`, the
# positions of its training loaders, `local_sgd`, the state of local SGD, and `monitored`, the values that schedulers
# monitor. A plain Trainer does not need the entry.
KEY = "lightning_piper"


@dataclass
class Restored:
    """A loaded checkpoint, from loading to the end of the run.

    Attributes:
        sharded: The checkpoint, if it is sharded; None for a plain checkpoint or without a checkpoint.
        seed: Seed of the steps' random numbers; None if the checkpoint was written without this strategy.
        values: Values for the module's tensors on the meta device, by canonical name.
        local_sgd: The state of local SGD, as `local_sgd_entry` returns it; None without one.
        monitored: The values that the fit's schedulers monitor, as `_lightning.monitored` returns them; None without
            such a scheduler.
        outside: The state that checkpoints do not have, if a spare has replaced a process.
    """

    sharded: Loading | None = None
    seed: int | None = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    local_sgd: dict[str, Any] | None = None
    monitored: dict[str, torch.Tensor] | None = None
    outside: Mapping[str, Any] = field(default_factory=dict)

    def known(self, module: nn.Module) -> Known:
        """Return the values that the checkpoint, and files of pretrained models, have for a module on the
        meta device.

        The files do not count for a module that is still distributed from an earlier run, because it has
        newer values.
        """
        known = Known(self.values, frozenset() if self.sharded is None else self.sharded.waiting)
        return known if parts_of(module) is not None else known.with_stored(module)

    def take_entry(self, content: dict[str, Any]) -> Mapping[str, Any] | None:
        """Remove Piper's entry from the content of a checkpoint. Note its seed, its state of local SGD and
        its monitored values, and return its positions of loaders.

        With positions, the content loses the states of loaders that the Trainer would load. Seed and positions
        are None if the entry does not have them, such as in a plain Trainer's checkpoint.
        """
        entry = content.pop(KEY, {})
        seed, positions = entry.get("seed"), entry.get("loaders")
        self.seed, self.local_sgd = None if seed is None else int(seed), entry.get("local_sgd")
        self.monitored = entry.get("monitored")
        if positions is not None:
            without_loader_states(content)
        found: Mapping[str, Any] | None = positions
        return found

    def read(self, parts: Ownership) -> None:
        """If the checkpoint is sharded, read this process's part of it. `parts` is the distributed module.
        Collective."""
        if self.sharded is not None:
            self.sharded.distributed(parts)


def save_in_one_go(
    io: CheckpointIO, content: dict[str, Any], path: str | Path, storage_options: Any | None
) -> None:
    """Write a checkpoint that is one file, so that an interrupted save leaves the earlier file: under a
    temporary name on a disk, or after a copy of the earlier file in a remote store.

    Plugins other than Lightning's own write to the path itself.

    Raises:
        PiperError: The content has tensors whose values are on other processes. Or the user replaced the
            plugin's method by a function that does not write to the given path. Or the store does not have all
            of the file.
    """
    check_values(content)
    plain = of_files(io, path)
    if plain is None:
        io.save_checkpoint(content, path, storage_options=storage_options)
        return
    io, location = plain, location_of(path)
    target = location.begin_file()
    try:
        io.save_checkpoint(content, target, storage_options=storage_options)
        if not location.exists(target):
            raise PiperError(
                f"{type(io).__name__}.save_checkpoint wrote nothing to {target}. To write to another path, or later, "
                "use a plugin of your own: a subclass of TorchCheckpointIO or CheckpointIO [PIPER-K005]"
            )
        location.publish_file(target)
    finally:
        location.discard_file(target)


def remove_in_one_go(io: CheckpointIO, path: str | Path) -> None:
    """Remove a checkpoint, which is a file or a directory. A plugin other than Lightning's own removes its
    checkpoints itself."""
    if of_files(io, path) is None and not _is_sharded(Path(path)):
        io.remove_checkpoint(path)
    else:
        location_of(path).remove()


class Saves:
    """The writer of a strategy's checkpoints. It writes immediately, or in the background with Lightning's
    `AsyncCheckpointIO`.

    In the background, the content is copied into host memory that later checkpoints reuse. A thread then
    writes it like a foreground save, so the checkpoint is complete or absent. There is one write at a time.
    If a write fails, the next save or the end of the run raises its error.

    The thread also copies the tensors that only an update or users' code changes. Call `late.settle` before each
    update.

    Attributes:
        late: The copies of the last checkpoint.
    """

    def __init__(self) -> None:
        self._behind, self._room = BackgroundThread("piper-checkpoints"), HostRoom()
        self.late = LateCopies(self._room)
        self._planned: Saving | None = None  # the previous sharded save, whose plan the next one may reuse

    def __reduce__(self) -> Any:
        return Saves, ()  # a copy of the strategy has its own writer

    def plain(
        self,
        io: CheckpointIO,
        content: dict[str, Any],
        path: str | Path,
        storage_options: Any | None,
        steady: Collection[int] | None,
    ) -> None:
        """Save a checkpoint that is one file.

        Args:
            io: The checkpoint plugin.
            content: The checkpoint.
            path: Path of the file.
            storage_options: Options for the plugin.
            steady: None to write the file immediately. Otherwise a thread writes it in the background, unless a copy of
                the checkpoint would run `__del__` of the user's objects. These are the addresses of the memory that
                the thread may also copy, as `LateCopies` takes them.

        Raises:
            Exception: This checkpoint, or the previous one, cannot be saved.
        """
        self.wait()
        if steady is None or next(finalized(content), None) is not None:
            save_in_one_go(io, content, path, storage_options)
            return
        check_values(content)
        late = LateCopies(self._room, steady)
        copy = snapshot(content, late)
        self._start(late, lambda: save_in_one_go(io, copy(), path, storage_options))

    def sharded(
        self,
        path: str | Path,
        ranges: Sequence[TensorRange],
        content: dict[str, Any],
        world: World,
        steady: Collection[int] | None,
    ) -> None:
        """Save a sharded checkpoint. Collective.

        Args:
            path: Path of the directory.
            ranges: The parts of tensors that this process writes.
            content: The checkpoint, with references in place of these tensors.
            steady: As in `plain`.

        Raises:
            PiperError: This checkpoint, or the previous one, cannot be saved; raised on every process.
        """
        self.wait()
        if next(finalized(content), None) is not None:
            steady = None
        late = None if steady is None else LateCopies(self._room, steady)
        self._planned = saving = Saving(path, ranges, content, world, self._planned, late)
        if late is None:
            saving.write(world)
            return
        apart = world.apart("checkpoints behind the training")
        self._start(late, lambda: saving.write(apart))

    def _start(self, late: LateCopies, write: Callable[[], None]) -> None:
        """Let the thread make the copies and then write them. Watch this thread until the copies are made."""

        def work() -> None:
            late.make()
            write()

        self._behind.start(work)
        self.late = late
        late.watch()

    def remove(self, io: CheckpointIO, path: str | Path) -> None:
        """Remove a checkpoint: now, or in the background after the running write. Keep it if this write or an
        earlier write has failed, because a complete checkpoint must remain."""
        self._behind.then(lambda: remove_in_one_go(io, path))

    def wait(self) -> None:
        """Wait until the background thread has written everything.

        Raises:
            Exception: The error of a write that failed.
        """
        self.late.settle()
        self._behind.wait()

    def end(self, failed: bool) -> None:
        """Finish writing at the end of the run. After a failure, wait at most `GRACE` seconds, in which other
        processes may also end.

        Raises:
            Exception: The last write failed; after a failed run this is a warning instead.
        """
        self.late.settle()
        try:
            self._behind.wait(GRACE if failed else None)
        except Exception as error:
            if not failed:
                raise
            warnings.warn(
                f"the last checkpoint is not complete: {type(error).__name__}: {error}. Use the checkpoint "
                "before it [PIPER-W022]",
                stacklevel=2,
            )
        self._room, self._planned = HostRoom(), None
        self.late = LateCopies(self._room)


def found_at(path: str | Path, io: CheckpointIO, world: World) -> tuple[str, bool]:
    """Return the path of a checkpoint as text, and whether the checkpoint is sharded. Collective.

    After an interrupted save, this may be the path to which Piper has moved the earlier checkpoint. A path
    that Piper cannot write (`https://...`), or the path of a plugin other than Lightning's own, is returned
    unchanged, whether it exists or not.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        PiperError: The processes find different checkpoints.
    """

    def look() -> tuple[str, bool]:
        if of_files(io, path) is not None:
            return location_of(path).found()
        return str(path), "://" not in str(path) and _is_sharded(Path(path))

    found = together(world, f"loading {path}", look)
    if len(set(found)) > 1:
        other = next(rank for rank, each in enumerate(found) if each != found[0])
        raise PiperError(
            f"the processes find different checkpoints under {path}: rank 0 finds {_shown(*found[0])}, and rank "
            f"{other} finds {_shown(*found[other])}. Give all processes the same checkpoint [PIPER-K004]"
        )
    return found[0]


def _shown(path: str, sharded: bool) -> str:
    return f"{path} ({'a sharded' if sharded else 'a plain'} checkpoint)"


def read_plain(
    path: str | Path, io: CheckpointIO, world: World, read: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Check the file of a checkpoint and return the content that `read` returns. Collective.

    Files of web servers, and of plugins other than Lightning's own, are read without a check.

    Raises:
        PiperError: The file is damaged or unreadable on some process; raised on every process.
    """
    if of_files(io, path) is None:
        return read()
    check_records(path, world)
    content: dict[str, Any] = {}
    together(world, f"loading {path}", lambda: content.update(read()))
    return content


def check_target(path: str | Path, storage_options: Any | None, io: CheckpointIO) -> None:
    """Check that a sharded checkpoint can be written to a path with these options and this plugin.

    Raises:
        PiperError: Nothing can be written to the address, there are storage options, or the plugin is neither
            Lightning's own for files nor `AsyncCheckpointIO` around it.
    """
    if "://" in str(path) and not is_writable(path):
        raise PiperError(
            f"a sharded checkpoint cannot be written to {path}. Give a directory that all processes share, or "
            "the address of a store, such as s3://bucket/folder [PIPER-K005]"
        )
    found = (
        "the storage options"
        if storage_options is not None
        else f"the checkpoint plugin {type(_inside(io)).__name__}"
    )
    if storage_options is not None or of_files(io, path) is None:
        raise PiperError(
            "PiperStrategy(checkpoint='sharded') writes with torch.distributed.checkpoint, so it does not support "
            f"{found}. Remove {'them' if storage_options is not None else 'it'} [PIPER-K005]"
        )


def _is_sharded(path: Path) -> bool:
    """Return whether the path is a sharded checkpoint. Any other directory may belong to a plugin."""
    return (path / MANIFEST).is_file()


def of_files(io: CheckpointIO, path: str | Path) -> TorchCheckpointIO | None:
    """Return Lightning's own plugin for files if that plugin writes to this path, immediately or in the
    background; otherwise None."""
    found = _inside(io)
    return (
        found if type(found) is TorchCheckpointIO and not _is_changed(found) and is_writable(path) else None
    )


def _inside(io: CheckpointIO) -> CheckpointIO:
    """Return the plugin inside of Lightning's own `AsyncCheckpointIO`, or the given plugin."""
    if is_exactly(io, AsyncCheckpointIO) and not _is_changed(io):
        return io.checkpoint_io  # type: ignore[attr-defined, no-any-return]
    return io


def _is_changed(io: CheckpointIO) -> bool:
    """Return whether methods of the plugin's instance were replaced, which makes it a user's plugin."""
    return any(name in vars(io) for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint"))


def is_behind(io: CheckpointIO, path: str | Path) -> bool:
    """Return whether this package writes checkpoints to this path in the background."""
    return is_exactly(io, AsyncCheckpointIO) and of_files(io, path) is not None


def own_entry(**entry: Any) -> dict[str, Any]:
    """Return Piper's entry of a checkpoint as `{KEY: ...}`, without values that are None; empty if all are None."""
    found = {name: value for name, value in entry.items() if value is not None}
    return {KEY: found} if found else {}


def consolidate(path: str | os.PathLike[str], out: str | os.PathLike[str], weights_only: bool = True) -> None:
    """Convert a sharded checkpoint into a plain Lightning checkpoint, in one process with enough memory for
    all of it. `lightning-piper convert` does the same.

    Args:
        path: Path of the sharded checkpoint, or its address in a remote store. Or the path of a folder that
            `FSDPStrategy(state_dict_type="sharded")` or
            `ModelParallelStrategy(save_distributed_checkpoint=True)` has saved.
        out: Path or address of the file to write.
        weights_only: Reject content that could run code, such as hyperparameters of your own classes. The file
            `.metadata` of Lightning's folders can run code nevertheless.

    Raises:
        PiperError: There is no sharded checkpoint, or it is damaged. Or `out` is a folder.
    """
    if location_of(out).root().is_folder():
        raise PiperError(
            f"{os.fspath(out)} is a folder, which the converted file would replace. Give the name of a file that "
            "does not exist yet, such as 'plain.ckpt' [PIPER-K005]"
        )
    local = Path(path)
    if is_distributed(local) and not (local / MANIFEST).exists():
        save_in_one_go(TorchCheckpointIO(), read_distributed(local, weights_only), os.fspath(out), None)
        return
    opened = open_checkpoint(os.fspath(path), World(0, 1, torch.device("cpu")), weights_only)
    content = resolved(opened.common, read_whole(opened, sorted(referenced(opened.common))))
    save_in_one_go(TorchCheckpointIO(), content, os.fspath(out), None)


def last_checkpoint(folder: str | os.PathLike[str], name: str = "last") -> str | None:
    """Return the newest complete checkpoint in a folder. Pass it to `fit(ckpt_path=...)`.

    Use it for remote folders. `fit(ckpt_path="last")` of Lightning 2.6 looks for their addresses on the disk, finds
    nothing, and the training starts from the beginning.

    Args:
        folder: A local folder, or an address such as "s3://bucket/run".
        name: The beginning of the checkpoints' names.

    Returns:
        The path or address. None if there is no complete checkpoint, so that the fit starts from the beginning.
    """
    times = {path: location_of(path).saved_at() for path in checkpoints_in(folder, name)}
    complete = {path: time for path, time in times.items() if time is not None}
    return max(complete, key=complete.__getitem__, default=None)


def warn_of_unused_last(trainer: pl.Trainer) -> None:
    """Warn if the first fit of a Trainer starts from the beginning although its remote folder has a last
    checkpoint."""
    if trainer.ckpt_path is not None or trainer.global_step or not trainer.is_global_zero:
        return
    for callback in trainer.checkpoint_callbacks:
        if not is_a(callback, ModelCheckpoint) or not callback.save_last or not callback.dirpath:
            continue
        folder, found = os.fspath(callback.dirpath), None
        with suppress(Exception):  # the first save reports a store that cannot be read
            found = last_checkpoint(folder) if is_remote(folder) else None
        if found is not None:
            warnings.warn(
                f"this fit starts from the beginning, but {found} is a checkpoint. Lightning's "
                "ckpt_path='last' does not find remote checkpoints: to resume, pass "
                f"fit(ckpt_path=lightning_piper.strategy.last_checkpoint({folder!r})) [PIPER-W028]",
                stacklevel=2,
            )
