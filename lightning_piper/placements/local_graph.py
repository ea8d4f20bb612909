"""The graph as one member runs it, with shards instead of whole values and sizes of shards in arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.common.operation_families import RESHAPES
from lightning_piper.errors import CaptureError
from lightning_piper.ir.values import Placement, Sharded
from lightning_piper.placements.placement_changes import CHANGE, part_shape
from lightning_piper.placements.ring import PARTS
from lightning_piper.placements.rule import operation_key, tensors_of

aten = torch.ops.aten
# Operation -> the position of the argument that is the shape of the operation's output.
SHAPED = {
    **dict.fromkeys(RESHAPES, 1),
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}

# Splits, which have the sizes of their outputs as an argument. If a member has a part of each output,
# `_localize` divides the sizes by the number of members.
SPLIT = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
}


class WrongShape(CaptureError):
    """An operation on shards does not make the shapes that its rule implies.

    Attributes:
        found: The shapes, as a part of a sentence.
    """

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}. If you added the placement rule of this operation, correct it. Otherwise, report this [PIPER-D019]"
        )
        self.found = found


def localize(graph: Graph, held: Mapping[Node, Any], degree: int) -> None:
    """Rewrite a graph of whole values into the graph of one member, in place. All members have the same
    graph.

    Args:
        graph: The graph. Its nodes' arguments and `meta["val"]` change.
        degree: The number of members, which divide each sharded value evenly.
        held: Node -> the placement of its value, or a tuple of placements for a value that is several
            tensors.

    Raises:
        WrongShape: An operation on shards does not make the shapes that its rule implies.
    """
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in graph.nodes)
    known: dict[object, Any] = {}
    with next((mode for mode in modes if mode is not None), contextlib.nullcontext()):
        for node in graph.nodes:
            if node.op != "output":
                _localize(node, held, degree, known)


def _localize(node: Node, held: Mapping[Node, Any], degree: int, known: dict[object, Any]) -> None:
    """Change one node's arguments and its `val` to the arguments and the value of a member.

    Args:
        known: an operation with the specs of its inputs -> its value. Equal operations share a value, because fake
            tensors have no data.
    """
    value: Any = node.meta.get("val")
    placement: Any = held.get(node)
    if node.op == "placeholder" and isinstance(value, torch.Tensor) and placement is not None:
        node.meta["val"] = _part(value, placement, degree)
    if node.op != "call_function":
        return
    target: Any = node.target
    if node.target is CHANGE:  # its output has the shape of a part, whatever the part of its input
        shape = part_shape(tuple(value.shape), placement, degree)
        node.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
        return
    if (index := SHAPED.get(target)) is not None:  # the argument becomes the shape of a member's output
        shape = part_shape(tuple(value.shape), placement, degree)
        node.args = (*node.args[:index], list(shape), *node.args[index + 1 :])
    along = _tuple(placement)[0]
    # Ring attention: a member has one part of the sequences, and its keys have been shifted already.
    if (at := PARTS.get(target)) is not None and isinstance(along, Sharded) and along.dim == 2:
        node.args = (*node.args[:at], 1, node.args[at + 1], 0)
    if target in SPLIT and held.get(node.all_input_nodes[0]) == Sharded(
        _split_along(node), len(_tuple(value))
    ):
        node.args = (node.args[0], _fewer(node.args[1], degree), *node.args[2:])
    # Compute the value on the member's inputs, and check its shape.
    if any(p is not None and not _same(p) for p in _tuple(placement)) or _reads_parts(node, held):
        inputs = tensors_of(node)
        specs = tuple((x.meta["val"].stride(), x.meta["val"].device) for x in inputs)
        if (key := (operation_key(node, inputs), specs)) not in known:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            # A view of a shard with gaps in memory fails. `reshape` copies such a shard.
            known[key] = (aten.reshape.default if target in RESHAPES else target)(*args, **kwargs)
        made = known[key]
        for whole, part, share in zip(_tuple(value), _tuple(made), _tuple(placement), strict=True):
            if isinstance(whole, torch.Tensor) and tuple(part.shape) != part_shape(
                tuple(whole.shape), share, degree
            ):
                found = (
                    f"{target} makes {list(part.shape)} from shards, but {share} of {list(whole.shape)} was "
                    "expected"
                )
                raise WrongShape(found)
        node.meta["val"] = made


def _split_along(node: Node) -> int:
    """Return the dimension along which a split divides its input."""
    dim: Any = node.args[2] if len(node.args) > 2 else 0
    return int(dim) % node.all_input_nodes[0].meta["val"].dim()  # type: ignore[no-any-return]


def _fewer(sizes: Any, degree: int) -> Any:
    """Return the argument of a split on one of `degree` members: a size, or a list of sizes."""
    return [size // degree for size in sizes] if isinstance(sizes, list | tuple) else sizes // degree


def _same(placement: Placement) -> bool:
    return str(placement) == "R"


def _reads_parts(node: Node, held: Mapping[Node, Any]) -> bool:
    return any(not _same(p) for x in node.all_input_nodes for p in _tuple(held.get(x)) if p is not None)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _part(value: torch.Tensor, placement: Placement, degree: int) -> torch.Tensor:
    shape = part_shape(tuple(value.shape), placement, degree)
    return value if shape == tuple(value.shape) else value.new_empty_strided(shape, value.stride())
