"""Refuse a square matrix of the batch that all samples share, although it has as many rows as the batch has
samples: a mask `[L, L]` in a batch of L samples.

    scores [L, heads, L, L] + mask [L, L]     the rows of the mask belong to the third dimension
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.joint.sample_dimension import known_rows
from lightning_piper.capture.losses.sample_trial import is_pointwise
from lightning_piper.capture.torch_private import _torch
from lightning_piper.errors import CaptureError

aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default}


def refuse_shared_masks(graph: torch.fx.Graph, size: int) -> None:
    """Check that no operation combines the rows of a square matrix of the batch with a dimension other than the
    samples. A part of the batch would get some rows of the matrix, and a part of one sample would use its only
    row in place of all rows.

    Args:
        size: the number of samples in the trace.

    Raises:
        CaptureError: an operation does so. The message has its line.
    """
    masks: set[Node] = set()
    rows = known_rows(graph, size) if size > 1 else set()
    for node in graph.nodes if rows else ():
        found = [x for x in node.all_input_nodes if x in masks]
        if node.op == "placeholder":
            if isinstance(node.meta.get("desc"), _torch.PlainAOTInput) and _shape(node) == (size, size):
                masks.add(node)
        elif found and _is_shared(node, masks, rows, size):
            raise CaptureError(
                f"{own_line(node)}: {node.target} uses the whole {size} x {size} matrix (tensor {_index(found[0])} of the batch) "
                f"for each sample. The batch has {size} samples, so Piper would divide the "
                "matrix over microbatches and replicas. Register the matrix as a buffer, or make it in the step"
                " [PIPER-C009]"
            )
        elif found and _shape(node) == (size, size) and (is_pointwise(node) or node.target in _COPIES):
            masks.update([node] if all(x in masks or x not in rows for x in node.all_input_nodes) else [])


def _is_shared(node: Node, masks: Collection[Node], rows: Collection[Node], size: int) -> bool:
    """Return whether an operation combines each sample with all rows of a matrix in `masks`.

    Args:
        rows: the values with rows of samples.
    """
    if "scaled_dot_product" in str(node.target):
        return not _torch.is_backward(node)
    shape = _shape(node)
    if len(shape) < 3 or shape[0] != size:
        return False
    others = [
        x for x in node.all_input_nodes if x not in masks and x in rows and len(_shape(x)) == len(shape)
    ]
    return node.target is aten.expand.default or (is_pointwise(node) and bool(others))


def _shape(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _index(mask: Node) -> int:
    """Return the position of the matrix in the batch, counted from 1."""
    while mask.op != "placeholder":
        mask = next(x for x in mask.all_input_nodes if _shape(x) == _shape(mask))
    return int(mask.meta["desc"].idx) + 1
