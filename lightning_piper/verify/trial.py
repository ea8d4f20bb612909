"""A trial run: tests once whether a step computes the same on a few samples as on parts of them.

A batch may be cut into microbatches under four conditions. Samples are independent, the backward pass is
linear in the loss's gradient, buffers move by sums and means over samples, and Python code does not depend on
the number of samples. The trial runs the user's code uncaptured, forward and backward, on some samples at
once and on parts of them. If terms of the loss need different weights, it runs the captured code instead. It
joins the parts with the weights of the program. If the results differ, it finds the first operation whose
results differ.
"""

from __future__ import annotations

import contextlib
import io
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_piper.capture import CapturedStep
from lightning_piper.capture.eager.eager_reference import Outcome, is_lost, mixed, run_eagerly
from lightning_piper.capture.tracing.step_trace import TracedStep
from lightning_piper.common.user_lines import user_line
from lightning_piper.directives import accumulating
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.verify.cross_sample import find_dependences
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.same_draws import SameDraws

FEW = 4  # maximum samples in a part; the trial uses at least twice as many samples if the batch has them
# In eps of the dtype. Results that differ by more do not differ by the order of additions alone. The largest
# measured rounding (BERT, GPT-2, Llama, T5, ViT) was 12 eps.
FAR = 2.0**10
_DROPS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}

# Functions whose results have arbitrary values.
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Difference:
    """A result of a step that is not the same on all samples as on their parts.

    Attributes:
        result: The loss, a logged value, a buffer or a parameter's gradient.
        distance: The distance of the results, relative to the largest value. Infinite if only the result on
            the parts is infinite or NaN.
        where: The first forward operation whose results differ, and the user's line. Empty if the results of
            all forward operations agree, so that the cause is in the backward pass.
    """

    result: str
    distance: float
    where: str

    def __str__(self) -> str:
        where = f", from {self.where} on" if self.where else ", in the backward pass"
        if self.distance == math.inf:
            return f"{self.result} is infinite or NaN only on parts of the samples{where}"
        return f"{self.result} differs by {self.distance:.1e}{where}"


