"""Gradients that are made where they are packed: a chunk's code writes products of matrices into the flat tensor of their bucket,
so that nothing is copied, and their memory is there once. The bits are the same, for the same kernels write them.

    mm = torch.ops.aten.mm(g, x)  ->  pack                 mm = torch.ops.aten.mm(g, x, out=<view of the flat tensor>)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lightning_piper.ir.boxed import compile_boxed
from lightning_piper.ir.regions import Code
from lightning_piper.plan.instructions import Pack, Run
from lightning_piper.plan.plan import Plan

aten = torch.ops.aten
_INTO: dict[Any, Callable[..., torch.Tensor]] = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out}
_SAME_MEMORY = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default}  # of their first argument

Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, and where it begins in the flat tensor


def packs_of(plan: Plan) -> dict[int, Pack]:
    """Slots of gradients that a chunk makes and a pack alone reads, on the same stream -> that pack."""
    makers = {slot: each.stream for each in plan.instructions if isinstance(each, Run) for slot in each.writes}
    readers: dict[int, list[Any]] = {}
    for each in plan.instructions:
        for read in each.reads:
            if read.slot in makers:
                readers.setdefault(read.slot, []).append(each)
    return {
        slot: found[0]
        for slot, found in readers.items()
        if len(found) == 1 and isinstance(found[0], Pack) and found[0].stream == makers[slot]
    }


@dataclass(frozen=True)
class Laid:
    """Code that writes some of its outputs into flat tensors.

    Attributes:
        run: as `Code.run`, with the places to write to behind the other arguments.
        layouts: of these places, in the flat tensor.
        places: which tensors of the bucket are written so.
    """

    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    layouts: tuple[Layout, ...]
    places: frozenset[int]


def laid(code: Code, pack: Pack, first: int) -> Laid | None:
    """The code with those gradients of a bundle written where the pack wants them that it can write there; None if there are none.

    Args:
        first: where the bundle begins among the outputs.
    """
    module = getattr(code.run, "__self__", None)  # None: its sizes are open, or it runs the user's code
    if not isinstance(module, GraphModule):
        return None
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(code.graph, copies))
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    views = pack.bucket.views(torch.empty(pack.bucket.numel, dtype=pack.bucket.dtype, device="meta"))
    output: Any = code.graph.output_node()
    often = Counter(output.args[0])
    layouts: dict[int, Layout] = {}
    for place, (index, view) in enumerate(zip(pack.take, views, strict=True)):
        result = output.args[0][first + index]
        made = _written_for(result, output, view) if often[result] == 1 else None
        if made is None or not last:
            continue
        with graph.inserting_after(last[0]):
            last = [graph.placeholder(f"into_{place}")]
        copy, like = copies[made], made.meta["val"]
        with graph.inserting_before(copy):
            written = graph.call_function(_INTO[made.target], copy.args, {"out": last[0]})
        copy.replace_all_uses_with(written)
        graph.erase_node(copy)
        layouts[place] = (tuple(like.shape), like.stride(), int(view.storage_offset()))
    if not layouts:
        return None
    return Laid(compile_boxed(graph, module), tuple(layouts.values()), frozenset(layouts))


def _written_for(result: Any, output: Node, view: torch.Tensor) -> Node | None:
    """The operation that makes a result and nothing else, and can write it into `view`; None if there is none."""
    node: Any = result
    reader = output
    while isinstance(node, Node) and list(node.users) == [reader]:
        like = node.meta.get("val")
        if not isinstance(like, torch.Tensor) or (reader is output and not _is(like, view)):
            return None
        if node.target in _INTO and not node.kwargs and like.is_contiguous():
            return node
        if node.target not in _SAME_MEMORY:
            return None
        node, reader = node.args[0], node
    return None


def _is(like: torch.Tensor, view: torch.Tensor) -> bool:
    """Does it lie in its memory as the view does, alone?"""
    return (like.shape, like.stride(), like.dtype, like.storage_offset()) == (view.shape, view.stride(), view.dtype, 0)
