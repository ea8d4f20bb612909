"""Does a step compute the same in microbatches? Where it is not plain that it does, a search takes none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_piper.capture.meeting import takes_statistics
from lightning_piper.ir.regions import Interface
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.search.blocks import Cut
from lightning_piper.verify.cross_sample import find_dependences


def meets(cut: Cut, leaves: Sequence[torch.Tensor] = ()) -> bool:
    """Do microbatches compute something else? They do if an operation on the way to the loss looks across the samples of the batch,
    such as a batch norm, or in-batch negatives; if the step changes buffers, which each microbatch would change; if the backward
    pass is not linear in the gradient of the loss; and if it is not known how the loss or a logged value follows from those of the
    microbatches.

    Args:
        leaves: the tensors of the batch; with them the step is run in two halves, which shows what its operations do not.
    """
    size = cut.step.size
    code = cut.step.at(size)
    if code.meet is not None or code.nonlinear is not None or any(takes_statistics(code, key) for key in code.code):
        return True
    if code.assumed or any(log.name in code.unknown for log in code.logs):
        return True
    if any(interface.state or _writes(interface) for interface in code.interfaces.values()):
        return True
    half = size // 2
    if (
        not leaves
        or not half
        or code.undivided is not None
        or cut.refuses(half) is not None
        or cut.refuses(size - half) is not None
    ):
        return False
    names = [*cut.module.named_parameters(), *cut.module.named_buffers()]
    tensors = {cut.step.canonical[name]: x.detach() for name, x in names}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return bool(find_dependences(cut.step, tensors, cut.step.inputs(leaves), [Slice(0, half), Slice(half, size)]))


def _writes(interface: Interface) -> bool:
    return any(output.kind == Kind.BUFFER for output in interface.outputs)
