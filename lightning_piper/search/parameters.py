"""What is done with parameters beside passes: their gradients are added to those of the microbatches before, and the optimizer
changes them."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_piper.accelerators import synchronize
from lightning_piper.search.blocks import Cut
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

MOVED = 1 << 27  # bytes that one measurement touches, if the tensor is smaller: several times what caches hold
MOST = 32  # tensors of one measurement
PIECES = 2
CACHES = 1 << 25  # bytes that push other ones out of most caches; measuring must not take much memory from what is measured
LARGEST = 1 << 26  # bytes of a tensor that is measured; what is larger takes as much more, and measuring might not have room for it
PART = 1 << 20  # bytes of a tensor that is laid into a bucket
RUNS, ENOUGH = 9, 0.4  # of a measurement, and seconds of them: the machine is not always as fast
Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Changes(NamedTuple):
    """Seconds that one parameter takes: to lay a gradient into a new bucket, to add one to another one, to be updated, and to be
    updated in pieces, one after the other. (What an optimizer makes on its way is new memory, and may cost more if it is large.)"""

    packed: Number
    added: Number
    updated: Number
    in_parts: Number


OfParam = Callable[[str], Changes]  # of the parameter of this name


def like(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Makes optimizers of the same class and options; AdamW, if that class is made in another way than torch's are."""
    options = options_of(optimizer)

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return type(optimizer)(params, **options)
        except (TypeError, ValueError):
            return torch.optim.AdamW(params)

    return make


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of its defaults, those that its class takes."""
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def calculated(cut: Cut, hardware: Hardware, states: float) -> OfParam:
    """By the bytes that are read and written. An update reads the gradient, and changes the parameter and its states."""
    bandwidth = hardware.bandwidth * hardware.efficiency
    nbytes = {name: n for params in cut.params for name, n in params.items() if name in cut.trains}

    def of_param(name: str) -> Changes:
        n = nbytes.get(name, 0) / bandwidth
        return Changes(2 * n, 3 * n, (3 + 2 * states) * n, (3 + 2 * states) * n)

    return of_param


def timed(
    cut: Cut, optimizer: Optimizer, zeros: Mapping[str, float], calls: int = 3, clock: Callable[[], float] = time.perf_counter
) -> OfParam:  # fmt: skip
    """By tensors of the same size, and one in which all are laid. With an update, gradients are dropped.
    (Tensors of zeros would not do: who touches them first pays for their pages.)

    Args:
        optimizer: makes one of parameters.
        zeros: parameter of `cut.step` -> share of its gradient that is zero, as of rows of a table that a batch does not use. The
            root of zero, which Adam takes of what it keeps of them, takes some CPUs five times as long as other roots.
        calls: of each measurement, at least, after one that warms up; the median counts.
    """
    device = next(cut.module.parameters()).device
    specs = {name: cut.step.params[own].spec for own, names in cut.renamed.items() for name in names if name in cut.trains}
    shares = {name: round(zeros.get(own, 0.0), 1) for own, names in cut.renamed.items() for name in names}
    packed = _packed(device, clock)

    @functools.cache
    def of(numel: int, dtype: torch.dtype, share: float) -> tuple[float, float]:
        count = min(numel, LARGEST // dtype.itemsize)

        def like() -> torch.Tensor:
            made = torch.full((count,), 1e-3, dtype=dtype, device=device)
            made[: int(share * count)] = 0
            return made

        added, updated = _timed(like, optimizer, calls, clock)
        times = numel / max(1, count)
        return times * added, times * updated

    def of_param(name: str) -> Changes:
        if name not in specs:
            return Changes(0, 0, 0, 0)
        spec, share = specs[name], shares[name]
        pieces = PIECES if spec.nbytes > PART else 1  # small ones take as long as their number says
        in_parts = pieces * of(spec.numel // pieces, spec.dtype, share)[1]
        return Changes(spec.nbytes * packed, *of(spec.numel, spec.dtype, share), in_parts)

    return of_param


def _packed(device: torch.device, clock: Callable[[], float]) -> float:
    """To lay a byte of tensors that are there into memory that is there, too. (What each of them takes, however small, is in the
    time of a step without work.)"""
    parts, bucket = (torch.full((CACHES,), 1, dtype=torch.uint8, device=device).split(PART) for _ in range(2))

    def pack() -> None:
        for x, y in zip(bucket, parts, strict=True):
            x.copy_(y)

    return median([_seconds(pack, device, clock) for _ in range(RUNS + 1)][1:]) / CACHES


def _timed(like: Callable[[], torch.Tensor], optimizer: Optimizer, calls: int, clock: Callable[[], float]) -> tuple[float, float]:
    """To add a gradient to another one, and to update a parameter; `like` makes a tensor such as it."""
    first = torch.nn.Parameter(like())
    count = max(1, min(MOST, MOVED // max(1, 4 * first.nbytes)))
    params = [first, *(torch.nn.Parameter(like()) for _ in range(count - 1))]
    changes = optimizer(params)

    def add() -> None:
        for x in params:
            assert x.grad is not None
            x.grad.add_(x.detach())

    def update() -> None:
        changes.step()
        changes.zero_grad()

    found: list[tuple[float, float]] = []
    others = torch.zeros(CACHES, dtype=torch.uint8, device=first.device)
    start = clock()
    while len(found) <= calls or (len(found) <= RUNS and clock() - start < ENOUGH):
        for x in params:
            x.grad = like()
        with torch.no_grad():
            others.add_(1)
            added = _seconds(add, first.device, clock)
            others.add_(1)  # the passes before an update take the caches
        found.append((added / count, _seconds(update, first.device, clock) / count))
    adding, updating = zip(*found[1:], strict=True)
    return median(adding), median(updating)


def _seconds(work: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    wait(device)
    start = clock()
    work()
    wait(device)
    return clock() - start


def wait(device: torch.device) -> None:
    """Until what was issued is done."""
    synchronize(device)
