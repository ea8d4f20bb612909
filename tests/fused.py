"""A decoder whose queries, keys and values are one weight, and whose gated network has one weight for both
products.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensors import DIM, Decoder

PARAMS: dict[str, Any] = {
    "*.qkv.weight": (0, 3),
    "*.turned": (1, 3),
    "*.in_proj_weight": (0, 3),
    "*.out.weight": 1,
    "*.out_proj.weight": 1,
    "*.up.weight": (0, 2),
    "*.down.weight": 1,
}


class Fused(nn.Module):
    """A layer whose queries, keys and values are one weight: of a linear layer (`kind` "linear"), a weight
    whose first dimension is the input ("turned"), or the weight of torch's own attention ("own").

    A bias of keys does not change any score. So its gradient consists of rounding errors only, which Adam
    turns into steps. Trainings do without this bias, or freeze it.
    """

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.qkv = nn.Linear(DIM, 3 * DIM, bias)
        elif kind == "turned":
            self.turned, self.bias = (
                nn.Parameter(torch.randn(DIM, 3 * DIM) / 3),
                nn.Parameter(torch.randn(3 * DIM) / 9, bias),
            )
        else:
            self.own = nn.MultiheadAttention(DIM, 4, batch_first=True)
        if kind != "own":
            self.out = nn.Linear(DIM, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.up, self.down = nn.Linear(DIM, 8 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        if self.kind == "own":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.own(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]  # type: ignore[no-any-return]
        beside = self.qkv(x) if self.kind == "linear" else x @ self.turned + self.bias
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in beside.split(DIM, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Fusing(Decoder):
    def __init__(self, kinds: list[str], bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused(kind, bias) for kind in kinds)


def fusing(*kinds: str, bias: bool = True) -> Fusing:
    torch.manual_seed(0)
    return Fusing(list(kinds or ("linear", "turned")), bias).double()


def params(module: nn.Module) -> dict[str, Any]:
    """Return the placements of the parameters that the module has."""
    names = [name for name, _ in module.named_parameters()]
    return {
        pattern: said
        for pattern, said in PARAMS.items()
        if any(fnmatch.fnmatchcase(name, pattern) for name in names)
    }
