"""Properties of kinds of devices that torch does not report.

Only this file names kinds and their backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_piper.errors import PiperError

T = TypeVar("T")
HOST = "gloo"  # Backend that exchanges tensors in host memory
# Backends that cannot send device memory: gloo needs host memory, and torch lists "fake" for device types
# that have no backend.
_NONE = (HOST, "fake")
# Kinds of devices that have a method of the same name, which moves a tensor there, such as `x.cuda()`.
MOVES = frozenset({"cuda", "xpu", "hpu"})


def backend_of(device: torch.device) -> str:
    """Return the backend of `torch.distributed` that exchanges tensors between devices of the kind of
    `device`.

    It is gloo on CPU, NCCL on CUDA and ROCm, XCCL on XPU, or the backend that a package has registered for
    its devices.

    Raises:
        PiperError: There is no such backend, or torch was built without it.
    """
    found = dist.Backend.default_device_backend_map.get(device.type)
    advice = (
        f"Run all logical devices on one {device.type} device: PiperStrategy(transport='local') and devices=1"
    )
    if found is None or (found in _NONE and device.type != "cpu"):
        known = ", ".join(
            k for k, x in dist.Backend.default_device_backend_map.items() if x not in _NONE or k == "cpu"
        )
        raise PiperError(
            f"several processes cannot train on {device.type}: torch.distributed has no backend that "
            f"exchanges tensors between such devices (it has backends for {known}). {advice} [PIPER-S012]"
        )
    if not dist.is_backend_available(found):
        raise PiperError(
            f"processes on {device.type} exchange tensors with {found}, but this torch was built without "
            f"it. {advice} [PIPER-S012]"
        )
    return found


def options_of(backend: str) -> Any:
    """Return the options of a communicator that carries messages; None for backends other than NCCL.

    The options give the communicator's stream a high priority. So a receive that waits there never shares a
    hardware queue with a logical stream.
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if backend == "nccl" else None


def captures(device: torch.device) -> bool:
    """Return whether torch can capture the work of a device of this kind into a graph."""
    return device.type == "cuda"


def new_graph_pool() -> Any:
    """See `Accelerator.new_graph_pool`."""
    return torch.cuda.graph_pool_handle()


def capture(work: Callable[[], T], device: torch.device, pool: Any) -> tuple[Any, T]:
    """See `Accelerator.capture`."""
    graph = torch.cuda.CUDAGraph()
    # During the capture, threads of communicators ask for events. The mode "global" would make this an error.
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = work()
    return graph, made


def check_kind(device: torch.device) -> None:
    """Raise an error if plans cannot run on a device.

    Raises:
        PiperError: `torch.accelerator` does not support the device, or it lacks a dtype that every plan
            needs.
    """
    if device.type == "cpu":
        return
    known = torch.accelerator.current_accelerator()
    if known is None or known.type != device.type:
        raise PiperError(
            f"PiperStrategy cannot train on {device.type}: plans use streams and events of "
            f"torch.accelerator, which finds {'no device' if known is None else known.type} here. Use "
            "accelerator='cpu' [PIPER-S012]"
        )
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError) as error:
        raise PiperError(
            f"PiperStrategy cannot train on {device.type}: losses, logged values and the weights of "
            f"microbatches are added up in float64, which {device.type} does not support "
            f"({str(error).splitlines()[0]}). Use accelerator='cpu' [PIPER-S012]"
        ) from error


def name_of(device: torch.device) -> str:
    """Return the name of the device's model. If torch does not know the name, return the kind of the
    device."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))
