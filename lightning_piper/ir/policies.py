"""The choice of the tensors that a region's replicas shard, and of streams and buckets."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardingPolicy:
    """A region's ZeRO stage, and how its replicas communicate.

    Attributes:
        optimizer, gradients, parameters: Whether replicas shard these tensors. Each field implies the fields
            before it.
        reduce_stream, gather_stream: The logical streams of gradient sums and of parameter gathers.
        bucket_bytes: Number of bytes at which a bucket is closed.
        shard_size: Number of replicas of a group. Each group has all shards, and has the same shards as the other
            groups (HSDP). None: all replicas are one group.
        by_parameter: Whether each replica has some whole parameters instead of a shard of every parameter.
        overlap_update: Whether owners of whole parameters compute updates beside the backward pass.
        dtype: Dtype in which gradients are summed; None for their own dtype.
        gather_dtype: Dtype to which parameters are rounded before a gather, if it has fewer bytes than their own
            dtype; None for their own dtype.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    bucket_bytes: int = 25 * 2**20
    shard_size: int | None = None
    by_parameter: bool = False
    overlap_update: bool = False
    dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None

    def rounds(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype to which gathers round parameters of `dtype`; None if they are not rounded."""
        to = self.gather_dtype
        return to if to is not None and is_narrower(to, dtype) else None


def is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Return whether both are floating-point dtypes, and numbers of `dtype` have fewer bytes."""
    return dtype.is_floating_point and than.is_floating_point and dtype.itemsize < than.itemsize
