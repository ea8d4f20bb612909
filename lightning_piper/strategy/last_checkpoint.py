"""The last checkpoint in a folder, which may be in a remote store.

`fit(ckpt_path="last")` of Lightning 2.6 lists a remote folder, loses the protocol of the addresses, and looks for
them on the disk. It finds nothing, and the training starts from the beginning.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_piper.checkpoint.locations import checkpoints_in, is_remote, location_of
from lightning_piper.common.lightning_packages import is_a


def last_checkpoint(folder: str | os.PathLike[str], name: str = "last") -> str | None:
    """Return the newest complete checkpoint in a folder. Pass it to `fit(ckpt_path=...)`.

    Use it for remote folders, for which Lightning's `ckpt_path="last"` finds no checkpoint.

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
    """Warn if a fit starts from the beginning although its remote folder has a last checkpoint."""
    if trainer.ckpt_path is not None or not trainer.is_global_zero:
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
