"""Bugs of the capture, of the first DAG and of `split`: sums of gradients, slices of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.cutting import graph_cut as capture_chunks
from lightning_piper.capture.tracing import captured_module, step_trace
from lightning_piper.directives import split
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.values import Slice
from lightning_piper.ops import build
from lightning_piper.ops.update import Accumulate, Update
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

READ_COPIES, COPY = (split._Rewrite, "_read_copies"), (split._Rewrite, "_copy")
MICROBATCHES = (split.Split, "_microbatches")


# Sums of gradients


def _sum(change: Callable[[tuple[Ref, ...]], tuple[Ref, ...]]) -> Wrap:
    """The inputs of the sums that a split makes, changed."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def read_copies(self: Any, user: Any) -> None:
            original(self, user)
            if isinstance(user, Accumulate) and change(user.inputs) != user.inputs:
                self.dag.rewire(user, inputs=change(user.inputs))
                seeded.hit()

        return read_copies

    return wrap


mutation("gradient contribution dropped", "one microbatch is left out of a gradient's "
                                          "sum", "rewrite", READ_COPIES)(
    _sum(lambda refs: refs[:-1] if len(refs) > 1 else refs))  # fmt: skip
mutation("gradient contribution doubled", "one microbatch enters a gradient twice", "rewrite", READ_COPIES)(
    _sum(lambda refs: refs + refs[-1:]))  # fmt: skip
mutation("only the last microbatch trained", "the loss is right, the gradient is that of the last "
                                             "microbatch", "rewrite",
         READ_COPIES)(_sum(lambda refs: refs[-1:]))  # fmt: skip
mutation("gradient of another output", "a sum takes another output of the same "
                                       "backward", "rewrite", READ_COPIES)(
    _sum(lambda refs: tuple((node, 1 - index if index < 2 else 0) for node, index in refs)))  # fmt: skip


@mutation("sum starts too early", "a sum does not wait for its last term", "rewrite", READ_COPIES)
def _sum_starts_too_early(original: Function, seeded: Seeded) -> Function:
    def read_copies(self: Any, user: Any) -> None:
        original(self, user)
        if isinstance(user, Accumulate) and len(user.inputs) > 1:
            self.dag.graph.remove_edge(user.inputs[-1][0], user.id)
            seeded.hit()

    return read_copies


@mutation("tied weight counted twice", "a gradient that two regions contribute to takes one of them "
                                       "twice", "rewrite",
          (build, "_gradients"))  # fmt: skip
def _tied_weight_counted_twice(original: Function, seeded: Seeded) -> Function:
    def gradients(dag: TrainingDAG, chunks: Any) -> None:
        original(dag, chunks)
        for update in [u for u in dag.of_type(Update) if len(u.inputs) > 1]:
            dag.rewire(update, inputs=update.inputs + update.inputs[:1])
            seeded.hit()

    return gradients


@mutation(
    "update missing", "a gradient is summed and never reaches the optimizer", "rewrite", (build, "_gradients")
)
def _update_missing(original: Function, seeded: Seeded) -> Function:
    def gradients(dag: TrainingDAG, chunks: Any) -> None:
        original(dag, chunks)
        dag.remove([next(dag.of_type(Update))])
        seeded.hit()

    return gradients


