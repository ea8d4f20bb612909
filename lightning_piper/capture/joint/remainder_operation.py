"""Two operations in a joint graph: one stands for the uncaptured code of a step, the other for the backward pass
of that code."""

from __future__ import annotations

from typing import Any

import torch

Tensors = list[torch.Tensor]


@torch.library.custom_op("lightning_piper::rest", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def remainder(trained: Tensors, others: Tensors, dtype: torch.dtype) -> Tensors:
    """Stand for the uncaptured code of a step in a graph. The code of the step runs in the place of this
    operation.

    Args:
        trained: tensors for which the backward pass computes gradients.
        others: all further tensors that the code reads.
        dtype: dtype of the loss.

    Returns:
        The loss, and an empty tensor that leads the backward pass to the autograd graph of this run.
    """
    raise NotImplementedError("it runs as the code of its step")


@torch.library.custom_op("lightning_piper::rest_backward", mutates_args=())
def remainder_backward(gradient: torch.Tensor, kept: torch.Tensor, trained: Tensors) -> Tensors:
    """Return the gradients of `trained`, contiguous and in their order. `gradient` is the gradient of the loss,
    and `kept` is the empty tensor that `remainder` returned. Like `remainder`, this only stands for code."""
    raise NotImplementedError("it runs as the code of its step")


@remainder.register_fake
def _(trained: Tensors, others: Tensors, dtype: torch.dtype) -> Tensors:
    return [trained[0].new_empty((), dtype=dtype), trained[0].new_empty((0,), dtype=torch.int8)]


@remainder_backward.register_fake
def _(gradient: torch.Tensor, kept: torch.Tensor, trained: Tensors) -> Tensors:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in trained]


def _keep(ctx: Any, inputs: Any, output: Tensors) -> None:
    trained, others, _ = inputs
    ctx.others = len(others)
    ctx.save_for_backward(output[1], *trained)


def _backward(ctx: Any, gradients: Tensors) -> Any:
    kept, *trained = ctx.saved_tensors
    return remainder_backward(gradients[0], kept, trained), [None] * ctx.others, None


remainder.register_autograd(_backward, setup_context=_keep)
REMAINDER = torch.ops.lightning_piper.rest.default
REMAINDER_BACKWARD = torch.ops.lightning_piper.rest_backward.default
