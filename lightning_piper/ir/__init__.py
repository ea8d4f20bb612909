"""The training DAG and what it is made of: what a directive rewrites."""

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import (
    Accumulate,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Chunk,
    Concat,
    Cut,
    Metrics,
    Node,
    Pack,
    Parameters,
    Recv,
    ReduceScatter,
    Ref,
    Report,
    Send,
    Update,
)
from lightning_piper.ir.regions import Interface, Region
from lightning_piper.ir.values import Partial, Placement, Replicate, Shard, Slice, TensorSpec, Value

__all__ = [
    "Accumulate",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Bucket",
    "Chunk",
    "Concat",
    "Cut",
    "Interface",
    "Metrics",
    "Node",
    "Pack",
    "Parameters",
    "Partial",
    "Placement",
    "Recv",
    "ReduceScatter",
    "Ref",
    "Region",
    "Replicate",
    "Report",
    "Send",
    "Shard",
    "Slice",
    "TensorSpec",
    "TrainingDAG",
    "Update",
    "Value",
]
