"""A training step in plain PyTorch. Of the package, only the user-facing annotations run, which do nothing
here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.ir.regions import LOSS
from tests.models import Captured


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return samples `start:stop` of a batch, as copies in the same structure. Tensors without dimensions and
    other values are returned unchanged."""
    if isinstance(batch, Tensor):
        return batch[start:stop].clone() if batch.ndim else batch
    if isinstance(batch, Mapping):
        return type(batch)((k, cut(v, start, stop)) for k, v in batch.items())
    if isinstance(batch, tuple):
        parts = [cut(v, start, stop) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(batch):
        return type(batch)(**{k: cut(v, start, stop) for k, v in vars(batch).items()})
    return batch


def plain(captured: Captured, sizes: list[int], weights: list[float] | None = None) -> Outcome:
    """Return loss, logged values, gradients and changed buffers of one device that accumulates over
    microbatches.

    Args:
        captured: The case. Its module stays unchanged.
        sizes: The number of samples of each microbatch.
        weights: The weight of each microbatch (default: its share of the samples). Negative controls pass
            other weights.
    """
    module = copy.deepcopy(captured.module)
    weights, start = weights or [size / sum(sizes) for size in sizes], 0
    values: dict[str, list[Tensor]] = {}
    reductions: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, reduce_fx: Any = "mean", **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            values.setdefault(name, []).append(value.detach().double().reshape(()))
            reductions[name] = getattr(reduce_fx, "__name__", reduce_fx)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    module.log, module.log_dict = log, log_dict  # type: ignore[assignment]
    before = {name: x.clone() for name, x in module.named_buffers()}
    code = captured.step.at(captured.step.size)
    for size, weight in zip(sizes, weights, strict=True):
        for name, x in module.named_buffers():
            if not code.goes_on(captured.step.canonical[name]):
                x.copy_(before[name])  # the step changes the buffer once
        with captured.case.context():
            args = [cut(captured.batch, start, start + size), 0]
            result = module.training_step(*args[: module.training_step.__code__.co_argcount - 1])
        loss = (result["loss"] if isinstance(result, dict) else result).reshape(())
        log(LOSS, loss)
        (loss * weight).backward()
        start += size
    merge = {
        "mean": lambda v: sum(x * w for x, w in zip(v, weights, strict=True)),
        "sum": sum,
        "max": max,
        "min": min,
    }
    return Outcome(
        metrics={name: merge[reductions[name]](v) for name, v in values.items()},
        grads={name: x.grad for name, x in module.named_parameters() if x.grad is not None},
        buffers={name: x for name, x in module.named_buffers() if not torch.equal(x, before[name])},
    )


def differences(a: Outcome, b: Outcome) -> list[str]:
    """Return the names of the results that are not bitwise equal, or that only one outcome has."""
    found = []
    for left, right in ((a.metrics, b.metrics), (a.grads, b.grads), (a.buffers, b.buffers)):
        for name in sorted({*left, *right}):
            if name not in left or name not in right or not torch.equal(left[name], right[name]):
                found.append(name)
    return found


def distance(a: Outcome, b: Outcome) -> float:
    """Return the largest difference of a result, relative to the result's largest element. Both outcomes must
    have the same results."""
    worst = 0.0
    for left, right in ((a.metrics, b.metrics), (a.grads, b.grads), (a.buffers, b.buffers)):
        assert set(left) == set(right)
        for name, x in left.items():
            scale = float(x.double().abs().max())
            worst = max(worst, float((x.double() - right[name].double()).abs().max()) / (scale or 1.0))
    return worst
