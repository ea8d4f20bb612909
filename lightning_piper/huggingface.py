"""Experts of Hugging Face models in a form that `shard_experts` can divide. The models' code does not change.

    from lightning_piper.huggingface import use_piper_experts

    model = Qwen3MoeForCausalLM(config)
    use_piper_experts(model)

`transformers` (5.0 or later) has a table of expert implementations, which models look up by name. This module
adds the implementation `"piper"`. It sorts tokens by expert and passes them through `piper.dispatch` and
`piper.combine`. This work has the tag `EP`, which numbers the layers with experts in the order of the step.
On one device, this implementation computes the same as the model's own `"eager"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_piper.annotate import annotate
from lightning_piper.errors import CaptureError
from lightning_piper.grouped_matmul import grouped_linear
from lightning_piper.routing import combine, dispatch

NAME = "piper"

__all__ = ["use_piper_experts"]


def use_piper_experts(model: Any) -> None:
    """Let a model compute its experts so that a `shard_experts` directive can divide them.

    Args:
        model: A `transformers` model, already built.

    Raises:
        CaptureError: The model has no experts with a choice of implementation; or a norm follows the experts;
            or `transformers` has divided the experts itself.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts = {
        name: module for name, module in model.named_modules() if hasattr(module, "has_post_expert_norm")
    }
    if not experts:
        raise CaptureError(
            f"use_piper_experts: {type(model).__name__} has no experts whose implementation can be chosen "
            "(transformers' use_experts_implementation). Call piper.dispatch and piper.combine in its code"
            " [PIPER-C014]"
        )
    for name, module in experts.items():
        if module.has_post_expert_norm:
            raise CaptureError(
                f"use_piper_experts: {name} has a norm after its experts, which is not supported. Call "
                "piper.dispatch and piper.combine in its code [PIPER-C014]"
            )
        if getattr(module, "_is_expert_parallel", False):
            raise CaptureError(
                f"use_piper_experts: {name} is already sharded by transformers. Load the model without a "
                "parallelism plan [PIPER-C014]"
            )
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    model.set_experts_implementation(NAME)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs for each token, `[T, width]`.

    Args:
        self: A module of stacked experts.
        hidden_states: The tokens, `[T, width]`.
        top_k_index, top_k_weights: The experts of each token and their weights, `[T, k]` each.
    """
    tokens, top = top_k_index.shape
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device).scatter_add(
        0, chosen, torch.ones_like(chosen)
    )
    with annotate("EP"):
        rows, sizes = dispatch(hidden_states[order // top], counts)
        rows = combine(_apply(self, rows, sizes))
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(tokens * top, device=order.device))
    weighted = rows[inverse].view(tokens, top, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


def _apply(experts: Any, rows: Tensor, sizes: Tensor) -> Tensor:
    if experts.has_gate:
        return _linear(
            experts, "down_proj", experts._apply_gate(_linear(experts, "gate_up_proj", rows, sizes)), sizes
        )
    return _linear(experts, "down_proj", experts.act_fn(_linear(experts, "up_proj", rows, sizes)), sizes)


def _linear(experts: Any, name: str, rows: Tensor, sizes: Tensor) -> Tensor:
    weight = getattr(experts, name)
    made = grouped_linear(rows, weight.transpose(1, 2) if experts.is_transposed else weight, sizes)
    if experts.has_bias:
        bias = getattr(experts, f"{name}_bias")
        made = made + bias.repeat_interleave(sizes, dim=0, output_size=made.shape[0])
    return made