def largest_difference(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    size: int,
    whole: bool = False,
) -> Difference | None:
    """Run a step on samples of a batch and on parts of them. Return the result that differs most, or None if
    no result differs.

    None may also mean that the step cannot be tried. Its batch has too few samples, or its parts cannot get
    the random numbers of the whole batch. Or its code accepts no other number of samples, draws random
    numbers that the capture does not show, or computes something else each time.

    Args:
        step: The captured step.
        tensors: Parameters and buffers by canonical name. They are not changed.
        leaves: The tensors of a batch.
        size: The size of a microbatch.
        whole: Whether to try the whole batch, not a few samples (default: False).
    """
    together = mixed(step)  # no single weight of a part is right for all terms of such a loss
    counted = any(term.denominator is not None for term in step.at(step.size).terms)
    part = size if counted or together or whole else min(size, FEW)
    there = min((len(x) for x in leaves if x.ndim), default=0) // part
    count = there if whole else min(max(2, -(-2 * FEW // part)), there)
    if count < 2:
        return None
    some = [x[: count * part] if x.ndim else x for x in leaves]
    parts = [Slice(i * part, (i + 1) * part) for i in range(count)]
    # Discard the step's prints, because they cover only these samples.
    with _NoDropout(), torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        before = torch.get_rng_state()
        try:
            together = together or is_lost(step, tensors, some, parts)
            found = (
                _by_graph(step, tensors, some, parts) if together else _by_code(step, tensors, some, parts)
            )
        except Exception:  # an error of the step itself is reported when it runs
            return None
        return found if step.draws or torch.equal(torch.get_rng_state(), before) else None


def _by_code(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    parts: Sequence[Slice],
) -> Difference | None:
    """Run the user's code on all samples and on their parts. Return the result that differs most; None if no
    result differs, or if a second run on all samples also gives other results.

    The existing capture says which loss, logged values and buffers to compare, so no further trace is needed.
    """
    whole = [Slice(0, parts[-1].stop)]
    draws = SameDraws(parts[-1].stop) if step.draws else None

    def run(slices: Sequence[Slice]) -> Outcome:
        with contextlib.nullcontext() if draws is None else draws.over(slices):
            return run_eagerly(step, tensors, leaves, slices)

    once, eps = run(whole), coarsest(step)
    found = _furthest(once, run(parts), eps)
    if found is None or _furthest(once, run(whole), eps) is not None:
        # If a second run on all samples also differs, a change of Python state is the cause, not the number
        # of samples.
        return None
    return Difference(*found, _first_difference(run, whole, parts))


def _by_graph(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    parts: Sequence[Slice],
) -> Difference | None:
    """Run the captured code on all samples and on their parts. Return the result that differs most; None if
    no result differs, or if the step draws random numbers.

    In the captured code, each term of the loss can have a weight of its own.
    """
    if step.draws:
        return None
    step = step.resized(parts[-1].stop)
    inputs = step.inputs(leaves)
    one, two = (
        interpret(dag, tensors, inputs) for dag in (build_dag(step), accumulating(step, tuple(parts)))
    )
    found = _furthest(one, two, coarsest(step))
    if found is None:
        return None
    met = next(iter(find_dependences(step, tensors, inputs, parts)), None)
    return Difference(*found, "" if met is None else f"{met.operation} in region {met.region} ({met.source})")


def coarsest(step: CapturedStep) -> float:
    """Return the rounding unit of the least precise values that a step computes."""
    values = [
        node.meta.get("val") for passed in step.at(step.size).code.values() for node in passed.graph.nodes
    ]
    dtypes = {x.dtype for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _furthest(one: Outcome, two: Outcome, eps: float) -> tuple[str, float] | None:
    """Return the result with the largest distance beyond rounding, and this distance; None if all distances
    are within rounding.

    Numbers that are infinite or NaN on all samples are not compared.
    """
    kinds = (
        ("", one.metrics, two.metrics),
        ("the gradient of ", one.grads, two.grads),
        ("buffer ", one.buffers, two.buffers),
    )
    far: dict[str, float] = {}
    for kind, a, b in kinds:
        largest = max((_size(x) for x in a.values()), default=0.0)
        for name in sorted(a.keys() & b.keys()):
            x, y = a[name].double(), b[name].double()
            # A gradient that is zero except for rounding moves by its own size.
            scale = max(_size(x), 1e-3 * largest if a is one.grads else 0.0) or 1.0
            far[f"{kind}{name!r}" if kind else name] = _distance(x, y) / scale
    return max(
        ((name, x) for name, x in far.items() if x > FAR * eps), key=lambda each: each[1], default=None
    )


def _size(x: torch.Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    return float(x.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if x.numel() else 0.0


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest distance where `x` is finite. It is infinite if `y` is infinite or NaN there."""
    far = torch.where((x == y) | ~x.isfinite(), 0.0, x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(far.max()) if far.numel() else 0.0


# Where results begin to differ


@dataclass(frozen=True)
class _Call:
    """A call of a torch function: the function's name, the user's line, and the tensors that it returned."""

    name: str
    where: str
    results: tuple[torch.Tensor, ...]


class _Calls(TorchFunctionMode):
    """A mode that records the calls of torch functions in the user's method in `made`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Call] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function. If the user's method is running, record the tensors that the function returns,
        unless their values are arbitrary."""
        result = function(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else (result,)
        kept = tuple(x.detach().clone() for x in found if isinstance(x, torch.Tensor))
        name = getattr(function, "__name__", str(function))
        if not kept or name in _UNFILLED:
            return result
        if any(frame.f_code is TracedStep._run.__code__ for frame, _ in traceback.walk_stack(None)):
            self.made.append(_Call(name, user_line(), kept))
        return result


def _first_difference(
    run: Callable[[Sequence[Slice]], object], whole: Sequence[Slice], parts: Sequence[Slice]
) -> str:
    """Run the step once more, and return as a text the first operation whose results differ, and its line.

    If the parts and the whole batch run different code before any results differ, the text says so, and names
    only the line. The text is empty if neither happens.
    """
    noted = []
    for slices in (whole, parts):
        with _Calls() as calls:
            run(slices)
        noted.append(calls.made)
    full, others = noted
    each = len(others) // len(parts)
    for i, one in enumerate(full[:each]):
        calls = others[i::each][: len(parts)]  # the same call in each part
        if any(call.name != one.name for call in calls):
            return f"{one.where} (other code runs for other numbers of samples)"
        if any(
            not _is_joined(x, list(found))
            for x, *found in zip(one.results, *(call.results for call in calls), strict=False)
        ):
            return f"{one.name} at {one.where}"
    return f"{full[each].where} (other code runs for other numbers of samples)" if len(full) > each else ""


def _is_joined(whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Return whether `whole` is, up to rounding, the parts joined row by row, their sum, or their mean.
    Return True if `whole` is not of a floating-point dtype."""
    if not whole.is_floating_point():
        return True
    if all(part.shape == whole.shape for part in parts):
        options = [torch.stack(parts).sum(0), torch.stack(parts).mean(0)]
    else:
        dims = [d for d, (a, b) in enumerate(zip(whole.shape, parts[0].shape, strict=False)) if a != b]
        if len(dims) != 1 or {part.ndim for part in parts} != {whole.ndim}:
            return False
        options = [torch.cat(parts, dims[0])]
    scale, eps = max(_size(whole.double()), 1e-30), FAR * torch.finfo(whole.dtype).eps
    return any(
        x.shape == whole.shape and _distance(whole.double(), x.double()) <= eps * scale for x in options
    )


class _NoDropout(TorchFunctionMode):
    """A mode in which dropout changes nothing, because parts draw other random numbers than the whole."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _DROPS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:  # its fifth argument is `dropout_p`
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0}
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p" or len(args) <= 4}
        return function(*args, **kwargs)
