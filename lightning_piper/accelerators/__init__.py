"""Streams and events: torch's accelerator, or a simulated one for a machine without accelerator.

    api = accelerator_of(device)        # None on a CPU, where work is done when it is issued
    stream, event = api.stream(device, (0, "compute")), api.new_event()

`accelerators.simulated_device` has the simulated accelerator. While it is in use, CPU tensors are its
tensors. Code for single kinds of devices is in `accelerators.kinds`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from lightning_piper.accelerators import kinds
from lightning_piper.errors import ExecutionError

T = TypeVar("T")


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> object:
        """Issue the work again, to the current stream. It uses the same memory as in the capture."""
        ...


class Accelerator(Protocol):
    """The interface of an accelerator: streams, events, and the record of which streams use a tensor. torch's
    accelerator and `Simulated` implement it, and `runtime.streams` uses it."""

    def stream(self, device: torch.device, name: object) -> Any:
        """Return the process's stream of this name on the device. All callers get the same stream.

        So work of one executor on the stream comes after earlier work of another executor. A CUDA device has
        only 32 streams, which the executors share.
        """
        ...

    def new_event(self) -> Any: ...

    def current_stream(self, device: torch.device) -> Any: ...

    def set_stream(self, stream: Any) -> None: ...

    def record_stream(self, x: torch.Tensor, stream: Any) -> None:
        """Record that `stream` uses the memory of `x`, which another stream made. Ignore host memory."""
        ...

    def new_graph_pool(self) -> object:
        """Return a new pool of memory for graphs that never run at the same time."""
        ...

    def capture(self, work: Callable[[], T], device: torch.device, pool: Any) -> tuple[Graph, T]:
        """Capture the operations that `work` issues, without running them. Return the graph and the result of `work`,
        whose tensors have values after a replay. `work` must not wait for the device."""
        ...


class _OfTorch:
    """An accelerator of torch: CUDA, ROCm, XPU, or a device that another package has registered."""

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

    new_graph_pool = staticmethod(kinds.new_graph_pool)
    capture = staticmethod(kinds.capture)


_OF_TORCH = _OfTorch()
in_use: list[Accelerator] = []  # the simulated accelerators that replace the CPU; the last one is active


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator that has the streams of a device. For a CPU, this is the simulated accelerator
    in use, or None if there is none. For a meta device, it is None."""
    if device.type == "cpu":
        return in_use[-1] if in_use else None
    return _OF_TORCH if device.type != "meta" else None


def capturing(device: torch.device) -> Accelerator:
    """Return the accelerator of a device that can capture graphs.

    Raises:
        ExecutionError: The device cannot.
    """
    found = accelerator_of(device)
    if found is None or (found is _OF_TORCH and not kinds.captures(device)):
        raise ExecutionError(
            f"cuda_graphs=True: torch does not capture graphs on {device.type}. Use a CUDA device, or leave cuda_graphs "
            "out [PIPER-S012]"
        )
    return found


def with_index(device: torch.device) -> torch.device:
    """Return the device with a number. A device without a number becomes the current device of its kind.

    A CPU device and a meta device stay unchanged.
    """
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def synchronize(device: torch.device) -> None:
    """Wait for all work issued to the device. For a CPU, return immediately."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators of random numbers for code on a device: the generator of the device, if it is not
    the host, and the generator of the host.

    The host's generator is included because code may draw on the host and then move the numbers.

    Raises:
        ExecutionError: The device does not have a generator that can be seeded.
    """
    if device.type in ("cpu", "meta"):
        return [torch.default_generator]
    number = with_index(device).index
    found = getattr(torch.get_device_module(device), "default_generators", ())
    if number >= len(found):
        raise ExecutionError(
            f"{device}: torch.{device.type} has no default_generators[{number}], so Piper cannot seed the random "
            "numbers of this device. Use accelerator='cpu' [PIPER-S012]"
        )
    return [found[number], torch.default_generator]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the device and the host inside the context, and restore their states after it.

    Raises:
        ExecutionError: The device does not have a generator that can be seeded.
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
