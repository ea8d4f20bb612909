"""Folders that other strategies of Lightning have saved, and how to convert them."""

from __future__ import annotations

import re

from lightning_piper.checkpoint.folders import Folder, read

# Files of a folder of DeepSpeed, or of the folder of a step in it.
_DEEPSPEED = re.compile(r"zero_to_fp32\.py|(zero_pp_rank_\d+_)?mp_rank_\d+_.*\.pt")


def conversion_of(folder: Folder) -> str | None:
    """Return which strategy has saved a folder, and how to convert it; None if no known strategy has."""
    names = folder.names()
    content = read(folder, "meta.pt") if {"meta.pt", ".metadata"} <= set(names) else b""
    # A checkpoint of this package that has lost its manifest has the same files, and its entry in `meta.pt`.
    if b"pytorch-lightning_version" in content and b"lightning_piper" not in content:
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
