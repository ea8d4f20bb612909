"""Run the step on one device without a graph: eager autograd with gradient accumulation.

This is the reference for tests and checks, because it does not depend on the capture.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_piper.capture.steps.captured_step import CapturedStep
from lightning_piper.capture.tracing.captured_module import as_captured, replacing_tensors
from lightning_piper.ir.regions import LOSS, Logged
from lightning_piper.ir.terms import Weighing
from lightning_piper.ir.values import Kind, Slice


@dataclass(frozen=True)
class Outcome:
    """The values that a training step computes.

    Attributes:
        metrics: name -> float64 scalar, merged over slices: the loss under `ir.regions.LOSS`, and each value
            that the captured step logs as a tensor. A value is missing if it cannot be merged from several
            slices.
        grads: canonical name -> gradient. Parameters without a gradient are missing.
        buffers: canonical name -> new value of a buffer that the step changed.
        results: for each replica of a forward-only step: name -> returned tensor. Empty for other steps.
        slack: parameter name -> a bound on the error of any element of its gradient from operations that only
            approximate. The operations themselves state their bounds.
        approximate: labels of the operations that only approximate.
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
    """Run the user's `training_step` on each slice of the batch, weight the losses, and sum the gradients. If
    `StepCode.weighs_gradients`, weight the gradients of each slice instead of its loss.

    Args:
        step: Has the module and its batch spec. The function changes neither the parameters nor the buffers
            of the module, but the step's code may change Python attributes.
        tensors: Values of the parameters and buffers by canonical name. The run copies them.
        leaves: The batch's tensors. The run copies them.
        slices: Adjacent slices of the batch, in order: the microbatches. Several slices are allowed only if
            the step is not `mixed`. A step that reads sums over the whole batch, or gathers samples, runs
            once on the samples of all slices.

    Returns:
        The outcome with new tensors. Its `results`, `slack` and `approximate` are empty.
    """
    if step.at(step.size).sums_over_batch or step.at(step.size).gathers_samples:
        slices = (Slice(slices[0].start, slices[-1].stop),)
    weights, folds = _weights(step, tensors, leaves, slices), _folds(step)
    whole = step.batch_spec.undivided is not None
    params = {
        n: x.detach().clone().requires_grad_(step.params[n].requires_grad)
        for n, x in tensors.items()
        if n in step.params
    }
    buffers = {n: x.detach().clone() for n, x in tensors.items() if n in step.buffers}
    wrapper = step.uncaptured()
    wrapper.batch_idx = step.reads.history.batch_idx
    in_tensors = {log.name for log in step.at(step.size).logs if log.constant is None}
    values: dict[str, list[torch.Tensor]] = {}
    state = {**params, **buffers}
    # `id` of a tensor of the module -> the copy that replaces it in this run
    mine = {
        id(x): state[step.canonical[n]]
        for n, x in [*step.module.named_parameters(), *step.module.named_buffers()]
    }
    # A buffer whose new value does not depend on the part of the batch changes once per step; see
    # `StepCode.goes_on`.
    once = {n: x.clone() for n, x in buffers.items() if not step.at(step.size).goes_on(n)}
    with (
        torch.enable_grad(),
        replacing_tensors(step.module, lambda x: mine[id(x)]),
        as_captured(step.module, wrapper),
    ):
        for part, weight in zip(slices, weights[LOSS], strict=True):
            # Before each slice other than the first, restore the buffers that change once per step.
            for name, x in [*step.module.named_buffers()] if part is not slices[0] else []:
                if step.canonical[name] in once:
                    x.detach_().copy_(once[step.canonical[name]])
            # Clone the tensors, because the step may change its batch.
            cut = [(x if whole or not x.ndim else x[part.start : part.stop]).clone() for x in leaves]
            loss, *logged = wrapper(*cut)
            if step.at(step.size).weighs_gradients:
                _add_weighed(loss, params, len(part) / sum(map(len, slices)))
            elif weight != 0:
                # The loss of a slice without counted labels is nan, and 0 times its gradient would also be
                # nan.
                (loss * weight.to(loss.dtype)).backward()
            for name, value in [(LOSS, loss), *_logged(wrapper.logs, logged, in_tensors)]:
                values.setdefault(name, []).append(value.detach().double())
        # Read the buffers from the module again, because the step can replace them.
        buffers = {step.canonical[n]: x.detach() for n, x in step.module.named_buffers()}
    # A metric computed from several values of the whole batch cannot be merged from its values on slices.
    known = {name: found for name, found in values.items() if name in folds or len(slices) == 1}
    metrics = {
        name: merged(folds[name], found, weights[name]) if name in folds else found[0]
        for name, found in known.items()
    }
    grads = {name: x.grad for name, x in params.items() if x.grad is not None}
    changed = {n: x for n, x in buffers.items() if n in _changed_names(step)}
    return Outcome(metrics, grads, changed)


