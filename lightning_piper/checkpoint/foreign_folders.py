"""Folders that other strategies of Lightning have saved, and how to convert them."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from typing import Any

from lightning_piper.checkpoint.folders import Folder, read

# Files of a folder of DeepSpeed, or of the folder of a step in it.
_DEEPSPEED = re.compile(r"zero_to_fp32\.py|(zero_pp_rank_\d+_)?mp_rank_\d+_.*\.pt")


def conversion_of(folder: Folder) -> str | None:
    """Return which strategy has saved a folder, and how to convert it; None if no known strategy has."""
    names = folder.names()
    keys = keys_of(read(folder, "meta.pt")) if {"meta.pt", ".metadata"} <= set(names) else set()
    # A checkpoint of this package that has lost its manifest has the same files. But its `meta.pt` says which tensors
    # `state_dict` has. The strategies of Lightning write this only into the other files.
    if "pytorch-lightning_version" in keys and "state_dict" not in keys:
        return (
            f"{folder} is a folder that FSDPStrategy or ModelParallelStrategy has saved. Convert it first: "
            f"lightning-piper convert {folder} plain.ckpt. Then resume from plain.ckpt"
        )
    if any(_DEEPSPEED.fullmatch(name) for name in names):
        whole = str(folder) if "latest" in names or "zero_to_fp32.py" in names else "the folder around it"
        return (
            f"{folder} is a folder that DeepSpeed has saved. Where DeepSpeed is installed, convert {whole} with "
            "lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict(folder, 'plain.ckpt'). The "
            "file has the parameters and no states of optimizers, so load it with load_from_checkpoint('plain.ckpt'), "
            "and fit without ckpt_path"
        )
    return None


def keys_of(archive: bytes) -> set[str]:
    """Return the keys of the dict that `torch.save` wrote into an archive; an empty set if it did not write one. No code
    of the archive runs."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            name = next(name for name in file.namelist() if name.endswith("/data.pkl"))
            content = _KeysUnpickler(io.BytesIO(file.read(name))).load()
    except Exception:  # a damaged pickle may raise anything
        return set()
    return {key for key in content if isinstance(key, str)} if isinstance(content, dict) else set()


class _KeysUnpickler(pickle.Unpickler):
    """Reads pickled content without its classes and functions. Each of their objects is a `_Placeholder`."""

    def find_class(self, module: str, name: str) -> Any:
        return _Placeholder

    def persistent_load(self, pid: Any) -> Any:
        return None


class _Placeholder:
    """An object of a class that is not imported. It takes its state and its items, and keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def _take(self, *items: Any) -> None: ...

    append = extend = add = update = _take
