"""Verification of a step that is not captured, by running the user's code.

The static check covers the nodes around the step. The step's gradients over replicas are compared with one
device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_piper.accelerators import seeded
from lightning_piper.capture import flatten
from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.capture.eager.eager_step import EagerStep, is_of_none
from lightning_piper.capture.user_code.step_arguments import arguments
from lightning_piper.directives import Directive, replicas_of
from lightning_piper.directives.zero_stages import without_sharding
from lightning_piper.errors import CaptureError, DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done, run_pipeline
from lightning_piper.verify.equivalence import PERTURBATIONS, compare, movement, one_ulp
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.report import Report, ReportRow

Grads = dict[str, torch.Tensor]


def verify_executed(
    module: nn.Module, batch: Any, program: Sequence[Directive], why: CaptureError, seed: int = 0
) -> Report:
    """Return a report on a step that runs uncaptured: each replica on its part of the batch, and the mean of
    their gradients.

    Args:
        module: A LightningModule with real parameters. It is not changed.
        batch: The batch of all replicas, which divide its samples equally.
        program: A program that only replicates the whole step.
        why: The reason why the step is not captured.
        seed: The seed of random numbers.

    Raises:
        CaptureError: `why`, if the step cannot run uncaptured, or if the program does more than replicate
            the step.
    """
    found = replicas_of(program)
    replicas = max(found.values(), default=0) + 1
    runs = _UserRuns(module, batch, seed)
    if (
        why.late
        or not getattr(module, "automatic_optimization", True)
        or runs.spec.undivided
        or runs.spec.size % replicas
    ):
        raise why
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    trained = [name for name, x in module.named_parameters() if x.requires_grad]
    step = EagerStep(module, replicas, trained, device)
    parts = [runs.of(part, replicas) for part in range(replicas)]
    tensors = {name: x.detach() for name, x in [*module.named_parameters(), *module.named_buffers()]}
    turn: Iterator[Grads] = iter(())
    rows: list[ReportRow] = []
    single = _outcome(_mean(parts))
    last = single

    def backward() -> Sequence[torch.Tensor | None]:
        made = next(turn)
        return [None if made.get(name) is None else made[name].clone() for name in trained]

    static_check = StaticCheck()

    def after(dag: TrainingDAG, done: Done) -> None:
        nonlocal turn, last
        static_check(dag, done)
        if not done.by.apart:
            return
        of_dag = parts if dag.replicas > 1 else [_mean(parts)]
        turn = iter(of_dag)
        now = interpret(dag, tensors, runs.leaves, seed)
        now = _outcome({name: x for name, x in now.grads.items() if not is_of_none(x)})
        rows.append(
            ReportRow(
                done.by.index,
                done.by.name,
                done.by.contract,
                compare(last, now, {}),
                compare(single, now, {}),
            )
        )
        last = now

    step.backward = backward
    try:
        run_pipeline(step, without_sharding(program), after=after)
    except DirectiveError as error:
        why.add_note(
            f"Piper can run a step uncaptured only if the program replicates the whole step; {error}"
        )
        raise why from None
    alone = _outcome(runs.of(0, 1))
    moved = movement(alone, [_outcome(runs.of(0, 1, nudge)) for nudge in range(1, PERTURBATIONS + 1)])
    return Report(tuple(rows), compare(alone, last, moved), executed=f"the step is not captured: {why}")


class _UserRuns:
    """Runs of the user's code, each with a copy of the module."""

    def __init__(self, module: nn.Module, batch: Any, seed: int) -> None:
        self._module, self._seed = module, seed
        self.leaves, self.spec = flatten(batch)
        self._batch = batch

    def of(self, part: int, parts: int, nudge: int = 0) -> Grads:
        """Return the gradients of one of several equal parts of the batch. With `nudge`, move each parameter
        by one ulp first.
        """
        module = copy.deepcopy(self._module)
        if nudge:
            generator = torch.Generator().manual_seed(nudge)
            with torch.no_grad():
                for param in module.parameters():
                    param.copy_(one_ulp(param, generator))
        leaves = [x.chunk(parts)[part] if x.dim() else x for x in self.leaves]
        device = leaves[0].device if leaves else torch.device("cpu")
        with seeded(self._seed, device), torch.enable_grad():
            given = self._batch if parts == 1 else self.spec.rebuild(leaves)
            step: Any = module.training_step
            made = step(*arguments(step, given, 0, None))
            loss = made["loss"] if isinstance(made, Mapping) else made
            loss.backward()
        return {name: x.grad for name, x in module.named_parameters() if x.grad is not None}


def _mean(parts: Sequence[Grads]) -> Grads:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part[name] for part in parts if name in part) / len(parts) for name in names}  # type: ignore[misc]


def _outcome(grads: Grads) -> Outcome:
    return Outcome({}, grads, {})
