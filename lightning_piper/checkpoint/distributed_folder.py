"""Reads the folders that Lightning's `FSDPStrategy` and `ModelParallelStrategy` save, as plain Lightning
checkpoints.

Such a folder has `meta.pt` with everything besides tensors, and the files of `torch.distributed.checkpoint`:
the module's tensors under `model` (FSDP) or `state_dict`, and each optimizer's state under `optimizer_0`,
`optimizer_1`, with the names of parameters. A plain checkpoint has numbers of parameters instead.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_piper.errors import PiperError

_MODULE = ("model", "state_dict")


def is_distributed(path: Path) -> bool:
    """Return whether a path is a folder that these strategies of Lightning have saved."""
    return (path / "meta.pt").is_file() and (path / ".metadata").is_file()


def read_distributed(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the content of such a folder as a plain Lightning checkpoint, with all tensors in host memory.

    `.metadata` is a pickle, which `weights_only` does not restrict.

    Args:
        weights_only: Reject content of `meta.pt` that could run code.

    Raises:
        PiperError: A file is damaged, has content that `weights_only` forbids, or does not have the module.
    """
    try:
        content: dict[str, Any] = torch.load(path / "meta.pt", "cpu", weights_only=weights_only)
        metadata = dcp.FileSystemReader(path).read_metadata()
        flat = {key: _room(of) for key, of in metadata.state_dict_metadata.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this process reads alone
            dcp.load(flat, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise _unreadable(path, error, weights_only) from error
    saved = _nested(flat, metadata)
    name = next((name for name in _MODULE if name in saved), None)
    if name is None:
        raise PiperError(
            f"{path} has {', '.join(map(repr, sorted(saved))) or 'no tensors'}, but not the module ('model' or 'state_dict'). "
            "Give a folder that FSDPStrategy or ModelParallelStrategy has saved [PIPER-K002]"
        )
    optimizers = [f"optimizer_{i}" for i in range(sum(key.startswith("optimizer_") for key in saved))]
    states = [_numbered(saved.get(key, {}), f"{path}: the state of {key!r}") for key in optimizers]
    return {**content, "state_dict": saved[name], "optimizer_states": states}


def _unreadable(path: Path, error: BaseException, weights_only: bool) -> PiperError:
    """Return the error for a folder that torch cannot read."""
    if isinstance(error, CheckpointException):  # its text has stack traces
        error, *_ = next(iter(error.failures.values()))
    forbidden = None
    if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path / "meta.pt"):
        forbidden = re.search(
            r"GLOBAL (\S+)", str(error)
        )  # torch writes "weights_only" into every such error
    if forbidden is not None:
        return PiperError(
            f"{path / 'meta.pt'} has {forbidden[1]}, which weights_only=True does not load. If you trust the "
            "checkpoint, convert it with weights_only=False (on the command line: --unsafe) [PIPER-K007]"
        )
    if isinstance(error, ImportError) or str(error).startswith("Can't get attribute"):  # pickle's
        return PiperError(
            f"{path} has an object whose class cannot be imported: {error}. Convert it in a script that defines or "
            "imports this class in the same way as the training did [PIPER-K007]"
        )
    if isinstance(error, AttributeError) and not weights_only:  # of the method that restores the object
        return PiperError(
            f"{path} has an object that cannot be read: {error}. Convert it in a script whose classes are the classes "
            "of the training [PIPER-K007]"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return PiperError(
            f"{path} cannot be read, because this process has too little memory for its tensors. Read it on a machine with "
            "more memory [PIPER-K002]"
        )
    # Around this line, torch recommends weights_only=False, which does not help.
    cause = str(error).split("WeightsUnpickler error:")[-1].strip().partition("\n")[0].rstrip(".")
    return PiperError(
        f"{path} cannot be read, because a file is missing or damaged: {type(error).__name__}: {cause}. Use "
        "another checkpoint [PIPER-K002]"
    )


def _room(of: Any) -> torch.Tensor | None:
    """Return memory for a saved tensor; None for another object."""
    return torch.empty(of.size, dtype=of.properties.dtype) if isinstance(of, TensorStorageMetadata) else None


def _nested(flat: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Return values in the dicts and lists from which they were saved."""
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        *outer, last = paths.get(key, (key,))
        inner = root
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    found: dict[str, Any] = _with_lists(root)
    return found


def _with_lists(value: Any) -> Any:
    """Replace dicts whose keys are the numbers from 0 by lists."""
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(inner) for key, inner in value.items()}
    if found and set(found) == set(range(len(found))):
        return [found[i] for i in range(len(found))]
    return found


def _numbered(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace the names of parameters in an optimizer's state by their numbers in the parameter groups.

    Args:
        where: The state's name for errors.

    Raises:
        PiperError: The state does not have parameter groups, or has a parameter that is in none of them.
    """
    groups, states = state.get("param_groups"), state.get("state", {})
    if groups is None:
        raise PiperError(
            f"{where} does not have 'param_groups', so the parameter groups are not known. Give a folder that "
            "FSDPStrategy or ModelParallelStrategy has saved [PIPER-K002]"
        )
    names = [name for group in groups for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    if lost := sorted(states.keys() - number.keys()):
        raise PiperError(
            f"{where} has the parameter {lost[0]!r}, but no parameter group has it. Use another checkpoint "
            "[PIPER-K002]"
        )
    return {
        "state": {number[name]: of_param for name, of_param in states.items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }
