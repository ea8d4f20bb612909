"""What has streams: CUDA, and a simulated accelerator for whoever has none.

    api = accelerator_of(device)        # None: work is done when it is issued, as on a CPU
    stream, event = api.stream(device, (0, "compute")), api.new_event()

`accelerators.simulated` has the other one; while it is in use, tensors on the CPU are its tensors.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """Streams, events, and whose memory a tensor is: as `torch.cuda` has them."""

    def stream(self, device: torch.device, name: object) -> Any:
        """The process's stream of this name on the device. There is one, whoever asks: what one executor has recorded on it is
        recorded for the others, and CUDA has 32 for all."""
        ...

    def new_event(self) -> Any: ...

    def current_stream(self, device: torch.device) -> Any: ...

    def set_stream(self, stream: Any) -> None: ...

    def record_stream(self, x: torch.Tensor, stream: Any) -> None:
        """The stream uses the memory of `x`, which another stream made; nothing, if it lies on the host."""
        ...


class _Cuda:
    new_event = staticmethod(torch.cuda.Event)
    current_stream = staticmethod(torch.cuda.current_stream)
    set_stream = staticmethod(torch.cuda.set_stream)

    @staticmethod
    @functools.cache
    def stream(device: torch.device, name: object) -> Any:
        return torch.cuda.Stream(device)

    @staticmethod
    def record_stream(x: torch.Tensor, stream: Any) -> None:
        if x.is_cuda:
            x.record_stream(stream)


_CUDA = _Cuda()
in_use: list[Accelerator] = []  # the simulated accelerators that stand for the CPU, the last one now


def accelerator_of(device: torch.device) -> Accelerator | None:
    """What has the streams of a device; None if it has none."""
    if device.type == "cuda":
        return _CUDA
    return in_use[-1] if in_use and device.type == "cpu" else None
