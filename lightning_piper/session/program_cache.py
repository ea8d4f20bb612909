"""Files with the programs that earlier searches chose, by model, batch and machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_piper import cache
from lightning_piper.accelerators.kinds import name_of
from lightning_piper.capture import flatten
from lightning_piper.capture.graph_cache.cached_graphs import VERSIONS
from lightning_piper.directives import Directive, parse
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.costs.blocks import BlockCut, text_of
from lightning_piper.search.program_writer import TAG, Written


@dataclass(frozen=True)
class ChosenProgram:
    """A program that a search chose, with lines that explain the choice.

    Attributes:
        written: The program.
        lines: The explanation for the user.
        predicted: The predicted seconds of a step.
        file: The file that keeps the choice; None if it is not known.
    """

    written: Written
    lines: tuple[str, ...]
    predicted: float
    file: Path | None = None


def folder() -> Path:
    return cache.folder("programs")


def file_of(
    module: nn.Module,
    batch: Any,
    cut: BlockCut,
    world: World,
    memory: int,
    optimizer: torch.optim.Optimizer,
    states: float,
    parts: Sequence[object],
) -> Path:
    """Return the path of the file for a choice, named by a hash of everything that the choice depends on.

    The hash covers the modules, their tensors, the operations of the step, the batch, the optimizer and its
    state, the parts of the search space, the names of the schedules, versions, devices and their memory.
    """
    spec, code = flatten(batch)[1], cut.step.at(cut.step.size)
    about = [
        repr(cut.groups), *(text_of(code, region.index) for region in code.regions),
        *(f"{name} {type(part).__qualname__}" for name, part in module.named_modules()),
        *(f"{name} {tuple(x.shape)} {x.dtype} {x.requires_grad}" for name, x in module.named_parameters()),
        *_about(optimizer), repr(states), repr(parts), repr(spec.key), VERSIONS,
        platform.node(), platform.processor(), str(os.cpu_count()),
        name_of(world.device), *SEARCHED,
        str(world.size), str(torch.get_num_threads()), str(round(memory, -8)),
    ]  # fmt: skip
    return folder() / f"{hashlib.blake2b(chr(10).join(about).encode(), digest_size=16).hexdigest()}.json"


def _about(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return an optimizer's class name and the options that decide its state and computation.

    For a number, the text says only whether it is 0.
    """
    return [
        type(optimizer).__qualname__,
        *sorted(
            {
                f"{name} {value if isinstance(value, bool | str | None) else _some(value)}"
                for group in optimizer.param_groups
                for name, value in group.items()
                if name != "params"
            }
        ),
    ]


def _some(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_some(x) for x in value]
    return bool(value) if isinstance(value, int | float) else type(value).__qualname__


def read(path: Path) -> ChosenProgram | None:
    """Return the choice in a file. None if there is no file, or if its content is unusable."""
    try:
        content = json.loads(cache.read_plain(path) or "")
        directives: tuple[Directive, ...] = tuple(parse(content["directives"]))
        stages = tuple(tuple(map(str, stage)) for stage in content["annotate"][TAG])
        return ChosenProgram(
            Written(stages, directives, int(content["about"]["replicas"])),
            tuple(map(str, content["about"]["lines"])),
            float(content["about"]["predicted"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PiperError):
        return None


def write(path: Path, choice: ChosenProgram) -> bool:
    """Write a choice as JSON. `PiperStrategy(directives=...)` can also read the file.

    Returns:
        False if the file cannot be written. The next fit then searches again.
    """
    content = choice.written.to_json() | {
        "about": {
            "replicas": choice.written.replicas,
            "lines": list(choice.lines),
            "predicted": choice.predicted,
        }
    }
    return cache.write_plain(path, json.dumps(content, indent=1).encode())
