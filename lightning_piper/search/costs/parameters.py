"""The time that parameters take besides passes: to add gradients of microbatches, to copy gradients into
buckets, and to update parameters."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_piper.accelerators import synchronize
from lightning_piper.search.costs.blocks import BlockCut
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

# A measurement uses at most MOST tensors, and reads and writes at most about MOVED bytes, which is several
# times the size of caches.
MOVED = 1 << 27
MOST = 32
PIECES = 2  # number of shards in a measurement of the update of shards
# Bytes whose use evicts the content of most caches. More bytes would take memory from the measured step.
CACHES = 1 << 25
# Largest measured tensor, in bytes. The time of a larger tensor is extrapolated, because memory may not
# suffice for it.
LARGEST = 1 << 26
PART = 1 << 20  # bytes of each tensor in the measurement of copies into a bucket
# The machine's speed varies, so each measurement runs several times: at most RUNS times, in about ENOUGH
# seconds.
RUNS, ENOUGH = 9, 0.4
Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class ParameterTimes(NamedTuple):
    """The seconds that a parameter takes besides passes.

    Attributes:
        packed: To copy its gradient into a bucket.
        added: To add its gradient to the sum of earlier gradients.
        updated: To update the parameter.
        in_parts: To update all of its shards, one after the other. This may take less time than to update a
            large parameter at once, because an optimizer's temporaries are new memory.
    """

    packed: Number
    added: Number
    updated: Number
    in_parts: Number


OfParam = Callable[[str], ParameterTimes]  # takes the name of the parameter


def like(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Return a function that makes optimizers of the class of `optimizer`, with its options.

    If the class cannot be constructed from parameters and options alone, the returned function makes AdamW.
    """
    options = options_of(optimizer)

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return type(optimizer)(params, **options)
        except (TypeError, ValueError):
            return torch.optim.AdamW(params)

    return make


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's defaults that its class accepts as arguments."""
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def calculated(cut: BlockCut, hardware: Hardware, states: float) -> OfParam:
    """Return a function that calculates a parameter's times from the bytes that are read and written. The
    times of parameters without gradients are 0.

    An update reads the gradient, and reads and writes the parameter and its states.
    """
    bandwidth = hardware.bandwidth * hardware.efficiency
    nbytes = {name: n for params in cut.params for name, n in params.items() if name in cut.trains}

    def of_param(name: str) -> ParameterTimes:
        n = nbytes.get(name, 0) / bandwidth
        return ParameterTimes(2 * n, 3 * n, (3 + 2 * states) * n, (3 + 2 * states) * n)

    return of_param


def timed(
    cut: BlockCut,
    optimizer: Optimizer,
    zeros: Mapping[str, float],
    calls: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> OfParam:
    """Return a function that measures a parameter's times with tensors of the same size, or of `LARGEST`
    bytes if the parameter is larger. The times of parameters without gradients are 0.

    Parameters of the same size share a measurement. The copy into a bucket is measured once, in seconds per
    byte.

    The time of an update includes `zero_grad`. The tensors are not allocated as zeros, because then the first
    access would also allocate their pages.

    Args:
        cut: The blocks of the module.
        optimizer: Makes an optimizer of parameters.
        zeros: Parameter of `cut.step` -> share of its gradient that is zero, such as rows of a table that the
            batch does not use. Adam takes the root of its second moment of a gradient, and on some CPUs the
            root of zero takes five times as long as other roots.
        calls: Smallest number of calls of each measurement, after one warmup call. The median counts.
        clock: Returns seconds.
    """
    device = next(cut.module.parameters()).device
    specs = {
        name: cut.step.params[own].spec
        for own, names in cut.renamed.items()
        for name in names
        if name in cut.trains
    }
    shares = {name: round(zeros.get(own, 0.0), 1) for own, names in cut.renamed.items() for name in names}
    packed = _packed(device, clock)

    @functools.cache
    def of(numel: int, dtype: torch.dtype, share: float) -> tuple[float, float]:
        """Return the seconds to add a gradient of this size, and the seconds to update its parameter."""
        count = min(numel, LARGEST // dtype.itemsize)

        def like() -> torch.Tensor:
            made = torch.full((count,), 1e-3, dtype=dtype, device=device)
            made[: int(share * count)] = 0
            return made

        added, updated = _timed(like, optimizer, calls, clock)
        times = numel / max(1, count)
        return times * added, times * updated

    def of_param(name: str) -> ParameterTimes:
        if name not in specs:
            return ParameterTimes(0, 0, 0, 0)
        spec, share = specs[name], shares[name]
        # The time of a small parameter hardly depends on its size.
        pieces = PIECES if spec.nbytes > PART else 1
        in_parts = pieces * of(spec.numel // pieces, spec.dtype, share)[1]
        return ParameterTimes(spec.nbytes * packed, *of(spec.numel, spec.dtype, share), in_parts)

    return of_param


def _packed(device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds per byte to copy gradients into a bucket.

    The copied tensors are large, so the result does not include the constant time of each tensor. This time
    is part of the overhead of a step (`Hardware.step`).
    """
    parts, bucket = (torch.full((CACHES,), 1, dtype=torch.uint8, device=device).split(PART) for _ in range(2))

    def pack() -> None:
        for x, y in zip(bucket, parts, strict=True):
            x.copy_(y)

    return median([_seconds(pack, device, clock) for _ in range(RUNS + 1)][1:]) / CACHES


def _timed(
    like: Callable[[], torch.Tensor], optimizer: Optimizer, calls: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the seconds to add one gradient to a different gradient, and the seconds to update a parameter.

    Args:
        like: Makes a tensor with the size of the parameter, and with the zeros of its gradient.
        optimizer, calls, clock: Arguments of `timed`.
    """
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
            others.add_(1)  # evict the tensors from caches, as the passes before an update do
        found.append((added / count, _seconds(update, first.device, clock) / count))
    adding, updating = zip(*found[1:], strict=True)
    return median(adding), median(updating)


def _seconds(work: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds of a call, until the device has finished the work that the call issues."""
    wait(device)
    start = clock()
    work()
    wait(device)
    return clock() - start


def wait(device: torch.device) -> None:
    """Wait until the device has finished all issued work."""
    synchronize(device)
