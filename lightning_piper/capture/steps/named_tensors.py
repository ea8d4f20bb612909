"""Collect the parameters and buffers of a module by canonical name, and change the number of samples in specs."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from lightning_piper.capture.joint.sizes import Specs
from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.proxies.sample_lists import SampleList
from lightning_piper.capture.steps.aliases import Pair, sharing_memory
from lightning_piper.errors import PiperError
from lightning_piper.ir.regions import ParamInfo
from lightning_piper.ir.values import Sharded, TensorSpec


def named_tensors(
    module: nn.Module,
) -> tuple[dict[str, ParamInfo], dict[str, TensorSpec], dict[str, str], list[Pair]]:
    """Return the names and specs of a module's parameters and buffers.

    Returns:
        - canonical name -> parameter
        - canonical name -> spec of a buffer
        - each name of a parameter or buffer -> its canonical name: the first name of the same tensor, with
          parameters before buffers
        - pairs of canonical names whose tensors are different but share memory

    Raises:
        PiperError: a tensor is not dense. Messages, shards and checkpoints need dense tensors.
    """
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        _check_dense(name, tensor)
        canonical[name] = first.setdefault(id(tensor), name)
        tensors.setdefault(canonical[name], tensor)
    aliases: dict[str, list[str]] = {}
    for name, main in canonical.items():
        if name != main:
            aliases.setdefault(main, []).append(name)
    params = {
        name: ParamInfo(name, TensorSpec.of(x), x.requires_grad, tuple(aliases.get(name, ())))
        for name, x in tensors.items()
        if isinstance(x, nn.Parameter)
    }
    buffers = {name: TensorSpec.of(x) for name, x in tensors.items() if not isinstance(x, nn.Parameter)}
    return params, buffers, canonical, sharing_memory(tensors)


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    """Check that a parameter or buffer is dense.

    Raises:
        PiperError: The tensor is sparse, quantized or nested.
    """
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
    what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    raise PiperError(
        f"{what} {name!r} is not a dense tensor ({kind}), but processes exchange only dense tensors, as "
        f"under DDP. {_INSTEAD.get(kind, _SPARSE)} [PIPER-C017]"
    )


_SPARSE = (
    "Convert it with x.to_sparse_coo().coalesce(), register its indices() and values(), and build it in the step: "
    "torch.sparse_coo_tensor(self.indices, self.values, size)"
)
_INSTEAD = {
    "nested": "Register a padded tensor and its lengths",
    "quantized": "Register its integers (x.int_repr()), and scale them in the step",
    "torch._mkldnn": "Register x.to_dense()",
}


def laid_out(info: ParamInfo, placement: Sharded, degree: int) -> ParamInfo:
    """Return the parameter with a memory order in which each of its shards is contiguous: the sharded
    dimension comes first. Ranges of the parameter's elements refer to this order.

    The module's tensor keeps its own order, which the result stores in `strides`. If the sharded dimension
    already comes first and the shard has one block, the result is `info` itself.

    Args:
        placement: the shard. Its `blocks` go into `TensorSpec.runs`.
        degree: the number of ranks that divide the parameter.
    """
    order, dim = info.spec.dim_order, placement.dim
    if placement.blocks > 1:
        spec = dataclasses.replace(info.spec, runs=(placement.blocks, degree))
        info = dataclasses.replace(info, spec=spec, strides=info.spec.stride)
    if order[0] == dim:
        return info
    stride, steps = {}, 1
    for d in reversed([dim, *(d for d in order if d != dim)]):
        # in `dim_order`, a dimension with one element comes last, unless it is sharded
        size = info.spec.shape[d]
        stride[d], steps = steps if d == dim or size > 1 else 0, steps * size
    spec = dataclasses.replace(info.spec, stride=tuple(stride[d] for d in range(len(order))))
    return dataclasses.replace(info, spec=spec, strides=info.strides or info.spec.stride)


def resized(spec: TensorSpec, size: int) -> TensorSpec:
    """Return the spec of a contiguous batch tensor with `size` instead of its first dimension. A tensor
    without dimensions keeps its spec."""
    shape = (size, *spec.shape[1:]) if spec.shape else ()
    return TensorSpec.contiguous(shape, spec.dtype)


def sized(batch_spec: BatchSpec, size: int) -> Specs:
    """Return the specs of the batch's tensors for `size` samples. If the batch cannot be cut, return its specs
    unchanged."""
    if batch_spec.undivided is not None:
        return batch_spec.specs
    return tuple(resized(spec, size) for spec in batch_spec.specs)


def has_sample_lists(batch_spec: BatchSpec) -> bool:
    """Return whether the batch has a list with one entry for each sample. A batch of another size cannot be
    made from such a batch."""
    return any(isinstance(item, SampleList) for item in batch_spec.carried)
