"""`mean`: an average whose denominator is declared, for a loss from which it could not be read."""

from __future__ import annotations

import torch

from lightning_piper.errors import CaptureError


@torch.library.custom_op("lightning_piper::count", mutates_args=())
def _count(number: torch.Tensor) -> torch.Tensor:
    return number.clone()


@_count.register_fake
def _(number: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(number)


COUNT = torch.ops.lightning_piper.count.default


def mean(values: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """The sum of `values`, divided by `count`: a term of the loss that microbatches and replicas weigh by their counts.

        loss = piper.mean(token_losses * mask, mask.sum())

    On a batch that is cut into parts, the sums and the counts of all parts are added up before they are divided, so that the
    result is that of one device on the whole batch. Where a loss is written out with operations of torch this is seen without a
    word; declare it where the number is computed by something that cannot be looked into.

    Args:
        values: of any shape; zero for what does not count.
        count: how many there are in this batch, or in this part of it; a tensor without dimensions, or a number that is the same
            for every part (a number of things in the whole batch). It must follow from the batch, not from parameters: it is added
            up before the first backward pass. No gradient flows through it.

    Raises:
        CaptureError: the count is no number.
    """
    if not isinstance(count, torch.Tensor):
        return values.sum() / count
    if count.numel() != 1:
        raise CaptureError(f"piper.mean: count has shape {tuple(count.shape)}; give a single number, such as mask.sum()")
    number: torch.Tensor = torch.ops.lightning_piper.count(count.detach().reshape(()))
    return values.sum() / number
