"""What is to be known of one kind of device, and torch does not say of all: the only file that names kinds and their backends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.errors import PiperError

HOST = "gloo"  # which exchanges tensors in the memory of the host
_NONE = (HOST, "fake")  # which exchange none between devices; torch's fake backend claims what no other has
MOVES = frozenset({"cuda", "xpu", "hpu"})  # methods of tensors that move them to a device of this kind


def backend_of(device: torch.device) -> str:
    """The backend of `torch.distributed` by which devices of this kind exchange tensors: gloo on CPU, NCCL on CUDA and ROCm, XCCL
    on XPU, and what a package has registered for its own.

    Raises:
        PiperError: there is none, or torch was built without it.
    """
    found = dist.Backend.default_device_backend_map.get(device.type)
    alone = f"Run all logical devices on one {device.type} device: PiperStrategy(transport='local') and devices=1"
    if found is None or (found in _NONE and device.type != "cpu"):
        known = ", ".join(k for k, x in dist.Backend.default_device_backend_map.items() if x not in _NONE or k == "cpu")
        raise PiperError(
            f"several processes cannot train on {device.type}: torch.distributed has no backend that exchanges tensors between "
            f"such devices (it has for {known}). {alone}"
        )
    if not dist.is_backend_available(found):
        raise PiperError(f"processes on {device.type} exchange tensors by {found}, without which this torch was built. {alone}")
    return found


def options_of(backend: str) -> Any:
    """Options of a communicator that carries messages: streams of a priority of their own, so that no receive which waits shares a
    queue of the hardware with a logical stream. None where a backend has no such options."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if backend == "nccl" else None


def check_kind(device: torch.device) -> None:
    """Refuse a device on which no plan can run.

    Raises:
        PiperError: torch.accelerator does not know it, or it lacks a dtype that every plan needs.
    """
    if device.type == "cpu":
        return
    known = torch.accelerator.current_accelerator()
    if known is None or known.type != device.type:
        raise PiperError(
            f"PiperStrategy cannot train on {device.type}: plans use streams and events by torch.accelerator, which stands for "
            f"{'no device' if known is None else known.type} here; give accelerator='cpu'"
        )
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError) as error:
        raise PiperError(
            f"PiperStrategy cannot train on {device.type}: losses, logged values and the weights of microbatches are added up in "
            f"float64, which it lacks ({str(error).splitlines()[0]}); give accelerator='cpu'"
        ) from error


def name_of(device: torch.device) -> str:
    """What the device is called."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))
