"""Whether tensors share elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_piper.common.tensor_overlap import share_elements

WHOLE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize("a, b, shared", [
    (WHOLE[:2], WHOLE[2:], False),
    (WHOLE[:3], WHOLE[2:], True),
    (WHOLE[:, :3], WHOLE[:, 3:], False),
    (WHOLE[:, :4], WHOLE[:, 3:], True),
    (WHOLE[::2, ::2], WHOLE[1::2], False),
    (WHOLE.T[1:4], WHOLE[:, 4], False),
    (WHOLE.T[1:4], WHOLE[2, :2], True),
    (WHOLE[0], WHOLE.view(torch.int32)[0, 5:], True),
    (WHOLE[0], WHOLE.view(torch.int16)[1], False),
    (WHOLE[:0], WHOLE, False),
    (torch.empty(0), torch.empty(0), False),
    (WHOLE, WHOLE.clone(), False),
    (WHOLE[0, 1].expand(3), WHOLE[0], True),
    (WHOLE[0, 1].expand(3), WHOLE[1], False),
])  # fmt: skip
def test_elements_that_two_tensors_share(a: Tensor, b: Tensor, shared: bool) -> None:
    assert share_elements(a, b) is share_elements(b, a) is shared
