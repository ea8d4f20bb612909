"""Tensors on the wire: contiguous, and with the sender's strides at the receiver.

Strides choose kernels, and kernels choose bits: a value must not change its strides because it crossed devices. So the dims
travel in the order in which they lie in memory, and are put back where they belong on arrival.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_piper.ir.values import TensorSpec

# What the backends of devices transfer under its own name; everything else travels as bytes. gloo takes all of them.
_NAMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
         torch.bool}  # fmt: skip


def _as_bytes(spec: TensorSpec, device: torch.device) -> bool:
    return device.type != "cpu" and spec.dtype not in _NAMED


def packer(spec: TensorSpec, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from a tensor of this spec to the message, which is on `device`, also where a step keeps a number on the host."""
    pack = _packer(spec, device)
    return pack if device.type == "cpu" else lambda x: pack(x.to(device))


def _packer(spec: TensorSpec, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    dim_order = spec.dim_order
    if _as_bytes(spec, device):
        return lambda x: x.permute(dim_order).contiguous().view(-1).view(torch.uint8)
    if dim_order == tuple(range(len(dim_order))):
        return torch.Tensor.contiguous
    return lambda x: x.permute(dim_order).contiguous()


def unpacker(spec: TensorSpec, device: torch.device) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that gives room for a message of this spec, and the tensor that it becomes."""
    dim_order = spec.dim_order
    shape = tuple(spec.shape[d] for d in dim_order)
    inverse = tuple(sorted(range(len(dim_order)), key=dim_order.__getitem__))
    dtype, natural, as_bytes = spec.dtype, dim_order == tuple(range(len(dim_order))), _as_bytes(spec, device)

    def room() -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.empty(shape, dtype=dtype, device=device)
        message = value.view(-1).view(torch.uint8) if as_bytes else value
        return message, value if natural else value.permute(inverse)

    return room
