"""The step as one device runs it, without a graph: eager autograd, accumulating over microbatches. The independent reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_piper.capture.step import CapturedStep
from lightning_piper.capture.trace import REDUCE, Step, as_captured, swapped
from lightning_piper.ir.regions import LOSS
from lightning_piper.ir.values import Kind, Slice


@dataclass(frozen=True)
class Outcome:
    """What a training step computes.

    Attributes:
        metrics: the loss under `ir.regions.LOSS`, and every logged tensor under its name, merged over slices, as float64 scalars.
        grads: by canonical parameter name; parameters that get no gradient are missing.
        buffers: buffers that the step changed, after it.
        results: of a forward-only step, for each replica: name -> tensor of what it returns.
        slack: parameter name -> by how much operations that only approximate, as they state it, may have moved any element of the
            gradient.
        approximate: labels of these operations.
    """

    metrics: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    results: Sequence[Mapping[str, torch.Tensor]] = ()
    slack: Mapping[str, float] = field(default_factory=dict)
    approximate: Sequence[str] = ()


def run_eagerly(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    slices: Sequence[Slice],
) -> Outcome:
    """Run the user's `training_step` on each slice of the batch, weigh its loss by the slice's share, and sum the gradients.

    Args:
        step: names the module and its batch spec; the module itself is not changed.
        tensors: parameters and buffers by canonical name.
        leaves: the batch's tensors.
        slices: microbatches, in order.
    """
    total = sum(len(part) for part in slices)
    params = {n: x.detach().clone().requires_grad_(step.params[n].requires_grad) for n, x in tensors.items() if n in step.params}
    buffers = {n: x.detach().clone() for n, x in tensors.items() if n in step.buffers}
    wrapper = Step(step.module, step.batch_spec, step.context)
    wrapper.batch_idx = step.reads.history.batch_idx
    merged: dict[str, list[torch.Tensor]] = {}
    reductions: dict[str, str] = {LOSS: "mean"}
    # The wrapper becomes the module's parent only for this call, so its training mode stays as the user set it.
    state = {**params, **buffers}
    mine = {id(x): state[step.canonical[n]] for n, x in [*step.module.named_parameters(), *step.module.named_buffers()]}
    with torch.enable_grad(), swapped(step.module, lambda x: mine[id(x)]), as_captured(step.module, wrapper):
        for part in slices:
            cut = [(x[part.start : part.stop] if x.ndim else x).clone() for x in leaves]  # the step may change its batch
            loss, *logged = wrapper(*cut)
            (loss * (len(part) / total)).backward()
            tensors_logged = [log for log in wrapper.logs if log.constant is None]
            reductions |= {log.name: log.reduce for log in tensors_logged}
            for name, value in zip([LOSS, *(log.name for log in tensors_logged)], [loss, *logged], strict=True):
                merged.setdefault(name, []).append(value.detach().double())
        buffers = {step.canonical[n]: x.detach() for n, x in step.module.named_buffers()}  # also those that were replaced
    weights = [len(part) / total for part in slices]
    metrics = {name: REDUCE[reductions[name]](values, weights) for name, values in merged.items()}
    grads = {name: x.grad for name, x in params.items() if x.grad is not None}
    changed = {n: x for n, x in buffers.items() if n in _changed_names(step)}
    return Outcome(metrics, grads, changed)


def _changed_names(step: CapturedStep) -> set[str]:
    code = step.at(step.size)
    return {
        name for interface in code.interfaces.values() for out in interface.outputs if out.kind == Kind.BUFFER for name in out.names
    }
