"""Gradients that a chunk writes directly to their final memory. Writing directly saves a copy and a second
buffer.

If a chunk's gradient is packed into a bucket, the chunk's matrix product writes it into the bucket's flat
tensor. The bits are the same, because the same kernel computes them::

    mm = torch.ops.aten.mm(g, x)  ->  pack                 mm = torch.ops.aten.mm(g, x, out=<view of the flat tensor>)

If gradients are terms of a sum, the matrix product adds its result to the sum. This saves one pass over the
memory for each term. The result rounds differently from a product followed by an addition. So Piper adds
directly only with a compiler, because compiled code does not promise bitwise equality::

    mm = torch.ops.aten.mm(g, x)  ->  add                  torch.ops.aten.addmm_(<view of the sum>, g, x)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lightning_piper.common.graph_nodes import copy_into
from lightning_piper.common.operation_families import PERMUTATIONS
from lightning_piper.ir.boxed_code import compile_boxed
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.regions import Code
from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.instruction import Instruction
from lightning_piper.plan.instructions import Add, PackInstruction, Run
from lightning_piper.plan.plan import Plan

aten = torch.ops.aten
# Matrix product -> the same operation with an argument `out` for its result.
_INTO: dict[Any, Callable[..., torch.Tensor]] = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out}
# Matrix product -> the operation that adds the product to its first argument in place.
_ADDED: dict[Any, Callable[..., torch.Tensor]] = {
    aten.mm.default: aten.addmm_.default,
    aten.bmm.default: aten.baddbmm_.default,
}
# Operations that return a view of their first argument.
_SAME_MEMORY = {*PERMUTATIONS, aten.view.default}

Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, storage offset


@dataclass(frozen=True)
class GradDestination:
    """The final memory of gradients that chunks compute.

    Attributes:
        node: The node of the pack or sum.
        into: The slot of the pack or sum.
        runs: The chunks that compute the terms, in the order of the sum. A pack has one chunk.
        bucket: The bucket whose flat tensor is the memory; None if the memory is a bundle like the terms.
        take: For each tensor of the bucket, its index in a term; None if the term does not have the tensor.
    """

    node: int
    into: int
    runs: tuple[Run, ...]
    bucket: Bucket | None
    take: tuple[int | None, ...]


def destinations_of(plan: Plan, sums: bool) -> dict[int, GradDestination]:
    """Return the final memory of the gradients that chunks can write directly: slot of a chunk's bundle of
    gradients -> final memory.

    A chunk can write there if only one instruction reads its bundle, on the stream of the chunk, and if this
    instruction is a pack. If `sums` is set, the instruction may also be an addition. Then all terms of the sum
    must fulfill the condition, and the chunk of the first term must run first.
    """
    makers = {
        slot: (i, each)
        for i, each in enumerate(plan.instructions)
        if isinstance(each, Run)
        for slot in each.writes
    }
    readers: dict[int, list[Instruction]] = {}
    ends: dict[int, list[PackInstruction | Add]] = {}  # slot -> the instructions that write it
    for each in plan.instructions:
        for read in each.reads:
            if read.slot in makers:
                readers.setdefault(read.slot, []).append(each)
        if isinstance(each, PackInstruction) or (sums and isinstance(each, Add)):
            ends.setdefault(each.into, []).append(each)
    destinations: dict[int, GradDestination] = {}
    for into, steps in ends.items():
        terms = [(read.slot, each) for each in steps for read in each.reads]
        if all(readers.get(slot) == [each] and makers[slot][1].stream == each.stream for slot, each in terms):
            made = [makers[slot] for slot, _ in terms]
            if min(made, key=lambda pair: pair[0]) is made[0]:
                destination = GradDestination(
                    steps[0].node, into, tuple(run for _, run in made), steps[0].bucket, steps[0].take
                )
                destinations |= {slot: destination for slot, _ in terms}
    return destinations


@dataclass(frozen=True)
class InplaceCode:
    """Code that writes some of its outputs directly to their final memory.

    Attributes:
        code: The code. The tensors to write to are its last arguments.
        indices: The indices, in the bucket or bundle, of the tensors to write to.
        layouts: The layout of each tensor to write to, in the bucket or in its tensor of the bundle.
        specs: For a bundle, the spec of each tensor, or None if the code does not write it. Empty for a
            bucket.
        adds: Whether the code adds to the memory instead of overwriting it.
    """

    code: Code
    indices: tuple[int, ...]
    layouts: tuple[Layout, ...]
    specs: tuple[TensorSpec | None, ...]
    adds: bool

    def new(
        self, bucket: Bucket | None, device: torch.device, flat_of: Callable[[Bucket], torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return new memory to write to, with zeros where the code adds to it.

        Returns:
            For a bucket, its flat tensor, from `flat_of`, as the only entry. For a bundle, one tensor for
            each entry of the bundle, or None if the code does not write the entry.
        """
        if bucket is None:
            return tuple(
                None
                if spec is None
                else torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_()
                for spec in self.specs
            )
        flat = flat_of(bucket)
        if self.adds:
            for view in self.views((flat,)):
                view.zero_()
        return (flat,)

    def views(self, made: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors to write to, in the order of `indices`, as views of the memory that `new`
        returned."""
        if self.specs:
            return [
                made[index].as_strided(*layout)
                for index, layout in zip(self.indices, self.layouts, strict=True)
            ]
        return [made[0].as_strided(*layout) for layout in self.layouts]


def inplace_code(
    code: Code, destination: GradDestination, first: int, own: Sequence[TensorSpec], adds: bool
) -> InplaceCode | None:
    """Return code that writes gradients of a bundle directly to their final memory. None if it cannot write
    any of these gradients.

    Args:
        code: The chunk's code.
        destination: The final memory.
        first: The index of the bundle's first tensor among the outputs.
        own: The specs of the bundle.
        adds: Whether the code adds to the memory instead of overwriting it.
    """
    # Code with symbolic sizes, and code that runs the user's code, is not the method of a graph module.
    module = getattr(code.run, "__self__", None)
    if not isinstance(module, GraphModule):
        return None
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    copy_into(graph, code.graph, copies)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    output: Any = code.graph.output_node()
    often = Counter(output.args[0])
    layouts: dict[int, Layout] = {}
    inputs: list[TensorSpec] = []
    for number, (index, view) in enumerate(_wanted(destination, own)):
        if index is None:
            continue
        result = output.args[0][first + index]
        made = _written_for(result, output, view) if often[result] == 1 else None
        if made is None or not last:
            continue
        with graph.inserting_after(last[0]):
            last = [graph.placeholder(f"into_{number}")]
        copy, like = copies[made], made.meta["val"]
        with graph.inserting_before(copy):
            if adds:
                written = graph.call_function(_ADDED[made.target], (last[0], *copy.args))
            else:
                written = graph.call_function(_INTO[made.target], copy.args, {"out": last[0]})
        copy.replace_all_uses_with(written)
        graph.erase_node(copy)
        layouts[number] = (tuple(like.shape), like.stride(), int(view.storage_offset()))
        inputs.append(TensorSpec.of(like))
    if not layouts:
        return None
    specs = (
        ()
        if destination.bucket is not None
        else tuple(spec if i in layouts else None for i, spec in enumerate(own))
    )
    run = compile_boxed(graph, module)
    other = replace(code, made=lambda: (run, graph), inputs=(*code.inputs, *inputs))
    return InplaceCode(other, tuple(layouts), tuple(layouts.values()), specs, adds)


def written_in_place(code: Code, first: int, own: Sequence[TensorSpec]) -> list[bool]:
    """Return, for each gradient of a bundle, whether the code can write it directly into a bucket. Packing
    such a gradient takes no time.

    Args:
        code: The chunk's code.
        first: The index of the bundle's first tensor among the outputs.
        own: The specs of the bundle.
    """
    output: Any = code.graph.output_node()
    results = output.args[0]
    views = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in own]
    return [
        results.count(result) == 1 and _written_for(result, output, view) is not None
        for result, view in zip(results[first : first + len(own)], views, strict=True)
    ]


def _wanted(destination: GradDestination, own: Sequence[TensorSpec]) -> list[tuple[int | None, torch.Tensor]]:
    """Return (index, layout) for each tensor to write directly. The index in the bundle is None if the bundle
    does not have the tensor. The layout is its final layout, as a meta tensor.
    """
    if destination.bucket is not None:
        views = destination.bucket.views(
            torch.empty(destination.bucket.numel, dtype=destination.bucket.dtype, device="meta")
        )
        return list(zip(destination.take, views, strict=True))
    return [
        (i, torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta")) for i, s in enumerate(own)
    ]


def _written_for(result: Any, output: Node, view: torch.Tensor) -> Node | None:
    """Return the operation that computes only this result, if it can write the result into `view`; otherwise
    None."""
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
    """Return whether `like` has the layout of `view` and begins its own storage."""
    return (like.shape, like.stride(), like.dtype, like.storage_offset()) == (
        view.shape,
        view.stride(),
        view.dtype,
        0,
    )
