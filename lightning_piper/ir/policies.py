"""What a region's replicas shard of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardingPolicy:
    """What replicas shard of a region's parameters (the ZeRO stage), and how it is communicated.

    Attributes:
        optimizer, gradients, parameters: each implies those before it.
        reduce_stream, gather_stream: logical streams.
        bucket_bytes: size of a bucket.
        by_parameter: each replica has some parameters whole, and not a shard of every one.
        dtype: in which gradients are summed; None for their own.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    bucket_bytes: int = 25 * 2**20
    by_parameter: bool = False
    dtype: torch.dtype | None = None
