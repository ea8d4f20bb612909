"""Values that are cut and joined along the batch, between a split and an unsplit region."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.values import Slice, TensorSpec
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, nothing, register_operation
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Bundle, Reference, on_each_rank, strided


@dataclass(frozen=True, kw_only=True)
class Cut(Node):
    """A node that cuts samples `start:stop` along `dim` out of a value.

    A split region reads the output of an unsplit region through such a node.
    """

    placed_by_reader = True

    dim: int
    start: int
    stop: int

    @property
    def details(self) -> str:
        return f"[{self.start}:{self.stop}] dim {self.dim}"


@dataclass(frozen=True, kw_only=True)
class Concat(Node):
    """A node that joins its inputs along `dim`.

    An unsplit region reads the output of a split region through such a node.
    """

    placed_by_reader = True

    dim: int

    @property
    def details(self) -> str:
        return f"dim {self.dim}"


@dataclass(frozen=True, kw_only=True)
class CutInstruction(Instruction):
    """An instruction that cuts samples `start:stop` along `dim` out of a bundle."""

    op: ClassVar[str] = "cut"
    dim: int
    start: int
    stop: int
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return [f"[{self.start}:{self.stop}]", "dim", str(self.dim), *super().details()]


@dataclass(frozen=True, kw_only=True)
class ConcatInstruction(Instruction):
    """An instruction that joins bundles along `dim`."""

    op: ClassVar[str] = "concat"
    dim: int
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return ["dim", str(self.dim), *super().details()]


# Static rules


def check_cut(facts: Facts, node: Cut) -> Iterable[str]:
    """The node must cut whole samples out of a value of one slice."""
    facts.forward(node)
    ref = node.inputs[0]
    if len(facts.parts.get(ref, {})) != 1:
        yield f"{facts.at(node)} cuts {facts.named(ref)}, which is not one slice"
        return
    ((whole, weight),) = facts.parts[ref].items()
    rows, rest = divmod(facts.dag.value(ref).tensors[0].shape[node.dim], len(whole))
    if rest or node.start % rows or node.stop % rows:
        yield f"{facts.at(node)} cuts {facts.named(ref)} inside of a sample"
        return
    yield from _shapes(facts, node, [(x.shape, node.stop - node.start) for x in facts.dag.value(ref).tensors])
    part = Slice(whole.start + node.start // rows, whole.start + node.stop // rows)
    facts.parts[node.id, 0] = {part: weight if weight == 1 else facts.share(part)}


def check_concat(facts: Facts, node: Concat) -> Iterable[str]:
    """The node must join slices of one output that follow each other."""
    facts.forward(node)
    parts = [next(iter(facts.parts.get(ref, {Slice(0, 0): Fraction(0)}))) for ref in node.inputs]
    if len({facts.origins.get(ref) for ref in node.inputs}) != 1:
        yield f"{facts.at(node)} joins different values: {', '.join(facts.named(ref) for ref in node.inputs)}"
    if any(a.stop != b.start for a, b in itertools.pairwise(parts)):
        yield f"{facts.at(node)} joins samples {', '.join(map(str, parts))}, which do not follow each other"
    columns = zip(*(facts.dag.value(ref).tensors for ref in node.inputs), strict=False)
    yield from _shapes(facts, node, [(xs[0].shape, sum(x.shape[node.dim] for x in xs)) for xs in columns])
    whole = Slice(min(part.start for part in parts), max(part.stop for part in parts))
    forward = next(iter(facts.parts[node.inputs[0]].values())) == 1
    facts.parts[node.id, 0] = {whole: Fraction(1) if forward else facts.share(whole)}


def _shapes(facts: Facts, node: Cut | Concat, made: list[tuple[tuple[int, ...], int]]) -> Iterable[str]:
    """The output must have the shape of the inputs with the new size along `dim`."""
    for (shape, rows), spec in zip(made, node.outputs[0].tensors, strict=False):
        found = (*shape[: node.dim], rows, *shape[node.dim + 1 :])
        if found != spec.shape:
            yield (
                f"{facts.at(node)} makes a tensor of shape {list(found)} along dimension {node.dim}, but declares it as "
                f"{spec}"
            )


# Reference semantics


@on_each_rank
def interpret_cut(run: Reference, node: Cut, inputs: list[Bundle]) -> list[Bundle]:
    rows, specs = node.stop - node.start, node.outputs[0].tensors
    return [[strided(x.narrow(node.dim, node.start, rows), s) for x, s in zip(inputs[0], specs, strict=True)]]


@on_each_rank
def interpret_concat(run: Reference, node: Concat, inputs: list[Bundle]) -> list[Bundle]:
    joined = [torch.cat(parts, node.dim) for parts in zip(*inputs, strict=True)]
    return [[strided(x, s) for x, s in zip(joined, node.outputs[0].tensors, strict=True)]]


# Plans


def produce_cut(plan: Planning, node: Cut, ref: Ref) -> None:
    """Emit the cut. Its result may share memory with its input, so both have the same source."""
    whole = plan.read(node.inputs[0], node)
    slot = plan.new_slot(ref, plan.source(whole.slot), node.stream)
    plan.emit(
        CutInstruction(
            **about(node),
            reads=(whole,),
            writes=(slot,),
            dim=node.dim,
            start=node.start,
            stop=node.stop,
            tensors=node.outputs[0].tensors,
        )
    )


def produce_concat(plan: Planning, node: Concat, ref: Ref) -> None:
    parts = tuple(plan.read(part, node) for part in node.inputs)
    slot = plan.new_slot(ref, "chunk", node.stream)
    plan.emit(
        ConcatInstruction(
            **about(node), reads=parts, writes=(slot,), dim=node.dim, tensors=node.outputs[0].tensors
        )
    )


# Runtime


def bind_cut(instruction: CutInstruction, on: Binding) -> Bound:
    """Return the function that cuts each tensor of a bundle. The results have the strides of the specs."""
    (source,), into, specs, slots = instruction.reads, instruction.into, instruction.tensors, on.slots
    dim, start, length = instruction.dim, instruction.start, instruction.stop - instruction.start

    def cut() -> None:
        bundle = slots[source.slot]
        if source.last:
            slots[source.slot] = None
        slots[into] = tuple(
            restrided(x.narrow(dim, start, length), s) for x, s in zip(bundle, specs, strict=True)
        )

    return cut


def bind_concat(instruction: ConcatInstruction, on: Binding) -> Bound:
    """Return the function that joins bundles tensor by tensor. The results have the strides of the specs."""
    reads = instruction.reads
    into = instruction.into
    specs = instruction.tensors
    dim = instruction.dim
    slots = on.slots

    def concat() -> None:
        bundles = [slots[read.slot] for read in reads]
        for read in reads:
            if read.last:
                slots[read.slot] = None
        joined = (torch.cat(parts, dim) for parts in zip(*bundles, strict=True))
        slots[into] = tuple(restrided(x, s) for x, s in zip(joined, specs, strict=True))

    return concat


def restrided(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the same numbers with the strides of `spec`: `x` itself if it has these strides, otherwise a
    copy."""
    if x.stride() == spec.stride:
        return x
    return torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device).copy_(x)


register_operation(
    Operation(
        Cut, check_cut, interpret_cut, nothing, produce_cut, bind={CutInstruction: bind_cut}, alike=True
    )
)
register_operation(
    Operation(
        Concat,
        check_concat,
        interpret_concat,
        nothing,
        produce_concat,
        bind={ConcatInstruction: bind_concat},
        alike=True,
    )
)
