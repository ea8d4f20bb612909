"""Mistakes of tensor parallelism that depend on the model. docs/museum.md describes each of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.errors import VerificationError
from lightning_piper.placements import proof
from tests.directives.test_tensor_faults import local_sum


class SharedKey(L.LightningModule):
    """An attention whose heads have keys of their own, and one part of the keys that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.shared = nn.Linear(8, 2, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        query, key = (f(batch).unflatten(-1, (4, 2)).transpose(1, 2) for f in (self.query, self.key))
        key = key + self.shared(batch)[:, None].expand(-1, 4, -1, -1)
        attended = F.scaled_dot_product_attention(query, key, key)
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


def test_a_key_that_all_heads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the gradient of the shared part from its own heads. Without their sum, ranks drift apart."""
    monkeypatch.setattr(proof, "_proved", set())
    program = [
        piper.Place([0, 1], axes=["tp"]),
        piper.ShardWeights(params={"query.weight": 0, "key.weight": 0, "out.weight": 1}),
    ]
    batch = torch.randn(4, 6, 8, dtype=torch.float64)
    assert piper.verify(SharedKey().double(), batch, program).verdict == "verified"
    local_sum(monkeypatch)
    proof._proved.clear()
    with pytest.raises(VerificationError, match=r"the rule of aten\.sum\.dim_IntList for .* is wrong"):
        piper.verify(SharedKey().double(), batch, program)
