"""The default dtype that a precision plugin sets holds for the captured step, even if the step runs under a
different default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_piper.capture import capture
from lightning_piper.capture.eager.eager_reference import run_eagerly
from lightning_piper.ir.regions import LOSS
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.verify.interpreter import interpret

WHOLE = [Slice(0, 4)]


class Masked(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, mask = batch
        share = mask / mask.sum()  # of integers
        return (self.layer(x)[:, 0] * mask).sum() / (mask.sum() + 1e-6) + (share.sqrt() * x[:, 0]).sum()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Set the default dtype as Lightning's `64-true` does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def losses() -> tuple[Tensor, Tensor]:
    """Return the losses of the captured step, and of the step itself."""
    generator = torch.Generator().manual_seed(0)
    module = Masked().double()
    batch = [torch.randn(4, 3, dtype=torch.float64, generator=generator), torch.tensor([1, 0, 1, 1])]
    step = capture(module, batch, torch.device("cpu"), in_float64)
    tensors = {name: x.detach() for name, x in module.named_parameters()}
    return interpret(build_dag(step), tensors, batch).metrics[LOSS], run_eagerly(
        step, tensors, batch, WHOLE
    ).metrics[LOSS]


def test_whole_numbers_become_what_the_precision_says() -> None:
    found, wanted = losses()
    assert torch.equal(found, wanted)


def test_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with float32, the default where the graph runs, it is another number."""
    monkeypatch.setattr("lightning_piper.capture.tracing.step_trace.settle_dtypes", lambda graph: None)
    found, wanted = losses()
    assert not torch.allclose(found, wanted, rtol=1e-10, atol=0)
