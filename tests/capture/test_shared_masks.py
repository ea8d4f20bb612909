"""A mask `[L, L]` of the batch belongs to all samples, also if the batch has L samples."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError

Use = Callable[[Tensor, Tensor], Tensor]
SIZE = 4


class Attention(L.LightningModule):
    """A layer, and attention over its output `[n, L, 3]`, with a mask."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(3, 3), use

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, mask = batch
        return self.use(self.layer(x), mask).square().mean()


SHARED: dict[str, Use] = {
    "added": lambda h, mask: (h @ h.transpose(1, 2) + mask).softmax(-1) @ h,
    "filled": lambda h, mask: (h @ h.transpose(1, 2)).masked_fill(mask > 0, -1e9).softmax(-1) @ h,
    "expanded": lambda h, mask: h @ h.transpose(1, 2) * mask.expand(len(h), -1, -1),
    "attention": lambda h, mask: F.scaled_dot_product_attention(h, h, h, attn_mask=mask),
}
# Here each sample has one row of the matrix.
DIVIDED: dict[str, Use] = {
    "a row for each sample": lambda h, mask: h.sum(1) * mask[:, :3],
    "a mask of tokens": lambda h, mask: h * mask[:, :, None],
    "pairs of samples": lambda h, mask: (h[:, 0] @ h[:, 0].T) * mask,
}


def traced(use: Use) -> None:
    step = capture(Attention(use), (torch.randn(SIZE, SIZE, 3), torch.rand(SIZE, SIZE)))
    step.at(SIZE)


@pytest.mark.parametrize("name", SHARED)
def test_a_mask_that_all_samples_share_is_refused(name: str) -> None:
    with pytest.raises(
        CaptureError, match=r"uses the whole 4 x 4 matrix \(tensor 2 of the batch\) for each sample"
    ):
        traced(SHARED[name])


@pytest.mark.parametrize("name", DIVIDED)
def test_a_matrix_with_a_row_for_each_sample_is_divided(name: str) -> None:
    traced(DIVIDED[name])


def test_without_the_check_parts_of_one_sample_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_piper.capture.losses.loss_weights.refuse_shared_masks", lambda *args: None)
    batch = torch.randn(SIZE, SIZE, 3), torch.rand(SIZE, SIZE)
    split = piper.Split(filter={}, dim_name="MB", num_microbatches=SIZE)
    assert piper.verify(Attention(SHARED["added"]), batch, [split]).verdict == "verified except"
