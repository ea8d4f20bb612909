"""The loss of a language model whose layers are divided into pipeline stages."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import lightning_piper as piper


def loss_in_stages(module: Any, batch: Tensor, *arguments: Tensor) -> Tensor:
    """Return the loss of a module that has `embed`, `layers`, `head` and a number of `stages`.

    Args:
        arguments: Arguments of each layer besides the activation.
    """
    x, count, stages = batch[:, :-1], len(module.layers), module.stages
    for stage in range(stages):
        with piper.annotate("PP", stage):
            x = module.embed(x) if stage == 0 else x
            for layer in module.layers[stage * count // stages : (stage + 1) * count // stages]:
                x = layer(x, *arguments)
            if stage == stages - 1:
                return F.cross_entropy(module.head(x).flatten(0, 1), batch[:, 1:].flatten())
    raise AssertionError
