"""Values that are summed over the whole batch: where Piper cuts a step, which buffers depend on a part of the
batch, and the statistics of batch norms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.batch_norms import plain_batch_norms, whole_batch_norms
from lightning_piper.capture import capture
from lightning_piper.directives import accumulating
from lightning_piper.errors import CaptureError
from lightning_piper.ir.values import Slice
from lightning_piper.totals import summing, total
from lightning_piper.verify import interpret


def norms(dims: int, **options: Any) -> list[nn.Module]:
    plain = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](3, **options)
    synced = nn.SyncBatchNorm(3, **options)
    for norm in (plain, synced):
        for name, x in [*norm.named_parameters(), *norm.named_buffers()]:
            if name != "num_batches_tracked":
                x.data.copy_(torch.arange(3) + 0.5)
    return [plain, synced]


@pytest.mark.parametrize(
    "dims, options",
    [
        (1, {}),
        (2, {}),
        (3, {"eps": 0.1, "momentum": 0.3}),
        (2, {"affine": False}),
        (1, {"track_running_stats": False}),
        (2, {"momentum": None}),
    ],
)
@pytest.mark.parametrize(
    "dtype, near", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_a_norm_over_the_whole_batch_is_a_batch_norm(dims, options, dtype, near):
    torch.manual_seed(0)
    data = torch.randn(6, 3, *[2] * dims, dtype=dtype) * 2 + 3
    weights = torch.randn_like(data)
    found = []
    for norm in norms(dims, **options):
        norm.to(dtype)
        x = data.clone().requires_grad_()
        with whole_batch_norms(every=False):
            out = norm(x)
        (out * weights).sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=near, atol=near)


def test_only_those_asked_for():
    """And in evaluation none."""
    x = torch.randn(4, 3)
    plain, synced = norms(1)
    calls: list[Tensor] = []
    for every in (False, True):
        for norm, training in ((plain, True), (synced, True), (plain, False), (synced, False)):
            with whole_batch_norms(every), summing(lambda s: calls.append(s) or s):
                norm.train(training)(x)
    assert len(calls) == 3
    synced.train()
    with plain_batch_norms(), summing(lambda s: calls.append(s) or s):
        synced(x)
    assert len(calls) == 3


def test_a_mean_far_from_zero_keeps_its_variance_in_float32():
    torch.manual_seed(0)
    x = torch.randn(4096, 3, dtype=torch.float64) + 1e4
    norm = nn.SyncBatchNorm(3, momentum=1.0, affine=False)
    with whole_batch_norms(every=False):
        norm(x.float())
    assert torch.allclose(norm.running_var.double(), x.float().double().var(0), rtol=1e-4)
    naive = x.float().square().mean(0) - x.float().mean(0).square()  # the control
    assert not torch.allclose(naive.double(), x.var(0), rtol=1e-1)


def test_a_step_that_runs_as_it_is_sums_at_once():
    """Two replicas with the same samples, in effect."""
    x = torch.ones(2, requires_grad=True)
    with summing(lambda s: 2 * s):
        y = total(x * 3)
    y.sum().backward()
    assert y.tolist() == [6, 6] and x.grad.tolist() == [6, 6]


class Net(nn.Module):
    """A module whose step is `lines`."""

    def __init__(self, lines: str) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 3), nn.Linear(3, 1), nn.SyncBatchNorm(3)
        self.register_buffer("seen", torch.zeros(()))
        self._lines = compile(lines, "step", "exec")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = {"self": self, "x": x, "y": y, "F": F, "torch": torch, "total": total, "piper": piper}
        exec(self._lines, found)
        return found["loss"]


DRAWN = torch.Generator().manual_seed(0)  # the same batch, whatever was imported before
BATCH = (torch.randn(8, 4, generator=DRAWN), torch.randn(8, 1, generator=DRAWN))
LOSS = "\nloss = F.mse_loss(self.two(h), y)"


@pytest.mark.parametrize("lines, regions", [
    ("h = self.one(x)", 1),
    ("h = self.norm(self.one(x))", 2),
    ("h = self.norm(torch.tanh(self.norm(self.one(x))))", 3),
    ("h = self.norm(self.one(x)) + self.norm(self.one(-x))", 2),  # two norms that do not depend on each other
    ("h = self.one(x); h = h - total(h.mean(0)) * total(h.amax(0))", 2),
    ("h = self.one(x / total(x.sum(0)))", 2),
    ("h = self.one(x) + total(x.mean()).detach()", 2),
])  # fmt: skip
def test_a_step_is_cut_where_something_needs_a_sum(lines, regions):
    code = capture(Net(lines + LOSS), BATCH).at(8)
    assert len(code.regions) == regions
    assert code.sums_over_batch == (regions > 1)


@pytest.mark.parametrize("line, local", [
    ("self.seen += 1", set()),
    ("self.seen += len(x)", {"seen"}),
    ("self.seen += x.mean()", {"seen"}),
    ("self.seen += torch.rand(())", {"seen"}),
    ("self.seen += total(x.sum()) / 2", set()),
    ("h = F.batch_norm(h, self.norm.running_mean, self.norm.running_var, training=True)",
     {"norm.running_mean", "norm.running_var"}),
    ("h = self.norm(h)", set()),
])  # fmt: skip
def test_buffers_that_follow_from_a_part_of_the_batch(line, local):
    assert capture(Net(f"h = self.one(x)\n{line}{LOSS}"), BATCH).at(8).local == local


def test_a_buffer_may_keep_a_sum_of_what_is_trained():
    batch = [x.double() for x in BATCH]
    step = capture(Net("h = self.one(x)\nself.seen.copy_(total(h.sum()))" + LOSS).double(), batch)
    tensors = {
        step.canonical[n]: x.detach()
        for n, x in [*step.module.named_parameters(), *step.module.named_buffers()]
    }
    (seen,) = interpret(accumulating(step, (Slice(0, 4), Slice(4, 8))), tensors, batch).buffers.values()
    assert torch.allclose(seen, step.module.one(batch[0]).sum()) and "seen" not in step.at(8).local


@pytest.mark.parametrize("lines, words", [
    ("with piper.annotate('EP'): h = piper.combine(self.norm(piper.dispatch(self.one(x), torch.tensor([4, "
     "4]))[0]))",
     "between dispatch and combine"),
])  # fmt: skip
def test_sums_that_cannot_be(lines, words):
    with pytest.raises(CaptureError, match=words):
        capture(Net(lines + LOSS), BATCH).at(8)