def _used_twice(change: Callable[[Any], list[Any]]) -> Wrap:
    """What becomes of a gradient that is the sum of two uses in one region."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def gradient_terms(node: Any, of: Any) -> list[Any]:
            terms: list[Any] = original(node, of)
            if terms == [node] and node.target is torch.ops.aten.add.Tensor:
                seeded.hit()
                return change(node)
            return terms

        return gradient_terms

    return wrap


mutation("weight used twice counted thrice", "a parameter that a region uses twice has one of the uses "
                                             "twice", "rewrite",
         (capture_chunks, "gradient_terms"), scenario="used twice", recapture=True)(
    _used_twice(lambda node: [node, node.args[0]]))  # fmt: skip
mutation("weight used twice counted once", "a parameter that a region uses twice has one of the "
                                           "uses", "rewrite",
         (capture_chunks, "gradient_terms"), scenario="used twice", recapture=True)(
    _used_twice(lambda node: [node.args[0]]))  # fmt: skip


@mutation("frozen parameter trained", "the capture forgets that a parameter takes no gradient", "rewrite",
          (step_trace, "without_data"), scenario="used twice", recapture=True)  # fmt: skip
def _frozen_parameter_trained(original: Function, seeded: Seeded) -> Function:
    def without_data(module: nn.Module, mode: Any, device: torch.device, parts: Any, step: str) -> Any:
        def fake(tensor: torch.Tensor) -> torch.Tensor:
            with mode:
                data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                seeded.hit()
            return nn.Parameter(data) if isinstance(tensor, nn.Parameter) else data

        return captured_module.replacing_tensors(module, fake)

    return without_data


# Slices of the batch


@mutation("uneven remainder lost", "samples that do not divide evenly are left out", "rewrite", MICROBATCHES)
def _uneven_remainder_lost(original: Function, seeded: Seeded) -> Function:
    def pieces(self: Any, dag: TrainingDAG, part: Slice) -> list[Slice]:
        found = original(self, dag, part)
        small = len(found[-1])
        if len(found[0]) > small:
            seeded.hit()
        return [Slice(part.start + i * small, part.start + (i + 1) * small) for i in range(len(found))]

    return pieces


def _second_piece(change: Callable[[list[Slice]], Slice]) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def pieces(self: Any, dag: TrainingDAG, part: Slice) -> list[Slice]:
            found = original(self, dag, part)
            if len(found) > 1:
                found[1] = change(found)
                seeded.hit()
            return found

        return pieces

    return wrap


mutation("slice off by one", "a microbatch begins and ends one sample too early", "rewrite", MICROBATCHES)(
    _second_piece(lambda found: Slice(found[1].start - 1, found[1].stop - 1)))  # fmt: skip
mutation("microbatch used twice", "the second microbatch is the first one again", "rewrite", MICROBATCHES)(
    _second_piece(lambda found: found[0]))  # fmt: skip


@mutation("pieces of pieces begin at 0", "a second split cuts all microbatches where it cuts the "
                                         "first", "rewrite", MICROBATCHES,
          scenario="split twice")  # fmt: skip
def _pieces_of_pieces_begin_at_0(original: Function, seeded: Seeded) -> Function:
    def pieces(self: Any, dag: TrainingDAG, part: Slice) -> list[Slice]:
        seeded.hits += part.start > 0
        return [
            Slice(piece.start - part.start, piece.stop - part.start) for piece in original(self, dag, part)
        ]

    return pieces


@mutation("microbatch dropped", "the last microbatch does not run", "rewrite", MICROBATCHES)
def _microbatch_dropped(original: Function, seeded: Seeded) -> Function:
    def pieces(self: Any, dag: TrainingDAG, part: Slice) -> list[Slice]:
        seeded.hit()
        return original(self, dag, part)[:-1]

    return pieces


@mutation(
    "labels of another microbatch",
    "the loss meets outputs of one microbatch with targets of another",
    "rewrite",
    COPY,
)
def _labels_of_another_microbatch(original: Function, seeded: Seeded) -> Function:
    def copy(self: Any, chunk: Chunk, i: int, part: Slice) -> Chunk:
        if chunk.inputs and self.dag.interface(chunk).batch and i < 2:
            part = self.microbatches[chunk.slice][1 - i]
            seeded.hit()
        return original(self, chunk, i, part)

    return copy


@mutation(
    "saved values of another microbatch",
    "a backward reads what another microbatch's forward saved",
    "rewrite",
    COPY,
)
def _saved_values_of_another_microbatch(original: Function, seeded: Seeded) -> Function:
    def copy(self: Any, chunk: Chunk, i: int, part: Slice) -> Chunk:
        made = original(self, chunk, i, part)
        if i == 1:
            others = {
                ref for ref in chunk.inputs if ref[0] in self.copies and self.dag.value(ref).kind == "saved"
            }
            refs = tuple((self.copies[ref[0]][0].id, ref[1]) if ref in others else new
                         for ref, new in zip(chunk.inputs, made.inputs, strict=True))  # fmt: skip
            seeded.hits += len(others)
            self.dag.rewire(made, inputs=refs)
        return made

    return copy


@mutation(
    "shape of another slice",
    "a chunk is said to make values of the whole batch's shape",
    "rewrite",
    (split, "make_chunk"),
)
def _shape_of_another_slice(original: Function, seeded: Seeded) -> Function:
    def make_chunk(dag: TrainingDAG, key: Any, part: Slice, *args: Any, **more: Any) -> Chunk:
        chunk = original(dag, key, part, *args, **more)
        specs = dag.code.code[key].outputs
        seeded.hit()
        outputs = tuple(dataclasses.replace(v, tensors=s) for v, s in zip(chunk.outputs, specs, strict=True))
        return dataclasses.replace(chunk, outputs=outputs)

    return make_chunk


@mutation("inputs exchanged", "two inputs of a chunk change places", "rewrite", (split, "make_chunk"))
def _inputs_exchanged(original: Function, seeded: Seeded) -> Function:
    def make_chunk(
        dag: TrainingDAG, key: Any, part: Slice, inputs: tuple[Ref, ...], *args: Any, **more: Any
    ) -> Chunk:
        if len(inputs) > 1:
            inputs = (inputs[1], inputs[0], *inputs[2:])
            seeded.hit()
        return original(dag, key, part, inputs, *args, **more)

    return make_chunk


@mutation("all microbatches called 0", "every piece of a split has index 0", "rewrite", (split, "make_chunk"))
def _all_microbatches_called_0(original: Function, seeded: Seeded) -> Function:
    def make_chunk(
        dag: TrainingDAG, key: Any, part: Slice, inputs: Any, tags: dict[str, Any], **more: Any
    ) -> Chunk:
        seeded.hit()
        return original(dag, key, part, inputs, {**tags, "MB": 0}, **more)

    return make_chunk


@mutation("batch size forgotten", "after a split, the share of a microbatch is taken of the first "
                                  "microbatch", "rewrite",
          (split.Split, "apply"))  # fmt: skip
def _batch_size_forgotten(original: Function, seeded: Seeded) -> Function:
    def apply(self: Any, dag: TrainingDAG) -> None:
        original(self, dag)
        dag.size = min(len(chunk.slice) for chunk in dag.of_type(Chunk))
        seeded.hit()

    return apply
