"""A mistake, and how to make it. The tests see the message by making the mistake, so docs/errors.md shows the
real messages.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import base, known, parse
from tests.strategy.fitting import Batches, local, trainer

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """Attributes:
    what: was done, in Markdown.
    run: does it, in an empty current folder, and ends with an error.
    """

    what: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Elsewhere:
    """A mistake that needs processes. Attributes:
    what: was done, in Markdown.
    said: words of the message, as the test looks for them.
    error: its class.
    test: `path::function` that makes the mistake.
    """

    what: str
    said: str
    error: str
    test: str


Cases = list[Case | Elsewhere]


class CommandLine(Exception):
    """An error with the text that a command wrote on stderr before it ended."""


def said(case: Case) -> tuple[str, str]:
    """The class of the error and its message.

    Raises:
        AssertionError: there is none, or it is none of this package's.
    """
    with _empty_folder(), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        try:
            case.run()
        except (piper.PiperError, CommandLine) as error:
            return type(error).__name__, portable(str(error))
    raise AssertionError(f"{case.what}: no error")


def portable(text: str) -> str:
    """Return a message without the parts that differ between runs or processors: the folder, sizes and
    checksums of files, rounding.
    """
    text = text.replace(str(Path.cwd()), "/home/me")
    text = re.sub(r"has \d+ bytes, \d+ were", "has 3180 bytes, 3181 were", text)
    text = re.sub(r"\d\.\de-(0[4-9]|[1-9]\d)", "1.2e-07", text)
    return re.sub(r"CRC-32 \w{8}, not \w{8}", "CRC-32 4d5da4c6, not dec9eeca", text)


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    """Make an empty current folder. Also hide the directives that other tests have registered, because some
    messages list all known directives.
    """
    before, variables = Path.cwd(), dict(os.environ)
    own = {op: cls for op, cls in known().items() if cls.__module__.startswith("lightning_piper.")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(base, "_registry", own):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(variables)


# What the mistakes are made with

TRAIN = """\
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 1)
        self.register_buffer("scale", torch.ones(()))
        self.seen, self.plain = [], torch.ones(())

    def training_step(self, batch, batch_idx):
        x, y = batch
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(x))
        with piper.annotate("PP", 1):
            loss = F.mse_loss(self.second(h), y)
        {line}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def net(line: str = "pass", *changes: tuple[str, str]) -> Any:
    """Return the module of a file `train.py`, with a line before the last line of its step, and with other
    changes.
    """
    return module_of("train.py", TRAIN.replace("{line}", line), "Net", changes)


def module_of(file: str, source: str, name: str, changes: Sequence[tuple[str, str]]) -> Any:
    """Return an instance of a class in a Python file, after changes to the file's text."""
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": Path(file).stem}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]()


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(samples, 8, generator=g), torch.randn(samples, 1, generator=g)


@cache
def captured_step() -> Any:
    return capture(net(), batch())


PLACES: list[Any] = [
    {"op": "place", "filter": {"PP": 0}, "devices": [0]},
    {"op": "place", "filter": {"PP": 1}, "devices": [1]},
]
SPLIT = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2}
GROUPS: list[Any] = [
    {"op": "place", "filter": {"PP": 0}, "devices": [0, 2]},
    {"op": "place", "filter": {"PP": 1}, "devices": [1, 3]},
]
REPLICATE = {"op": "replicate", "filter": {}, "devices": [[0, 2], [1, 3]]}


def program(what: str, *directives: Any) -> Case:
    """Return a mistake in directives that capture and compilation find."""
    return Case(what, lambda: compile_step(captured_step(), tuple(parse(list(directives)))))


def step(what: str, line: str = "pass", *changes: tuple[str, str]) -> Case:
    """Return a mistake in the training step."""
    return Case(what, lambda: compile_step(capture(net(line, *changes), batch()), ()))


def written(name: str, content: Any) -> str:
    """Write a file into the current folder: a text, or any other content as JSON."""
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


def fit(
    module: Any = None,
    data: Any = None,
    directives: Any = (*PLACES, SPLIT),
    callbacks: Any = (),
    strategy: Any = None,
    **options: Any,
) -> None:
    """Fit with all devices in one process."""
    own = {k: options.pop(k) for k in ("verify", "checkpoint") if k in options}
    path = options.pop("ckpt_path", None)
    made, _ = trainer(strategy or local(directives, **own), callbacks, **options)
    made.fit(
        net() if module is None else module, Batches([batch()] * 5) if data is None else data, ckpt_path=path
    )
