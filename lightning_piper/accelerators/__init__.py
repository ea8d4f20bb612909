"""What has streams: the accelerator that torch knows, and a simulated one for whoever has none.

    api = accelerator_of(device)        # None: work is done when it is issued, as on a CPU
    stream, event = api.stream(device, (0, "compute")), api.new_event()

`accelerators.simulated` has the other one; while it is in use, tensors on the CPU are its tensors. What one kind of device has
alone is in `accelerators.kinds`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from lightning_piper.errors import ExecutionError


class Accelerator(Protocol):
    """Streams, events, and whose memory a tensor is: as torch has them."""

    def stream(self, device: torch.device, name: object) -> Any:
        """The process's stream of this name on the device. There is one, whoever asks: what one executor has recorded on it is
        recorded for the others, and a CUDA device has 32 for all."""
        ...

    def new_event(self) -> Any: ...

    def current_stream(self, device: torch.device) -> Any: ...

    def set_stream(self, stream: Any) -> None: ...

    def record_stream(self, x: torch.Tensor, stream: Any) -> None:
        """The stream uses the memory of `x`, which another stream made; nothing, if it lies on the host."""
        ...


class _OfTorch:
    """What `torch.accelerator` stands for: CUDA, ROCm, XPU, or what another package has brought."""

    new_event = staticmethod(torch.Event)
    current_stream = staticmethod(torch.accelerator.current_stream)
    set_stream = staticmethod(torch.accelerator.set_stream)

    @staticmethod
    @functools.cache
    def stream(device: torch.device, name: object) -> Any:
        return torch.Stream(device)

    @staticmethod
    def record_stream(x: torch.Tensor, stream: Any) -> None:
        if x.device.type != "cpu":
            x.record_stream(stream)


_OF_TORCH = _OfTorch()
in_use: list[Accelerator] = []  # the simulated accelerators that stand for the CPU, the last one now


def accelerator_of(device: torch.device) -> Accelerator | None:
    """What has the streams of a device; None if it has none."""
    if device.type == "cpu":
        return in_use[-1] if in_use else None
    return _OF_TORCH if device.type != "meta" else None


def with_index(device: torch.device) -> torch.device:
    """The device that is meant where no number is given: the current one of its kind."""
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def synchronize(device: torch.device) -> None:
    """Wait for what was issued to the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """What code that runs on a device draws random numbers from: the device's generator, and the host's, where code may draw, too,
    before it moves numbers.

    Raises:
        ExecutionError: the device has none that can be seeded.
    """
    if device.type in ("cpu", "meta"):
        return [torch.default_generator]
    number = with_index(device).index
    found = getattr(torch.get_device_module(device), "default_generators", ())
    if number >= len(found):
        raise ExecutionError(
            f"random numbers (dropout) on {device}: torch.{device.type} has no default_generators[{number}] that could be seeded, "
            "and masks would be others in each run; draw on the CPU, and move the numbers"
        )
    return [found[number], torch.default_generator]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What is drawn inside, on the device and the host, follows from the seed; outside, numbers go on as if none had been drawn.

    Raises:
        ExecutionError: see `generators_of`.
    """
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
