"""`linear_cross_entropy`: the cross entropy of a linear layer's scores, without all scores at once."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from lightning_piper.common.limits import integer, kind_of, shown
from lightning_piper.errors import CaptureError
from lightning_piper.placements.chunked_scores import SCORES_OF

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return `F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)` for classes in the last
    dimension, without the scores of all rows at once.

        loss = piper.linear_cross_entropy(hidden, self.head.weight, tokens)

    The forward pass and the backward pass compute the scores of a chunk of rows at a time, so the scores are
    computed twice. The result equals torch's within rounding. For float16 and bfloat16, it is in float32. If
    the classes are sharded (`ShardWeights` of the weight along dimension 0), each rank computes the scores of
    its classes only.

    Args:
        input: `[..., in]`: a row for each target. Leave the dimensions of samples and positions apart, because
            sequences that are sharded over devices cannot be flattened.
        linear_weight: `[classes, in]`, as in `torch.nn.Linear`.
        target: `[...]`, integers: the class of each row.
        linear_bias: `[classes]`.
        reduction: "mean" (over the rows that are not ignored), "sum" or "none".
        ignore_index: Rows with this target do not count: their loss is 0.
        label_smoothing: The share of the target, from 0 to 1, that is spread over all classes.
        chunk: Number of rows whose scores exist at once (default: as many as have 16,777,216 scores, but at
            least 512).

    Returns:
        A tensor without dimensions; `[...]` for "none".

    Raises:
        CaptureError: Shapes, dtypes or arguments do not fit. Targets that are probabilities are not supported:
            use `torch.nn.functional.cross_entropy`.
    """
    _check(input, linear_weight, linear_bias, target)
    _check_options(reduction, ignore_index, label_smoothing, chunk)
    input, linear_weight = _cast(input), _cast(linear_weight)
    linear_bias = None if linear_bias is None else _cast(linear_bias)
    counts = target != ignore_index
    index = torch.where(counts, target, 0)
    picked, sums = SCORES_OF(input, linear_weight, linear_bias, index, chunk or 0)
    if label_smoothing:
        # The mean of a row's scores is its score for the mean of the classes' weights. It is a sum first, because
        # ranks that shard the classes can only add.
        classes = linear_weight.shape[0]
        mean = (input @ (linear_weight.sum(0) / classes)).to(picked.dtype)
        mean = mean if linear_bias is None else mean + (linear_bias.sum() / classes).to(picked.dtype)
        picked = (1 - label_smoothing) * picked + label_smoothing * mean
    losses = torch.where(counts, sums - picked, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def _cast(x: Tensor) -> Tensor:
    """Return the tensor in autocast's dtype, if autocast is on. Like torch's own products, it does not change
    float64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    """Raise a `CaptureError` if the tensors do not fit."""
    given = {"input": input, "linear_weight": weight, "target": target, "linear_bias": bias}
    for name, value in given.items():
        if not isinstance(value, Tensor) and (name != "linear_bias" or value is not None):
            _refuse(f"{name} is {kind_of(value)}", "Give a tensor")
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        _refuse(
            f"target is {target.dtype}",
            "Give the class of each row as an integer. For probabilities, use torch.nn.functional.cross_entropy",
        )
    fits = weight.ndim == 2 and input.ndim > 0 and input.shape[:-1] == target.shape
    if (
        not fits
        or input.shape[-1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        beside = "" if bias is None else f", linear_bias {list(bias.shape)}"
        _refuse(
            f"input {list(input.shape)}, linear_weight {list(weight.shape)}{beside} and target "
            f"{list(target.shape)} do not fit",
            "Give input [..., in], linear_weight [classes, in], linear_bias [classes] and target [...]",
        )
    dtypes = {name: x.dtype for name, x in given.items() if name != "target" and isinstance(x, Tensor)}
    if not torch.is_autocast_enabled(input.device.type) and len(set(dtypes.values())) > 1:
        _refuse(
            f"{' and '.join(f'{name} is {dtype}' for name, dtype in dtypes.items())}", "Give them one dtype"
        )


def _check_options(reduction: str, ignore_index: int, label_smoothing: float, chunk: int | None) -> None:
    """Raise a `CaptureError` if an argument that is not a tensor has a value that is not valid."""
    if reduction not in REDUCTIONS:
        _refuse(f"reduction is {shown(reduction)}", "Give 'mean', 'sum' or 'none'")
    if integer(ignore_index) is None:
        _refuse(f"ignore_index is {shown(ignore_index)}", "Give an integer")
    if not isinstance(label_smoothing, int | float) or not 0 <= label_smoothing <= 1:
        _refuse(f"label_smoothing is {shown(label_smoothing)}", "Give a number from 0 to 1")
    if chunk is not None and ((number := integer(chunk)) is None or number < 1):
        _refuse(f"chunk is {shown(chunk)}", "Give a number of rows >= 1")


def _refuse(found: str, advice: str) -> NoReturn:
    raise CaptureError(f"linear_cross_entropy: {found}. {advice} [PIPER-C013]")
