"""Packing gradients into the flat tensor of a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_piper.ir.buckets import Bucket, packed_among
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.values import Sharded
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Operation,
    Planning,
    about,
    bucket_of,
    nothing,
    register_operation,
)
from lightning_piper.ops.facts import Facts, names_of
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Bundle, Reference, on_each_rank


@dataclass(frozen=True, kw_only=True)
class Pack(Node):
    """A node that copies some tensors of a bundle into the flat tensor of a bucket."""


@dataclass(frozen=True, kw_only=True)
class PackInstruction(Instruction):
    """An instruction that copies tensors of a bundle into a new flat tensor.

    Attributes:
        take: For each tensor of the bucket its index in the bundle. None: the bundle does not have the
            tensor, and the flat tensor has zeros in its place.
    """

    op: ClassVar[str] = "pack"
    bucket: Bucket
    take: tuple[int | None, ...]


def check(facts: Facts, node: Pack) -> Iterable[str]:
    """The bundle must have the gradients of the bucket's parameters, with the output's placement."""
    facts.forward(node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if made.bucket is None:
        yield f"{facts.at(node)} does not make a flat tensor of a bucket"
    elif value.bucket is not None or value.kind != made.kind or not set(made.names) <= set(value.names):
        yield (
            f"{facts.at(node)} packs {names_of(made.names)}, which {facts.named(node.inputs[0])} does not "
            "hold"
        )
    # If only one device holds the parameters of a bucket, its gradients need no sum over replicas. The only
    # shard is the whole bucket.
    unshared = made.bucket is not None and made.bucket.degree > 1 and made.bucket.terms == 1
    held = Sharded(0) if unshared else value.placement
    if made.placement != held:
        yield f"{facts.at(node)} reads a value with the placement {held}, but declares it as {made.placement}"


@on_each_rank
def interpret(run: Reference, node: Pack, inputs: list[Bundle]) -> list[Bundle]:
    by_name = dict(zip(run.dag.value(node.inputs[0]).names, inputs[0], strict=True))
    _loosen(run, node, by_name)
    return [[packed_among(bucket_of(node), node.outputs[0].names, by_name, inputs[0][0].device)]]


def _loosen(run: Reference, node: Pack, by_name: Mapping[str, torch.Tensor]) -> None:
    """State the error bounds of gradients that are summed in a dtype with larger rounding errors than their
    own dtype.

    A gradient is a sum of n terms, one for each pack and rank. Each term is rounded to the bucket's dtype, and
    then takes part in at most n - 1 additions. So with the unit roundoff u, the sum changes by at most
    ((1 + u)^n - 1) times the sum of the terms' magnitudes, in any order of the additions.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2002.
    """
    info = torch.finfo(bucket_of(node).dtype)
    for name in node.outputs[0].names:
        term = by_name[name]
        if info.eps > torch.finfo(term.dtype).eps and term.numel():
            packs = sum(name in other.outputs[0].names for other in run.dag.of_type(Pack))
            roundings = packs * len(run.group_ranks)
            largest = max(float(term.abs().max()), info.smallest_normal)
            by = largest * ((1 + info.eps / 2) ** roundings - 1)
            run.loosen(node, name, by, f"sums of gradients in {info.dtype}")


def taken(plan: Planning, node: Pack) -> tuple[int | None, ...]:
    """Return `PackInstruction.take`: for each tensor of the bucket its index in the input bundle of a pack,
    or None if the pack does not copy it."""
    names, packs = plan.dag.value(node.inputs[0]).names, frozenset(node.outputs[0].names)
    where = dict(zip(names, range(len(names)), strict=True))
    return tuple(where[name] if name in packs else None for name in bucket_of(node).names)


def produce(plan: Planning, node: Pack, ref: Ref) -> None:
    source, bucket = plan.read(node.inputs[0], node), bucket_of(node)
    slot = plan.new_slot(ref, "sum", node.stream)
    plan.emit(
        PackInstruction(**about(node), reads=(source,), writes=(slot,), bucket=bucket, take=taken(plan, node))
    )


def bind_pack(instruction: PackInstruction, on: Binding) -> Bound:
    """Return the function that packs a bundle, except for the tensors that chunks write themselves."""
    (source,), into, bucket, take = instruction.reads, instruction.into, instruction.bucket, instruction.take
    slots, new = on.slots, on.endpoint.flat
    # Indices of the tensors whose gradients the chunk's code wrote directly into the flat tensor, which saves
    # a copy. The slot then has this flat tensor already.
    there: frozenset[int] = on.chunks.inplace.get(instruction.node, frozenset())
    others = [(index, i) for index, i in enumerate(take) if i is not None and index not in there]
    absent = [index for index, i in enumerate(take) if i is None]

    def pack() -> None:
        bundle = slots[source.slot]
        if source.last:
            slots[source.slot] = None
        flat = slots[into][0] if there else new(bucket)
        views = bucket.views(flat) if others or absent else ()
        for index, i in others:
            views[index].copy_(bundle[i])
        for index in absent:
            views[index].zero_()
        slots[into] = (flat,)

    return pack


register_operation(
    Operation(Pack, check, interpret, nothing, produce, bind={PackInstruction: bind_pack}, alike=True)
)
