"""Compiled pipelines that the tests of simulate/, viz/ and the command line share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_piper import schedules
from lightning_piper.annotate import annotate
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import parse
from tests.models import captured

WIDTH = 4
ROW = 4 * WIDTH  # bytes of an activation of one sample


class Chain(L.LightningModule):
    """Stages with one layer each. Batch: [n, 4]."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(stages)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for i, layer in enumerate(self.layers):
            with annotate("PP", i):
                x = torch.tanh(layer(x))
        return x.square().mean()


class Branches(L.LightningModule):
    """Stage 0 feeds stages 1 and 2, stage 3 reads only the batch, and stage 4 reads 1, 2 and 3. Batch: [n,
    4].
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        def stage(i: int, x: Tensor) -> Tensor:
            with annotate("PP", i):
                return torch.tanh(self.layers[i](x))

        h = stage(0, batch)
        a, b, c = stage(1, h), stage(2, h), stage(3, batch)
        with annotate("PP", 4):
            return self.layers[4](a * b * c).square().mean()


def branches(*places: tuple[int, str]) -> Compiled:
    """`Branches` for a batch of one sample, with each stage on the given device and stream."""
    program = [
        {"op": "place", "filter": {"PP": i}, "devices": [d], "stream": s} for i, (d, s) in enumerate(places)
    ]
    return compile_step(capture(Branches(), torch.randn(1, WIDTH)), tuple(parse(program)))


@functools.cache
def chain(stages: int, size: int) -> CapturedStep:
    return capture(Chain(stages), torch.randn(size, WIDTH))


@functools.cache
def pipeline(schedule: str, stages: int, microbatches: int) -> Compiled:
    """A chain with one stage on each device and one sample in each microbatch, under one of `schedules`."""
    program = getattr(schedules, schedule)(stages, microbatches)
    return compile_step(chain(stages, microbatches), tuple(program), verify=False)


def compiled(name: str, program: Sequence[Any]) -> Compiled:
    """A model of `tests.models`, compiled with a program."""
    return compile_step(captured(name).step, tuple(parse(list(program))))
