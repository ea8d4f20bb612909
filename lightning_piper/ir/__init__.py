"""The training DAG and what it is made of: what a directive rewrites."""

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import (
    Accumulate,
    AllReduce,
    Barrier,
    Chunk,
    Concat,
    Cut,
    Metrics,
    Node,
    Recv,
    Ref,
    Report,
    Send,
    Update,
)
from lightning_piper.ir.regions import Interface, Region
from lightning_piper.ir.values import Partial, Placement, Replicate, Shard, Slice, TensorSpec, Value

__all__ = [
    "Accumulate",
    "AllReduce",
    "Barrier",
    "Chunk",
    "Concat",
    "Cut",
    "Interface",
    "Metrics",
    "Node",
    "Partial",
    "Placement",
    "Recv",
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
