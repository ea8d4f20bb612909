"""Bugs of the executor and of whoever drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_piper.ir.values import Slice
from lightning_piper.ops.base import BINDERS, Binding
from lightning_piper.plan import instructions as ins
from lightning_piper.runtime import chunks, local_transport, step_outputs
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

BEGIN = (chunks.ChunkBinder, "begin")
Chunks = Any  # `ChunkBinder`, whose private fields are what these bugs are about


# What a chunk is given


def _loss_gradient(weight: Callable[[int, int, float], float]) -> Wrap:
    """The gradient of the loss of `length` of `size` samples is something else."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def begin(self: Chunks, leaves: list[torch.Tensor], seed: int, scale: float) -> None:
            original(self, leaves, seed, scale)
            for length, slot in self._gradients.items():
                (right,) = self._slots[slot]
                wrong = torch.full_like(right, weight(length, self._plan.size, scale))
                seeded.hits += not torch.equal(right, wrong)
                self._slots[slot] = (wrong,)

        return begin

    return wrap


mutation("mean over microbatches", "each of M microbatches weighs 1/M, also the smaller "
                                   "ones", "executor", BEGIN)(
    _loss_gradient(lambda length, size, scale: scale / 3))  # fmt: skip
mutation("no mean divisor", "gradients of microbatches are summed, not averaged", "executor", BEGIN)(
    _loss_gradient(lambda length, size, scale: scale))  # fmt: skip
mutation("divided twice", "the share of a microbatch is taken twice", "executor", BEGIN)(
    _loss_gradient(lambda length, size, scale: (length / size) ** 2 * scale))  # fmt: skip
mutation("gradient scale ignored", "the loss is not scaled, its gradients are unscaled all the "
                                   "same", "executor", BEGIN)(
    _loss_gradient(lambda length, size, scale: length / size))  # fmt: skip


