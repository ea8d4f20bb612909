"""Verification of a step that is not captured, by running the user's code.

The static check covers the nodes around the step. The step's gradients over replicas are compared with one
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_piper.accelerators import seeded
from lightning_piper.capture import flatten
from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.capture.eager.eager_step import EagerStep, is_of_none
from lightning_piper.capture.user_code.step_arguments import arguments
from lightning_piper.common.module_copies import copy_module
from lightning_piper.directives import Directive, replicas_of
from lightning_piper.directives.replicate import rounds_params, without_sharding
from lightning_piper.errors import CaptureError, DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done, run_pipeline
from lightning_piper.verify.equivalence import PERTURBATIONS, check_comparable, compare, movement, one_ulp
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.report import Report, ReportRow

Grads = dict[str, torch.Tensor]  # name of a parameter -> its gradient


def verify_executed(
    module: nn.Module, batch: Any, program: Sequence[Directive], why: CaptureError, seed: int = 0
) -> Report:
    """Return a report on a step that runs uncaptured: each replica runs on its part of the batch, and the
    replicas' gradients are averaged.

    Args:
        module: A LightningModule with real parameters. It is not changed.
        batch: The batch of all replicas, which divide its samples equally.
        program: A program that only replicates the whole step.
        why: The reason why the step is not captured.
        seed: The seed of random numbers.

    Raises:
        VerificationError: A gradient of one device is NaN.
        CaptureError: `why`, if this check cannot run the step. It cannot if it is too late (`why.late`), if the
            module optimizes manually or cannot be copied (`copy_module`), or if the replicas cannot divide the
            batch equally. Or if the program does more than replicate the step, or rounds parameters.
    """
    found = replicas_of(program)
    replicas = max(found.values(), default=0) + 1
    runs = _UserRuns(module, batch, seed)
    if (
        why.late
        or not getattr(module, "automatic_optimization", True)
        or runs.spec.undivided
        or rounds_params(program)
        or runs.spec.size % replicas
        or any(hasattr(type(part), "__del__") for part in module.modules())
    ):
        raise why
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    trained = [name for name, x in module.named_parameters() if x.requires_grad]
    check_comparable(single := _outcome(runs.of(0, 1)))
    step = EagerStep(module, replicas, trained, device)
    passes = _ComparedPasses(module, runs, replicas, trained)
    step.backward = passes.backward
    try:
        run_pipeline(step, without_sharding(program), after=passes.after)
    except DirectiveError as error:
        why.add_note(
            f"Piper can run a step uncaptured only if the program replicates the whole step; {error}"
        )
        raise why from None
    moved = movement(single, [_outcome(runs.of(0, 1, nudge)) for nudge in range(1, PERTURBATIONS + 1)])
    whole = compare(single, passes.last, moved)
    return Report(tuple(passes.rows), whole, executed=f"the step is not captured: {why}")


class _ComparedPasses:
    """A hook that runs the DAG after each pass, and compares the gradients with those before the pass and
    with the mean of one device's gradients on the parts of the batch.

    Args:
        module: The module.
        runs: Runs of the user's code.
        replicas: Number of replicas of the finished program.
        trained: Names of the parameters that get gradients.

    Attributes:
        rows: The rows of the report, one for each pass that is checked separately.
        last: The gradients after the last of these passes.
    """

    def __init__(self, module: nn.Module, runs: _UserRuns, replicas: int, trained: Sequence[str]) -> None:
        self._runs, self._trained, self._static_check = runs, trained, StaticCheck()
        self._tensors = {
            name: x.detach() for name, x in [*module.named_parameters(), *module.named_buffers()]
        }
        self._parts = [runs.of(part, replicas) for part in range(replicas)]
        self._single = self.last = _outcome(_mean(self._parts))
        check_comparable(self._single, parts=True)
        self._turn: Iterator[Grads] = iter(())  # the gradients of the replicas that have not run yet
        self.rows: list[ReportRow] = []

    def backward(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the next replica, one for each trained parameter. An entry is None if the
        replica does not have this gradient."""
        made = next(self._turn)
        return [None if made.get(name) is None else made[name].clone() for name in self._trained]

    def after(self, dag: TrainingDAG, done: Done) -> None:
        """Check the DAG after a pass, run it, and compare its gradients. Skip passes that are checked
        together with a later pass."""
        self._static_check(dag, done)
        if not done.by.apart:
            return
        self._turn = iter(self._parts if dag.replicas > 1 else [_mean(self._parts)])
        run = interpret(dag, self._tensors, self._runs.leaves, self._runs.seed)
        now = _outcome({name: x for name, x in run.grads.items() if not is_of_none(x)})
        before, single = compare(self.last, now, {}), compare(self._single, now, {})
        self.rows.append(ReportRow(done.by.index, done.by.name, done.by.contract, before, single))
        self.last = now


class _UserRuns:
    """Runs of the user's code, each with a copy of the module."""

    def __init__(self, module: nn.Module, batch: Any, seed: int) -> None:
        self._module, self.seed = module, seed
        self.leaves, self.spec = flatten(batch)
        self._batch = batch

    def of(self, part: int, parts: int, nudge: int = 0) -> Grads:
        """Return the gradients of one of several equal parts of the batch. With `nudge`, move each parameter
        by one ulp first.
        """
        module = copy_module(self._module)
        if nudge:
            generator = torch.Generator().manual_seed(nudge)
            with torch.no_grad():
                for param in module.parameters():
                    param.copy_(one_ulp(param, generator))
        leaves = [x.chunk(parts)[part] if x.dim() else x for x in self.leaves]
        device = leaves[0].device if leaves else torch.device("cpu")
        with seeded(self.seed, device), torch.enable_grad():
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
