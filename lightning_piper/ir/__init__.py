"""The training DAG and its parts, which directives rewrite. `lightning_piper.ops` has the node kinds."""

from __future__ import annotations

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.regions import Interface, Region
from lightning_piper.ir.values import Kind, Partial, Placement, Replicated, Sharded, Slice, TensorSpec, Value

__all__ = [
    "Bucket",
    "Chunk",
    "Interface",
    "Kind",
    "Node",
    "Partial",
    "Placement",
    "Ref",
    "Region",
    "Replicated",
    "Sharded",
    "Slice",
    "TensorSpec",
    "TrainingDAG",
    "Value",
]
