"""Gradients that are made where they lie in the end: a chunk's code writes products of matrices there, so that nothing is copied,
and their memory is there once.

A gradient that is packed by itself is written into the flat tensor of its bucket. The bits are the same, for the same kernels write
them:

    mm = torch.ops.aten.mm(g, x)  ->  pack                 mm = torch.ops.aten.mm(g, x, out=<view of the flat tensor>)

Terms of a sum are added to it by the product itself, which saves a pass over the memory for each. That rounds otherwise than a
product that is added, so it is done where code is compiled, too, which is held to no bits:

    mm = torch.ops.aten.mm(g, x)  ->  add                  torch.ops.aten.addmm_(<view of the sum>, g, x)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lightning_piper.ir.boxed import compile_boxed
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.regions import Code
from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.instruction import Instruction
from lightning_piper.plan.instructions import Add, Pack, Run
from lightning_piper.plan.plan import Plan

aten = torch.ops.aten
_INTO: dict[Any, Callable[..., torch.Tensor]] = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out}
_ADDED: dict[Any, Callable[..., torch.Tensor]] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}
_SAME_MEMORY = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default}  # of their first argument

Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, and where it begins in the memory of a tensor


@dataclass(frozen=True)
class Home:
    """Where gradients that chunks make lie in the end.

    Attributes:
        node: of the pack, or of the sum.
        into: the slot of it.
        runs: of the chunks that make the terms, in the order of the sum; of a pack, one.
        bucket: it is a flat tensor of this bucket; None: a bundle like the terms.
        take: which tensors of a term are in the bucket, in its order.
    """

    node: int
    into: int
    runs: tuple[Run, ...]
    bucket: Bucket | None
    take: tuple[int, ...]


def homes_of(plan: Plan, sums: bool) -> dict[int, Home]:
    """Slots of gradients that a chunk makes, and a pack (or with `sums` a sum of such) alone reads, on the same stream -> where
    they lie in the end."""
    makers = {slot: (i, each) for i, each in enumerate(plan.instructions) if isinstance(each, Run) for slot in each.writes}
    readers: dict[int, list[Instruction]] = {}
    ends: dict[int, list[Pack | Add]] = {}  # by the slot in which they lie
    for each in plan.instructions:
        for read in each.reads:
            if read.slot in makers:
                readers.setdefault(read.slot, []).append(each)
        if isinstance(each, Pack) or (sums and isinstance(each, Add)):
            ends.setdefault(each.into, []).append(each)
    homes: dict[int, Home] = {}
    for into, steps in ends.items():
        terms = [(read.slot, each) for each in steps for read in each.reads]
        if all(readers.get(slot) == [each] and makers[slot][1].stream == each.stream for slot, each in terms):
            made = [makers[slot] for slot, _ in terms]
            if min(made, key=lambda pair: pair[0]) is made[0]:
                home = Home(steps[0].node, into, tuple(run for _, run in made), steps[0].bucket, steps[0].take)
                homes |= {slot: home for slot, _ in terms}
    return homes


@dataclass(frozen=True)
class Laid:
    """Code that writes some of its outputs to where they lie in the end.

    Attributes:
        code: takes the places to write to behind its other arguments.
        places: which tensors of the bucket, or of the bundle, are written so.
        layouts: of these places in the tensors that they are parts of.
        specs: of the tensors of a bundle, and None where nothing is written; of a bucket, nothing.
        adds: it adds to what is there.
    """

    code: Code
    places: tuple[int, ...]
    layouts: tuple[Layout, ...]
    specs: tuple[TensorSpec | None, ...]
    adds: bool

    def new(
        self, bucket: Bucket | None, device: torch.device, flat_of: Callable[[Bucket], torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """What is written into, with zeros where it is added to."""
        if bucket is None:
            return tuple(
                None if spec is None else torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_()
                for spec in self.specs
            )
        flat = flat_of(bucket)
        if self.adds:
            for view in self.views((flat,)):
                view.zero_()
        return (flat,)

    def views(self, made: Sequence[Any]) -> list[torch.Tensor]:
        """The places to write to."""
        if self.specs:
            return [made[place].as_strided(*layout) for place, layout in zip(self.places, self.layouts, strict=True)]
        return [made[0].as_strided(*layout) for layout in self.layouts]


def laid(code: Code, home: Home, first: int, own: Sequence[TensorSpec], adds: bool) -> Laid | None:
    """The code with those gradients of a bundle written where they lie in the end that it can write there; None if there are none.

    Args:
        first: where the bundle begins among the outputs.
        own: its specs.
        adds: it adds to what is there.
    """
    module = getattr(code.run, "__self__", None)  # None: its sizes are open, or it runs the user's code
    if not isinstance(module, GraphModule):
        return None
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(code.graph, copies))
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    output: Any = code.graph.output_node()
    often = Counter(output.args[0])
    layouts: dict[int, Layout] = {}
    inputs: list[TensorSpec] = []
    for place, (index, view) in enumerate(_wanted(home, own)):
        result = output.args[0][first + index]
        made = _written_for(result, output, view) if often[result] == 1 else None
        if made is None or not last:
            continue
        with graph.inserting_after(last[0]):
            last = [graph.placeholder(f"into_{place}")]
        copy, like = copies[made], made.meta["val"]
        with graph.inserting_before(copy):
            if adds:
                written = graph.call_function(_ADDED[made.target], (last[0], *copy.args))
            else:
                written = graph.call_function(_INTO[made.target], copy.args, {"out": last[0]})
        copy.replace_all_uses_with(written)
        graph.erase_node(copy)
        layouts[place] = (tuple(like.shape), like.stride(), int(view.storage_offset()))
        inputs.append(TensorSpec.of(like))
    if not layouts:
        return None
    specs = () if home.bucket is not None else tuple(spec if i in layouts else None for i, spec in enumerate(own))
    other = replace(code, run=compile_boxed(graph, module), graph=graph, inputs=(*code.inputs, *inputs))
    return Laid(other, tuple(layouts), tuple(layouts.values()), specs, adds)


def written_in_place(code: Code, first: int, own: Sequence[TensorSpec]) -> list[bool]:
    """Which gradients of a bundle the code can write to where they lie in a bucket, so that packing takes no time.

    Args:
        first: where the bundle begins among the outputs.
        own: its specs.
    """
    output: Any = code.graph.output_node()
    results = output.args[0]
    views = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in own]
    return [
        results.count(result) == 1 and _written_for(result, output, view) is not None
        for result, view in zip(results[first : first + len(own)], views, strict=True)
    ]


def _wanted(home: Home, own: Sequence[TensorSpec]) -> list[tuple[int, torch.Tensor]]:
    """Which tensors of a bundle are wanted, and as which views, without data."""
    if home.bucket is not None:
        views = home.bucket.views(torch.empty(home.bucket.numel, dtype=home.bucket.dtype, device="meta"))
        return list(zip(home.take, views, strict=True))
    return [(i, torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta")) for i, s in enumerate(own)]


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
