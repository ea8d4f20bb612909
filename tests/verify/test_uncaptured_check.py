"""Reports on steps that are not captured: what they say, and that they show a wrong sum of gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture.eager import eager_step
from lightning_piper.capture.eager.eager_step import EagerStep

ALONE: list[piper.Directive] = [piper.Place(filter={}, devices=[0])]
TWO: list[piper.Directive] = [
    piper.Place(filter={}, devices=[0, 1]),
    piper.Replicate(filter={}, devices=[0, 1]),
]
SHARDED = [TWO[0], piper.Replicate(filter={}, devices=[0, 1], shard_params=True)]


class Mean(L.LightningModule):
    """A module whose loss is a mean over samples, and whose step reads the loss's value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.unused = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 4)),
            nn.Linear(2, 2),
        )
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = self.loss(F.mse_loss(self.net(batch[0]), batch[1], reduction="none").mean(1), batch[0])
        return loss if loss.item() < 1e9 else 0 * loss

    def loss(self, losses: Tensor, x: Tensor) -> Tensor:
        return losses.mean()


class Some(Mean):
    """A module whose loss divides by the number of samples that it chooses."""

    def loss(self, losses: Tensor, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return losses[chosen].sum() / chosen.sum()


def report(kind: type[Mean], program: list[piper.Directive], samples: int = 8) -> piper.Report:
    module, draw = kind(), torch.Generator().manual_seed(1)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    found = piper.verify(
        module, (torch.randn(samples, 4, generator=draw), torch.randn(samples, 4, generator=draw)), program
    )
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert module.calls == 0 and all(p.grad is None for p in module.parameters())
    return found


@pytest.mark.parametrize("program", [ALONE, TWO, SHARDED])
def test_a_mean_is_that_of_one_device(program):
    found = report(Mean, program)
    assert found.verdict == "executed" and found.ok and found.whole.verdict != "differs"
    assert [row.index for row in found.rows] == [None, *range(len(program)), None]
    assert "test_uncaptured_check.py" in found.conclusion and "loss.item() < 1e9" in found.conclusion
    assert found.conclusion.startswith(
        "executed, not proved: the gradients, averaged over the parts of the batch, are"
    )


def test_what_replicas_weigh_otherwise_is_told():
    assert report(Some, ALONE).whole.verdict == "bitwise equal"
    found = report(Some, TWO)
    assert found.verdict == "executed" and found.whole.verdict == "differs" and found.whole.distance > 0.01
    assert "differs by" in found.conclusion


def test_a_sum_in_the_place_of_a_mean_is_found(monkeypatch):
    monkeypatch.setattr(eager_step, "_weighed", lambda grad, weight: grad)
    found = report(Mean, TWO)
    assert found.verdict == "NOT EQUIVALENT" and not found.ok
    with pytest.raises(piper.VerificationError):
        found.require()


def test_a_parameter_that_nobody_uses_is_found_to_have_a_gradient(monkeypatch):
    backward = EagerStep._backward

    def zeros(self: EagerStep, given: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(x + 0.0 for x in backward(self, given))

    assert report(Mean, TWO).verdict == "executed"
    monkeypatch.setattr(EagerStep, "_backward", zeros)
    assert report(Mean, TWO).verdict == "NOT EQUIVALENT"


@pytest.mark.parametrize(("program", "samples"), [
    ([piper.Place(filter={"PP": 0}, devices=[0])], 8),
    ([*TWO, piper.Split(filter={}, dim_name="MB", num_microbatches=2)], 8),
    (TWO, 7),
])  # fmt: skip
def test_what_cannot_run_as_it_is_is_refused_for_what_cannot_be_captured(program, samples):
    with pytest.raises(piper.CaptureError, match=r"loss\.item"):
        report(Mean, program, samples)


class _Root(Mean):
    """A loss that is zero, with gradients that are NaN."""

    def loss(self, losses: Tensor, x: Tensor) -> Tensor:
        return (0 * losses).sqrt().mean()


def test_a_gradient_of_one_device_that_is_nan() -> None:
    with pytest.raises(
        piper.VerificationError, match=r"the gradient of 'net\.0\.weight' of this batch has a NaN"
    ):
        report(_Root, TWO)
