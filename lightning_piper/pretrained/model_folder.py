"""The folder of a Hugging Face model. A save fills it while an earlier model in it can still be loaded.

All new files are first written into a folder inside of the model's folder. When they are complete, they move
to their names. The last one is the index of the weights, or the only file of weights, and decides which model
the folder has. If there are several files of weights, they have names that the earlier model does not use.
If the configuration changes, the earlier index or only file is removed first, because the earlier weights do
not belong to the new configuration.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_piper.checkpoint.folders import sync
from lightning_piper.checkpoint.safetensors_files import INDEX, SINGLE
from lightning_piper.errors import PiperError

UNFINISHED = ".piper-unfinished"  # the folder of files that are not complete; loading ignores it
CONFIGURATION = "config.json"
SHARD = "model{}-{:05d}-of-{:05d}.safetensors"  # a file of weights: a tag, its number, the number of files
SHARDS = "model-*-of-*.safetensors"  # pattern of the files of weights of any save
ADAPTER_CONFIGURATION = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class ModelFolder:
    """A folder into which one model is saved.

    Only rank 0 calls its methods, except `unfinished`.

    Args:
        path: The folder. It need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, model: Any, count: int) -> list[str]:
        """Write all files but the weights into the folder of unfinished files. Return the names that `count`
        files of weights are to have: `SINGLE` for one file, otherwise names such as
        `model-00001-of-00002.safetensors`, with a random tag if the earlier model uses one of these names."""
        self.discard()
        folder = self.unfinished()
        _write_configuration(model, folder)
        if count == 1:
            return [SINGLE]
        names = [SHARD.format("", number, count) for number in range(1, count + 1)]
        if any((self._path / name).exists() for name in names):
            tag = f"-{uuid.uuid4().hex[:8]}"
            names = [SHARD.format(tag, number, count) for number in range(1, count + 1)]
        return names

    def unfinished(self) -> Path:
        """Return the folder for files that are not complete.

        Each process makes the folder, because a network file system may not show rank 0's folder yet. If the
        processes do not share the folder, `finish` raises an error.
        """
        path = self._path / UNFINISHED
        path.mkdir(parents=True, exist_ok=True)
        return path

    def discard(self) -> None:
        """Remove the files of a save that is not complete."""
        shutil.rmtree(self._path / UNFINISHED, ignore_errors=True)

    def finish(self, sizes: Mapping[str, int], weights: Mapping[str, str], total: Mapping[str, int]) -> None:
        """Let the complete files replace the earlier model.

        Args:
            sizes: Name of each file of weights -> its size in bytes.
            weights: Name of each tensor -> name of its file.
            total: The metadata of the index, such as `total_size`. It is written only if there are several
                files of weights.

        Raises:
            PiperError: A file of another process is missing here or has the wrong size.
        """
        folder = self.unfinished()
        for name, size in sizes.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise PiperError(
                    f"piper.save_pretrained: rank 0 does not see {path} as it was written. Give a "
                    "folder that all processes share, on one machine or in a network file system [PIPER-K004]"
                )
        if len(sizes) > 1:
            index = {"metadata": dict(total), "weight_map": dict(weights)}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        self._publish(INDEX if len(sizes) > 1 else SINGLE)

    def _publish(self, last: str) -> None:
        """Move all files to their names, and remove the weights of the earlier model.

        Args:
            last: Name of the file that makes the new weights visible.
        """
        folder, path = self.unfinished(), self._path
        names = {each.name for each in folder.iterdir()}
        # loading prefers SINGLE, so the weights of INDEX never appear
        replace_files(folder, path, CONFIGURATION, (INDEX, SINGLE), last)
        (path / (SINGLE if last == INDEX else INDEX)).unlink(missing_ok=True)
        sync(path)
        for each in path.glob(SHARDS):
            if each.name not in names:
                each.unlink()
        folder.rmdir()

    def finish_adapters(self) -> None:
        """Let new adapters, in the folder of unfinished files, replace earlier adapters. Each adapter has a
        folder of its own, except the default adapter."""
        folder = self.unfinished()
        for configuration in sorted(folder.rglob(ADAPTER_CONFIGURATION)):
            source = configuration.parent
            target = self._path / source.relative_to(folder)
            target.mkdir(exist_ok=True)
            replace_files(source, target, ADAPTER_CONFIGURATION, (ADAPTER_WEIGHTS,), ADAPTER_WEIGHTS)
        self.discard()


def replace_files(folder: Path, path: Path, configuration: str, weights: Sequence[str], last: str) -> None:
    """Move the files of `folder` into the folder `path`, where they replace files of the same names. Even if a
    process is killed during the move, the weights in `path` belong to its configuration.

    Args:
        configuration: The name of the file that describes the weights.
        weights: Names under which `path` may have earlier weights. They are removed first if the
            configuration changes.
        last: Name of the file that makes the new weights visible.
    """
    names = sorted(each.name for each in folder.iterdir() if each.is_file())
    for name in names:
        sync(folder / name)
    sync(folder)
    old = path / configuration
    if old.exists() and old.read_bytes() != (folder / configuration).read_bytes():
        for name in weights:
            (path / name).unlink(missing_ok=True)
        sync(path)
    for name in sorted(names, key=lambda name: name == last):
        os.replace(folder / name, path / name)
    sync(path)


def _write_configuration(model: Any, folder: Path) -> None:
    """Write all files but the weights, as transformers does."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
