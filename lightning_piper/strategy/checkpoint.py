"""Checkpoint files: plain Lightning ones, replaced in one go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

KEY = "lightning_piper"  # what a plain Trainer does not need: the seed of the steps' random numbers


def save_in_one_go(io: CheckpointIO, content: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
    """Write under a temporary name and rename: a save that is interrupted leaves the earlier file as it was.

    Remote files and other plugins than Lightning's own are written in their own way.
    """
    if type(io) is not TorchCheckpointIO or "://" in str(path):
        io.save_checkpoint(content, path, storage_options=storage_options)
        return
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        io.save_checkpoint(content, temporary, storage_options=storage_options)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def seed_of(content: Mapping[str, Any]) -> int | None:
    """The seed that a checkpoint brings; None if it was written without this strategy."""
    seed = content.get(KEY, {}).get("seed")
    return int(seed) if seed is not None else None
