"""`shard_weights` and `shard_sequences`: tensor and context parallelism. They divide tensors over ranks, and ranks
exchange values where an operation needs more than its shard (`member_tensors.py`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lightning_piper.directives.base import register
from lightning_piper.directives.member_tensors import Dimensions, TensorSharding


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardWeights(TensorSharding):
    """Shard weights over the devices of a line, so that each device computes a part of their products.

        F[0] -> F[1] -> F[2]     --shard_weights over [0, 1]-->     F[0] -> F[1] @0,1, a shard each -> allreduce -> F[2]

    Attributes:
        filter: Selects chunks (default: all chunks).
        devices: One group, `[0, 1]`, or a list of groups, `[[0, 1], [2, 3]]`: each group is a line. Default: the
            lines along `axis` of the mesh on which chunks are placed. Without a mesh, the groups on which the
            program places chunks.
        axis: The name of the axis along which the weights are divided (default: "tp").
        stream: The logical stream of the communication (default: "tp").
        params: Maps parameter names, or patterns, to the dimension along which each parameter is divided. If one
            parameter holds several weights side by side, give (dimension, runs): `"*.qkv.weight": (0, 3)`.
        values: Maps region labels, or patterns, to the dimension along which the outputs of these regions are also
            divided: `{"*": 1}` shards sequences between the products (default: None).
        attention: As in `ShardSequences`, if `values` shards sequences.
    """

    op: ClassVar[str] = "shard_weights"

    axis: str = "tp"
    stream: str = "tp"
    params: Dimensions

    @property
    def weights(self) -> Dimensions:
        return self.params


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardSequences(TensorSharding):
    """Shard the values between regions along a dimension, such as the positions of a sequence. Each device has all
    weights.

        F[0] -> F[1]     --shard_sequences over [0, 1]-->     F[0] -> F[1] @0,1, half of the positions each

    Attributes:
        filter: Selects chunks (default: all chunks).
        devices: As in `ShardWeights`.
        axis: The name of the axis along which the sequences are divided (default: "cp").
        stream: The logical stream of the communication (default: "cp").
        values: Maps region labels, or patterns, to the dimension along which the outputs of these regions are
            divided (default: `{"*": 1}`, the positions of [samples, positions, features]). With (dimension, runs),
            each device has a part of each of this many runs of a sequence. This balances the work if a query sees
            only the keys before it.
        attention: How attention works on parts of sequences. "keys": each device has its queries and gathers keys
            and values. "heads": parts of the sequence are exchanged for heads, and back. "ring": keys and values
            rotate through the devices, and each device has the keys and values of one other device at a time. None
            (the default): the one of "keys" and "heads" that moves fewer bytes.
    """

    op: ClassVar[str] = "shard_sequences"

    axis: str = "cp"
    stream: str = "cp"
    values: Dimensions | None = dataclasses.field(default_factory=lambda: {"*": 1})

    @property
    def weights(self) -> Dimensions:
        return {}
