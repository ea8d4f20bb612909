"""`mean`: an average with a declared denominator, if Piper cannot read the denominator from the loss."""

from __future__ import annotations

import numpy as np
import torch

from lightning_piper.common.limits import kind_of
from lightning_piper.errors import CaptureError


@torch.library.custom_op("lightning_piper::count", mutates_args=())
def _count(number: torch.Tensor) -> torch.Tensor:
    return number.clone()


@_count.register_fake
def _(number: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(number)


# The operation that marks a declared denominator in a captured graph.
COUNT = torch.ops.lightning_piper.count.default


def mean(values: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """Return the sum of `values` divided by `count`, as a term of the loss.

        loss = piper.mean(token_losses * mask, mask.sum())

    Piper weights this term of each microbatch and replica by its count. If a program divides the batch, Piper
    adds up the sums and the counts of all parts before it divides. So the result is the same as on one device
    with the whole batch. Piper finds the denominators of losses written with torch operations itself. Declare
    a denominator if an operation that Piper cannot analyze computes it.

    Args:
        values: A tensor of any shape, with zeros for elements that do not count.
        count: The number of elements that count, in the samples that this step or microbatch has. Give a
            tensor without dimensions. Or give a number that is the same for all microbatches and replicas,
            such as a number of elements of the whole batch. The count must depend on the batch alone, not on
            parameters, because the counts are added up before the first backward pass. No gradient
            flows through the count.

    Raises:
        CaptureError: The count is neither a number nor a tensor with one element.
    """
    if isinstance(count, np.generic):
        count = count.item()
    if not isinstance(count, torch.Tensor):
        if not isinstance(count, int | float):
            raise CaptureError(
                f"piper.mean: count is {kind_of(count)}. Give a single number, such as mask.sum() [PIPER-C013]"
            )
        return values.sum() / count
    if count.numel() != 1:
        raise CaptureError(
            f"piper.mean: count has shape {tuple(count.shape)}. Give a single number, such as mask.sum()"
            " [PIPER-C013]"
        )
    number: torch.Tensor = torch.ops.lightning_piper.count(count.detach().reshape(()))
    return values.sum() / number
