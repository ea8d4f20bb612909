"""The part of a step that is computed from gathered samples: its operations, and the values that it reads
from the other part.
"""

from __future__ import annotations

import pytest
import torch

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError, DirectiveError
from lightning_piper.ir.regions import StepCode
from lightning_piper.sample_gathering import exchanging_rows, gather_samples
from tests.capture.test_totals import BATCH, Net

START = "h = self.one(x)\nz = piper.gather_samples(h)\n"


def code(lines: str) -> StepCode:
    return capture(Net(lines), BATCH).at(8)


def exchanged(found: StepCode, way: str = "gather") -> list[str]:
    outputs = [(key, i, out) for key, each in found.interfaces.items() for i, out in enumerate(each.outputs)]
    return sorted(str(found.code[key].outputs[i][0]) for key, i, out in outputs if out.exchange == way)


@pytest.mark.parametrize("lines, gathered, scattered", [
    ("loss = (z @ z.T).mean()", ["float32[8,3]"], 1),
    ("loss = (z @ h.T).mean()", ["float32[8,3]"] * 2, 1),  # transposed in this part
    ("loss = ((z @ z.T) * (y == y.T)).mean()", ["float32[8,1]", "float32[8,3]"], 1),  # labels
    # A mean that no other operation reads.
    ("loss = (z - h.mean(0)).square().mean()", ["float32[8,3]"] * 2, 1),
    ("loss = (z @ z.T).mean() + F.mse_loss(self.two(h), y)", ["float32[8,3]"], 1),  # a term in addition to it
    ("loss = ((z @ z.T).mean() + 1) * F.mse_loss(self.two(h), "
     "y)", ["float32[8,1]"] * 2 + ["float32[8,3]"], 2),
    ("loss = (z * torch.rand(8, 3)).sum() * self.seen.exp()", ["float32[8,3]"], 1),
    # no sum over the batch, because the part has the whole batch
    ("loss = self.norm(z).square().mean()", ["float32[8,3]"], 1),
])  # fmt: skip
def test_what_is_gathered(lines: str, gathered: list[str], scattered: int) -> None:
    found = code(START + lines)
    assert found.gathers_samples and not found.sums_over_batch
    assert exchanged(found) == gathered and len(exchanged(found, "scatter")) == scattered


def test_a_step_without_it_has_no_such_part() -> None:
    assert not code("loss = F.mse_loss(self.two(self.one(x)), y)").gathers_samples


def test_terms_of_samples_are_weighed_by_themselves() -> None:
    mixed = code(START + "loss = (z @ z.T).mean() - 2 * F.mse_loss(self.two(h), y, reduction='sum')")
    assert [term.label for term in mixed.terms] == ["the whole batch", "sum"] and not mixed.assumed
    assert [term.label for term in code(START + "loss = (z @ z.T).sum()").terms] == ["the whole batch"]


def test_a_buffer_of_gathered_samples_is_the_same_everywhere() -> None:
    assert not code(START + "self.seen.copy_(z.mean())\nloss = z.sum()").local
    assert code(START + "self.seen.copy_(h.mean())\nloss = z.sum()").local == {"seen"}


GATHERED = "self.seen.copy_(piper.gather_samples(x).max())\nwith piper.annotate('PP', 0): loss = self.one(x)"


@pytest.mark.parametrize("lines, regions", [
    (f"{GATHERED}.mean()", [(False, {}), (True, {}), (False, {"PP": 0})]),
    (f"{GATHERED}.mean() * self.seen", [(False, {}), (True, {}), (False, {"PP": 0}), (True, {"PP": 0})]),
    (GATHERED.replace("gather_samples", "mean_of") + ".mean()", [(False, {"PP": 0})]),
])  # fmt: skip
def test_work_on_the_gathered_batch_is_a_region_of_its_own(
    lines: str, regions: list[tuple[bool, dict[str, int]]]
) -> None:
    lines = lines.replace("piper.mean_of(x)", "x")
    assert [(region.joined, region.tags) for region in code(lines).regions] == regions


@pytest.mark.parametrize("lines, words", [
    ("m = h.mean(0)\nloss = (z - m).square().mean() + (h - "
     "m).square().mean()", "which code that runs on each microbatch also reads"),
    ("loss = (piper.gather_samples(h.T) @ h).mean()", "gather_samples gets a value of shape \\[3, 8\\]"),
    ("loss = piper.gather_samples(torch.cat([h, h])).mean()", "compute this value from the gathered rows"),
    ("z = torch.cat([z, z])\nloss = z.mean() + piper.gather_samples(torch.ones(8, 3)).mean()",
     "which does not depend on the samples. Use it without gather_samples"),
    ("piper.gather_samples(3)", "Give a tensor with one row for each sample"),
    ("with piper.annotate('EP'): h = piper.combine(piper.dispatch(z, torch.tensor([4, 4]))[0])\nloss = "
     "h.sum()",
     "between dispatch and combine"),
])  # fmt: skip
def test_what_cannot_be(lines: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        code(START + lines)


def test_it_is_not_split() -> None:
    net = Net(
        "h = self.one(x)\nwith piper.annotate('PP', 0): loss = "
        "self.two(piper.gather_samples(h)).square().mean()"
    )
    with pytest.raises(DirectiveError, match=r"directive 0 \(split\).*computed from gathered samples"):
        piper.compile(net, BATCH, [piper.Split(filter={"PP": 0}, dim_name="MB", num_microbatches=2)])


def test_outside_of_a_captured_step() -> None:
    """One device has all rows; where two replicas with the same rows gather, in effect, each gets both
    gradients.
    """
    x = torch.randn(2, 3, requires_grad=True)
    assert torch.equal(gather_samples(x), x)
    with exchanging_rows(lambda rows: torch.cat([rows, rows]), lambda gradient, count: 2 * gradient[:count]):
        made = gather_samples(x)
    (made * torch.arange(4.0)[:, None]).sum().backward()
    assert made.shape == (4, 3) and x.grad is not None and x.grad[:, 0].tolist() == [0, 2]
