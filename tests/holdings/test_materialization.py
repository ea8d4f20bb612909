"""Tensors without data get values, and keep the attributes that the module's class has set on them."""

from __future__ import annotations

import torch
from torch import nn

from lightning_piper.holdings.materialization import Known, empty_like, materialize


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(2), persistent=False)

    def reset_parameters(self) -> None:
        self.count.zero_()


def test_buffers_keep_their_attributes() -> None:
    with torch.device("meta"):
        module = Counter()
    marks = dict(module.count.__dict__)
    assert marks
    materialize(module, 0, Known())
    assert not module.count.is_meta and isinstance(module.count, nn.Buffer)
    assert module.count.__dict__ == marks == empty_like(module.count, "meta").__dict__
    assert "count" not in module.state_dict()