def _leaves(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Wrap:
    """The batch of the step is another one."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def begin(self: Chunks, leaves: list[torch.Tensor], seed: int, scale: float) -> None:
            seeded.hit()
            original(self, change(leaves), seed, scale)

        return begin

    return wrap


mutation("zeros for inputs", "the model trains on zeros", "executor", BEGIN)(
    _leaves(lambda leaves: [torch.zeros_like(leaves[0]), *leaves[1:]]))  # fmt: skip
mutation("wrong batch leaf", "inputs and targets are exchanged", "executor", BEGIN)(
    _leaves(lambda leaves: leaves[::-1])
)
mutation("labels rolled", "every sample has its neighbor's target", "executor", BEGIN)(
    _leaves(lambda leaves: [*leaves[:-1], leaves[-1].roll(1, 0)]))  # fmt: skip


@mutation("batch of the first step", "every step trains on the batch of the first one", "executor", BEGIN)
def _batch_of_the_first_step(original: Function, seeded: Seeded) -> Function:
    def begin(self: Chunks, leaves: list[torch.Tensor], seed: int, scale: float) -> None:
        seeded.hits += hasattr(self, "first_leaves")
        self.first_leaves = getattr(self, "first_leaves", leaves)
        original(self, self.first_leaves, seed, scale)

    return begin


def _run(change: Callable[[ins.Run, int], dict[str, Any]]) -> Wrap:
    """A chunk is bound as if it were another one."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def bound(self: Chunks, *args: Any) -> Any:
            *first, run = args
            changed = replace(run, **change(run, self._plan.device))
            seeded.hits += changed != run
            return original(self, *first, changed)

        return bound

    return wrap


def _first_sample(run: ins.Run, device: int) -> dict[str, Any]:
    return {"slice": Slice(run.slice.start, run.slice.start + 1)} if len(run.slice) > 1 else {}


def _sample_earlier(run: ins.Run, device: int) -> dict[str, Any]:
    return {"slice": Slice(run.slice.start - 1, run.slice.stop - 1)} if run.slice.start else {}


mutation(
    "batch sliced off by one",
    "a chunk's samples begin one too early",
    "executor",
    (chunks.ChunkBinder, "_arguments"),
)(_run(_sample_earlier))
mutation(
    "code of another shape",
    "a chunk runs the code of a smaller slice",
    "executor",
    (chunks.ChunkBinder, "bind"),
)(_run(_first_sample))
mutation(
    "mask by device",
    "dropout depends on where a chunk runs",
    "executor",
    (chunks.ChunkBinder, "_seeded"),
    scenario="dropout",
)(_run(lambda run, device: {"key": (run.key[0] + 10 * device, run.key[1])}))
mutation(
    "mask by pass only",
    "dropout is the same in all microbatches",
    "executor",
    (chunks.ChunkBinder, "_seeded"),
    scenario="dropout",
)(_run(lambda run, device: {"slice": Slice(0, len(run.slice))}))


@mutation(
    "mask by order of execution",
    "dropout draws from the global generator",
    "executor",
    (chunks.ChunkBinder, "_seeded"),
    scenario="dropout",
)
def _mask_by_order_of_execution(original: Function, seeded: Seeded) -> Function:
    def unseeded(self: Chunks, call: Function, run: ins.Run) -> Function:
        seeded.hit()
        return call

    return unseeded


@mutation("generator left behind", "after a step the caller's random numbers go on from somewhere "
                                   "else", "executor",
          (chunks.ChunkBinder, "_seeded"), scenario="dropout")  # fmt: skip
def _generator_left_behind(original: Function, seeded: Seeded) -> Function:
    def draws_once_more(self: Chunks, call: Function, run: ins.Run) -> Function:
        bound = original(self, call, run)

        def go() -> None:
            bound()
            torch.rand(1)
            seeded.hit()

        return go

    return draws_once_more


@mutation("stale parameters", "chunks are bound to copies of the parameters, which the optimizer does not "
                              "change", "executor",
          (chunks.ChunkBinder, "_find"))  # fmt: skip
def _stale_parameters(original: Function, seeded: Seeded) -> Function:
    def find(
        self: Chunks, run: ins.Run, kind: str, name: str, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        found: torch.Tensor = original(self, run, kind, name, tensors)
        seeded.hits += kind == "parameter"
        return found.clone() if kind == "parameter" else found

    return find


@mutation(
    "value freed too early",
    "a chunk's outputs are gone before they are read",
    "executor",
    (chunks, "_bind_code"),
)
def _value_freed_too_early(original: Function, seeded: Seeded) -> Function:
    def bind_code(run: Any, slots: list[Any], parts: Any, dropped: Any, writes: list[Any]) -> Function:
        call = original(run, slots, parts, dropped, writes)

        def call_and_free() -> None:
            call()
            for slot, *_ in writes[-1:]:
                slots[slot] = None
                seeded.hit()

        return call_and_free

    return bind_code


# Sums, pieces, transfers


@mutation("added into what was sent", "a sum is made in its first term, which another device still "
                                      "reads", "executor",
          (BINDERS, ins.Add), scenario="tied over two")  # fmt: skip
def _added_into_what_was_sent(original: Function, seeded: Seeded) -> Function:
    def bind_add(instruction: ins.Add, on: Binding) -> Function:
        if instruction.in_place or instruction.bucket is not None:
            return original(instruction, on)
        (left, right), into, slots = instruction.reads, instruction.into, on.slots

        def add() -> None:
            for x, y in zip(slots[left.slot], slots[right.slot], strict=True):
                x.add_(y)
            slots[into] = slots[left.slot]
            seeded.hit()
            for read in (left, right):
                if read.last:
                    slots[read.slot] = None

        return add

    return bind_add


@mutation("sum overwritten", "each further term replaces the sum", "executor", (BINDERS, ins.Add))
def _sum_overwritten(original: Function, seeded: Seeded) -> Function:
    def bind_add(instruction: ins.Add, on: Binding) -> Function:
        if not instruction.in_place or instruction.bucket is not None:
            return original(instruction, on)
        (term,), into, slots = instruction.reads, instruction.into, on.slots

        def overwrite() -> None:
            for total, x in zip(slots[into], slots[term.slot], strict=True):
                total.copy_(x)
            seeded.hit()
            if term.last:
                slots[term.slot] = None

        return overwrite

    return bind_add


def _instruction(change: Callable[[Any], dict[str, Any]]) -> Wrap:
    """An instruction is bound as if it said something else."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def bind(instruction: Any, *args: Any) -> Any:
            changed = replace(instruction, **change(instruction))
            seeded.hits += changed != instruction
            return original(changed, *args)

        return bind

    return wrap


mutation(
    "cut off by one", "a piece begins and ends one row too early", "executor", (BINDERS, ins.CutInstruction)
)(_instruction(lambda x: {"start": x.start - 1, "stop": x.stop - 1} if x.start else {}))
mutation("joined in reverse", "pieces are joined from the last to the "
                              "first", "executor", (BINDERS, ins.ConcatInstruction))(
    _instruction(lambda x: {"reads": x.reads[::-1]}))  # fmt: skip
mutation("metric without weights", "a logged mean is the sum of its microbatches' "
                                   "means", "executor", (BINDERS, ins.Merge))(
    _instruction(lambda x: {"weights": (1.0,) * len(x.weights)}))  # fmt: skip
mutation("report of one region", "only the first region's metrics are "
                                 "reported", "executor", (BINDERS, ins.ReportInstruction),
         scenario="auxiliary on one")(_instruction(lambda x: {"reads": x.reads[:1]}))  # fmt: skip


@mutation("message of the step before", "a receive is satisfied by what the last step left there", "executor",
          (local_transport.LocalEndpoint, "wait"))  # fmt: skip
def _message_of_the_step_before(original: Function, seeded: Seeded) -> Function:
    def wait(self: Any, instruction: ins.WaitWork, slots: list[Any]) -> Function:
        bound = original(self, instruction, slots)
        if instruction.node in self._meet:
            return bound
        box = self._transport.box(self._irecv[instruction.node])

        def wait_and_keep() -> object:
            message = box[0]
            result = bound()
            if message is not None:
                box[0] = message
                seeded.hit()
            return result

        return wait_and_keep

    return wait


@mutation("metrics not summed over devices", "each device reports its own part of the loss", "executor",
          (local_transport.LocalEndpoint, "_wait_for_all"))  # fmt: skip
def _metrics_not_summed_over_devices(original: Function, seeded: Seeded) -> Function:
    def wait_for_all(self: Any, instruction: ins.WaitWork, slots: list[Any]) -> Function:
        bound, me = original(self, instruction, slots), self._plan.device
        meeting = self._meet[instruction.node][0]

        def wait() -> object:
            parts = self._transport.collectives[meeting].brought.get(me, ((None,),))[0]
            result = bound()
            if slots[instruction.into] is not None:
                slots[instruction.into] = parts[0] if isinstance(parts[0], tuple) else (parts[0],)
                seeded.hit()
            return result

        return wait

    return wait_for_all


# What a step hands out


@mutation(
    "buffers not committed",
    "the module's buffers stay as they were",
    "executor",
    (step_outputs.StepOutputs, "commit"),
    scenario="batch norm",
)
def _buffers_not_committed(original: Function, seeded: Seeded) -> Function:
    def commit(self: Any, keep: bool = False) -> None:
        seeded.hits += bool(self._changed)
        self._changed = {}

    return commit


@mutation("batches counted twice", "new values of buffers are added to the old ones", "executor",
          (step_outputs.StepOutputs, "commit"), scenario="batch norm")  # fmt: skip
def _batches_counted_twice(original: Function, seeded: Seeded) -> Function:
    def commit(self: Any, keep: bool = False) -> None:
        for name in self._changed:
            if not self._changed[name].is_floating_point():
                self._changed[name] = self._changed[name] + self._module_buffers[name]
                seeded.hit()
        original(self, keep)

    return commit


@mutation(
    "gradients of the last step",
    "a gradient is added to that of the step before",
    "executor",
    (step_outputs.StepOutputs, "empty"),
)
def _gradients_of_the_last_step(original: Function, seeded: Seeded) -> Function:
    def empty(self: Any) -> Any:
        grads, *others = original(self)
        before = getattr(self, "before", {})
        self.before = {name: x.clone() for name, x in grads.items()}
        for name in before:
            grads[name].add_(before[name])
            seeded.hit()
        return grads, *others

    return empty
