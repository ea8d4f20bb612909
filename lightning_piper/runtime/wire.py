"""Tensors in messages. Tensors are contiguous in the message, and get the sender's strides at the receiver.

Strides select kernels, and kernels determine bits, so a value must keep its strides when it crosses devices.
Therefore a message has the dimensions in memory order, and the receiver permutes the dimensions back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_piper.ir.values import TensorSpec

# Dtypes that every device backend can transfer. Between devices, tensors of other dtypes travel as bytes. Between
# CPUs, gloo transfers tensors of all dtypes.
_NAMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32,
    torch.int64,
         torch.bool}  # fmt: skip


def _as_bytes(spec: TensorSpec, device: torch.device) -> bool:
    return device.type != "cpu" and spec.dtype not in _NAMED


def packer(spec: TensorSpec, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a contiguous message of a tensor of this spec. The message may be the
    tensor itself.

    The message is on `device`. A step may keep a tensor that is one number in host memory, and the function
    then copies it to `device`.
    """
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
    """Return a function that allocates memory for a tensor of this spec. It returns two views of the memory:
    the message to receive, and the tensor with the sender's shape and dimension order."""
    dim_order = spec.dim_order
    shape = tuple(spec.shape[d] for d in dim_order)
    inverse = tuple(sorted(range(len(dim_order)), key=dim_order.__getitem__))
    dtype, natural, as_bytes = spec.dtype, dim_order == tuple(range(len(dim_order))), _as_bytes(spec, device)

    def room() -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.empty(shape, dtype=dtype, device=device)
        message = value.view(-1).view(torch.uint8) if as_bytes else value
        return message, value if natural else value.permute(inverse)

    return room