def _add_weighed(loss: torch.Tensor, params: Mapping[str, torch.Tensor], weight: float) -> None:
    """Run the backward pass of a loss, and add its gradients times `weight` to `x.grad` of each parameter. A
    parameter that the loss does not use keeps its `grad`, which may be None."""
    before = {name: x.grad for name, x in params.items()}
    for x in params.values():
        x.grad = None
    loss.backward()
    for name, x in params.items():
        made, old = None if x.grad is None else x.grad * weight, before[name]
        x.grad = old if made is None else made if old is None else old + made


def mixed(step: CapturedStep) -> bool:
    """Return whether the loss or a logged value is computed from several terms (`StepCode.terms`). Each term
    has its own weight for a slice, so no single weight of the slice is right for the whole value."""
    seen: dict[str, set[int]] = {}
    for name, term in _terms(step):
        seen.setdefault(name, set()).add(term)
    return any(len(terms) > 1 for terms in seen.values())


def _terms(step: CapturedStep) -> list[tuple[str, int]]:
    """Return (name, index in `StepCode.terms`) for each term of the loss and of logged values. A value of
    several terms has several entries."""
    outputs = [out for interface in step.at(step.size).interfaces.values() for out in interface.outputs]
    return [
        (LOSS if out.kind == Kind.LOSS else out.names[0], out.term) for out in outputs if out.term is not None
    ]


def _folds(step: CapturedStep) -> dict[str, str]:
    """Return name -> fold (`sum`, `max` or `min`) for the loss and the logged values that have a term."""
    terms = step.at(step.size).terms
    return {name: terms[term].folds for name, term in _terms(step)}


def _weights(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    slices: Sequence[Slice],
) -> dict[str, torch.Tensor]:
    """Return the weights of the slices in the loss (`LOSS`) and in each logged value that has a term: name ->
    float64 tensor with one weight for each slice. If a value has several terms, its last term counts."""
    weights = term_weights(step, tensors, leaves, slices)
    return {name: weights[term] for name, term in _terms(step)}


def term_weights(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    slices: Sequence[Slice],
    captured: bool = False,
) -> list[torch.Tensor]:
    """Return the weights of the slices in each term, on one device that accumulates over the slices.

    Args:
        step, tensors, leaves, slices: see `run_eagerly`.
        captured: whether the weights are for captured code, which divides by 1 instead of 0 if a slice counts
            nothing.

    Returns:
        For each of `StepCode.terms`: a float64 tensor with one weight for each slice.
    """
    sizes = torch.tensor([float(len(part)) for part in slices], dtype=torch.float64)
    found: list[torch.Tensor] = []
    for i, term in enumerate(step.at(step.size).terms):
        found.append(sizes / sizes.sum() if term.weighing == Weighing.SAMPLES else torch.ones_like(sizes))
        if term.denominator is not None and len(slices) > 1:
            codes = [step.at(len(part)).terms[i].denominator for part in slices]
            counts = torch.stack(
                [
                    code.counted(leaves, tensors, part)
                    for code, part in zip(codes, slices, strict=True)
                    if code
                ]
            )
            found[-1] = term.denominator.of(counts.unbind(1), part=captured) / term.denominator.of(
                counts.sum(0).unbind(0)
            )
    return found


def is_lost(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    slices: Sequence[Slice],
) -> bool:
    """Return whether the user's code would lose a term on a slice, because it multiplies or divides the term by
    0 or by a number that is not finite. Captured code uses 1 instead, and gets other weights."""
    ways = (term_weights(step, tensors, leaves, slices, captured) for captured in (False, True))
    return any(not torch.equal(*pair) for pair in zip(*ways, strict=True))


def merged(fold: str, values: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Return the value of the whole batch, merged from the values of the slices.

    Args:
        fold: `sum`, `max` or `min`.
        values: the value of each slice, as a scalar.
        weights: the weight of each slice. Only a sum uses the weights: each value is multiplied by its
            weight. A slice with weight 0 then counts 0, even if its value is nan.
    """
    if fold != "sum":
        return getattr(torch.stack(values), f"a{fold}")()  # type: ignore[no-any-return]
    # Add the values in order, because the grouping in torch's sum depends on the vector width of the
    # processor.
    return functools.reduce(
        torch.add, [v * w if w else torch.zeros_like(v) for v, w in zip(values, weights, strict=True)]
    )


def _logged(
    logs: Sequence[Logged], tensors: Sequence[torch.Tensor], names: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) for each logged tensor, and for each logged number whose name is in `names`.

    `names` are the values that the captured step logs as tensors. The step may take a number out of such a
    tensor when it runs on data.

    Args:
        logs: the logs of the run. A log of a tensor has no constant.
        tensors: the logged tensors, in order.
    """
    remaining = iter(tensors)
    for log in logs:
        if log.constant is None:
            yield log.name, next(remaining)
        elif log.name in names and not callable(log.constant):
            yield log.name, torch.tensor(log.constant, dtype=torch.get_default_dtype())


def _changed_names(step: CapturedStep) -> set[str]:
    """Return the canonical names of the buffers that the step changes."""
    code = step.at(step.size)
    return {
        name
        for interface in code.interfaces.values()
        for out in interface.outputs
        if out.kind == Kind.BUFFER
        for name in out.names
    }
