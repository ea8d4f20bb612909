"""Bugs of what drives executors, as a strategy does, and of the transport between real processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.plan import instructions as ins
from lightning_piper.runtime import executor, process
from lightning_piper.runtime.collectives import Members
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

BEGIN, INIT, END = ((executor.Executor, name) for name in ("begin", "__init__", "end"))


def _begun(change: Callable[[Any, Sequence[torch.Tensor], int, float], tuple[Any, int, float]]) -> Wrap:
    """A step is begun with other things than it should."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def begin(
            self: Any, leaves: Sequence[torch.Tensor], seed: int, scale: float = 1.0, *more: Any
        ) -> None:
            wrong = change(self, leaves, seed, scale)
            seeded.hits += wrong[0] is not leaves or wrong[1:] != (seed, scale)
            original(self, *wrong, *more)

        return begin

    return wrap


mutation("seed not passed on", "every step draws the random numbers of the "
                               "first", "strategy-like", BEGIN, scenario="dropout")(
    _begun(lambda self, leaves, seed, scale: (leaves, 0, scale)))  # fmt: skip
mutation(
    "seed by device", "devices disagree about the seed of a step", "strategy-like", BEGIN, scenario="dropout"
)(_begun(lambda self, leaves, seed, scale: (leaves, seed + self.plan.device, scale)))
mutation("loss scaled on one device", "devices disagree about the scale of the loss", "strategy-like", BEGIN)(
    _begun(lambda self, leaves, seed, scale: (leaves, seed, scale if self.plan.device == 0 else 1.0))
)
mutation("batches in different orders", "devices disagree about the order of a batch's "
                                        "samples", "strategy-like", BEGIN)(
    _begun(lambda self, leaves, seed, scale: (
        leaves if self.plan.device == 0 else [x.flip(0) for x in leaves], seed, scale)))  # fmt: skip


@mutation("devices initialized differently", "copies of one parameter begin with different "
                                             "values", "strategy-like", INIT,
          scenario="tied over two")  # fmt: skip
def _devices_initialized_differently(original: Function, seeded: Seeded) -> Function:
    def init(self: Any, plan: Any, step: Any, params: Mapping[str, torch.Tensor], *args: Any) -> None:
        if plan.device:
            params = {
                name: x + torch.linspace(0, 0.1, x.numel(), dtype=torch.float64).view_as(x)
                for name, x in params.items()
            }
            seeded.hit()
        original(self, plan, step, params, *args)

    return init


@mutation(
    "executor bound to copies",
    "the executor reads copies of the module's parameters and buffers",
    "strategy-like",
    INIT,
)
def _executor_bound_to_copies(original: Function, seeded: Seeded) -> Function:
    def init(self: Any, plan: Any, step: Any, params: Mapping[str, torch.Tensor], *args: Any) -> None:
        seeded.hit()
        original(self, plan, step, {name: x.clone() for name, x in params.items()}, *args)

    return init


def _ended(change: Callable[[Any, executor.StepResult, Seeded], executor.StepResult]) -> Wrap:
    """What a step has handed out is not what reaches the optimizer or the logger."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def end(self: Any) -> executor.StepResult:
            return change(self, original(self), seeded)

        return end

    return wrap


def _tied_once(self: Any, result: executor.StepResult, seeded: Seeded) -> executor.StepResult:
    kept = {name: x for name, x in result.grads.items() if self.plan.device == 0 or "shared" not in name}
    seeded.hits += len(kept) < len(result.grads)
    return executor.StepResult(kept, result.metrics)


def _loss_lost(self: Any, result: executor.StepResult, seeded: Seeded) -> executor.StepResult:
    seeded.hit()
    return executor.StepResult(
        result.grads, result.metrics if self.plan.device else torch.zeros_like(result.metrics)
    )


def _last_gradient_lost(self: Any, result: executor.StepResult, seeded: Seeded) -> executor.StepResult:
    seeded.hits += bool(result.grads)
    return executor.StepResult(dict(list(result.grads.items())[:-1]), result.metrics)


mutation("tied weight stepped on one device", "the other device's copy of a tied weight stays "
                                              "behind", "strategy-like", END,
         scenario="tied over two")(_ended(_tied_once))  # fmt: skip
mutation("loss lost before the logger", "the first device reports a loss of zero", "strategy-like", END)(
    _ended(_loss_lost)
)
mutation("gradient lost before the optimizer", "one parameter is never stepped", "strategy-like", END)(
    _ended(_last_gradient_lost)
)


# Real processes


@mutation("wait for a receive dropped", "a received value is read before it is there", "executor",
          (process.ProcessEndpoint, "wait"), processes=True)  # fmt: skip
def _wait_for_a_receive_dropped(original: Function, seeded: Seeded) -> Function:
    def wait(self: Any, instruction: ins.WaitWork, slots: list[Any]) -> Function:
        kept: list[Any] = []

        def ignore() -> None:
            kept.append(slots[instruction.into])  # the message must still have a place to go to
            slots[instruction.into] = tuple(x.clone() for x in kept[-1][1])
            seeded.hit()

        return ignore

    return wait


@mutation("strides lost on the wire", "a value that lies transposed in memory arrives as if it did "
                                      "not", "executor",
          (process, "packer"), processes=True)  # fmt: skip
def _strides_lost_on_the_wire(original: Function, seeded: Seeded) -> Function:
    def packer(*args: Any) -> Function:
        def pack(x: torch.Tensor) -> torch.Tensor:
            seeded.hits += not x.is_contiguous()
            return x.contiguous()

        return pack

    return packer


@mutation("processes do not sum the loss", "each process reports its own part of the loss", "executor",
          (Members, "add_up"), processes=True)  # fmt: skip
def _processes_do_not_sum_the_loss(original: Function, seeded: Seeded) -> Function:
    class Done:
        def wait(self) -> None:
            pass

    def add_up(members: Members, x: torch.Tensor) -> tuple[Done, torch.Tensor]:
        seeded.hit()
        return Done(), x

    return add_up
