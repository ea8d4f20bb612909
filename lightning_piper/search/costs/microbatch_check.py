"""Decide whether a step has the same result in microbatches. If the result may be different, a search uses
one microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_piper.search.costs.blocks import BlockCut
from lightning_piper.verify.trial import largest_difference


def meets(cut: BlockCut, leaves: Sequence[torch.Tensor] = ()) -> bool:
    """Return whether the step may compute a different result in microbatches. The result is True in these
    cases:

    - an operation on the way to the loss mixes the samples of the batch: a batch norm, in-batch negatives;
    - the step updates buffers from its samples;
    - the backward pass is not linear in the gradient of the loss;
    - Piper cannot tell how the microbatches' values of the loss or of a logged value combine;
    - a trial with `leaves` shows a difference.

    Args:
        leaves: The tensors of the batch. The trial runs the step on half of the samples and on
            parts of this half, and compares the results. There is no trial without `leaves`, with one sample,
            with a batch that cannot be divided, or if the step cannot be traced for half of the samples.
    """
    size = cut.step.size
    code = cut.step.at(size)
    if (
        code.meet is not None
        or code.nonlinear is not None
        or any(key[1] == "F" and interface.takes_statistics for key, interface in code.interfaces.items())
    ):
        return True
    if code.assumed or code.local or any(log.name in code.unknown for log in code.logs):
        return True
    half = size // 2
    if not leaves or not half or code.undivided is not None or cut.refuses(half) is not None:
        return False
    names = [*cut.module.named_parameters(), *cut.module.named_buffers()]
    tensors = {cut.step.canonical[name]: x.detach() for name, x in names}
    return largest_difference(cut.step, tensors, leaves, half) is not None
