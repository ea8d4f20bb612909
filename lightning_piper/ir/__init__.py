"""The training DAG and its parts, which directives rewrite. `lightning_piper.ops` has the node kinds."""

from __future__ import annotations

import importlib
import warnings

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.regions import Interface, Region
from lightning_piper.ir.values import Kind, Partial, Placement, Replicate, Shard, Slice, TensorSpec, Value

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
    "Replicate",
    "Shard",
    "Slice",
    "TensorSpec",
    "TrainingDAG",
    "Value",
]


def __getattr__(name: str) -> type[Node]:
    """A node kind by its deprecated name here; the import is lazy because `ir` does not depend on `ops`."""
    found = getattr(importlib.import_module("lightning_piper.ops"), name, None)
    if not (isinstance(found, type) and issubclass(found, Node)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = f"lightning_piper.ir.{name} is lightning_piper.ops.{name} now; the old name ends in 0.2"
    warnings.warn(new, DeprecationWarning, stacklevel=2)
    return found
