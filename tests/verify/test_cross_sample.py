"""Steps that combine the samples of a batch: the report names the operation that does."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_piper import Place, Replicate, Split, verify
from lightning_piper.annotate import annotate
from lightning_piper.ir.values import Slice
from lightning_piper.verify.cross_sample import find_dependences
from tests import moe
from tests.dags import place, split
from tests.models import DETERMINISTIC, captured, regression

# Other models compare samples (similar) or change the order of their rows (positions_first), but without an
# effect on the loss.
COUPLED = {"conv"}


class Model(L.LightningModule):
    """Two stages. `between` is applied to the hidden values, `end` computes the loss."""

    def __init__(self, between: Any = torch.tanh, end: Any = F.mse_loss) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.a, self.b, self.between, self.end = nn.Linear(4, 6), nn.Linear(6, 2), between, end

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP"):
            h = self.between(self.a(x))
        with annotate("PP"):
            return self.end(self.b(h), y)


def contrastive(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out @ y.t(), torch.arange(out.shape[0]))


def masked(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    keep = (out > 0).float()  # this depends on parameters, not only on the batch
    return ((out - y).square() * keep).sum() / keep.sum()


@pytest.mark.parametrize(
    ("model", "region", "operation"),
    [
        (Model(between=lambda h: h - h.mean(0)), "PP=0", "aten.sub.Tensor"),
        (Model(between=nn.BatchNorm1d(6)), "PP=0", "aten._native_batch_norm_legit_functional"),
        (Model(end=contrastive), "PP=1", "aten.mm"),
        (Model(end=masked), "PP=1", "aten.div.Tensor"),
    ],
)
def test_the_operation_that_couples_the_samples_is_named(model: Model, region: str, operation: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batch = regression(4)
    report = verify(model, batch, [*place(0, 1), split(2)])
    assert report.verdict == "verified except", "it is not wrong: one device that accumulates gets the same"
    assert report.rows[3].before.verdict == report.whole.verdict == "differs"
    found = report.couplings[0]
    assert (found.region, found.operation) == (region, operation) and found.distance > 1e-3
    assert report.causes == (f"{operation} in region {region}",)
    assert report.conclusion.startswith(f"verified except {operation} in region {region}: differs by ")
    assert f"note: {found}" in str(report) and "mixes the samples of a batch" in str(found)


def test_a_mean_over_samples_couples_nothing() -> None:
    report = verify(Model(), regression(4), [*place(0, 1), split(2)])
    assert report.couplings == () and "note" not in str(report) and report.verdict == "verified"


def test_without_microbatches_nothing_is_excepted() -> None:
    """The control: the same operation, on the whole batch."""
    report = verify(Model(end=contrastive), regression(4), place(0, 1))
    assert report.verdict == str(report).splitlines()[-1] == "verified"


class Logging(Model):
    """A model that logs a standard deviation, which is no mean over microbatches, or a maximum of products
    over the samples of a microbatch.
    """

    def __init__(self, count: bool) -> None:
        super().__init__()
        self.count = count

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with annotate("PP", 1):
            if self.count:
                self.log("largest", batch[0].prod(0).max(), reduce_fx="max")
            else:
                self.log("deviation", batch[0].std())
        return loss


class LoggingExtremes(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("largest", batch[0].amax(), reduce_fx="max")
        self.log("least", batch[0].amin(), reduce_fx="min")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("average", ["batch", "replicas"])
def test_extremes_have_no_weights(average: str) -> None:
    program = [Place([0, 1]), Split(2), Replicate(average=average)]
    assert verify(LoggingExtremes(), regression(4), program).ok


@pytest.mark.parametrize(
    ("count", "cause", "name"),
    [
        (False, "aten.std.correction in region PP=1", "deviation"),
        (True, "an operation that was not found", "largest"),
    ],
)
def test_a_logged_value_may_be_what_differs(count: bool, cause: str, name: str) -> None:
    report = verify(Logging(count), regression(4), [*place(0, 1), split(2)])
    assert report.verdict == "verified except" and report.whole.first == name
    assert report.conclusion.startswith(f"verified except {cause}: differs by ")


class Balanced(moe.Model):
    """A model with a loss that balances the router's scores, over each sample or over the batch."""

    def __init__(self, batchwise: bool) -> None:
        super().__init__()
        self.batchwise = batchwise

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP", 0):
            scores = self.blocks[0].router(batch[0]).softmax(-1)  # samples, length, experts
            means = scores.mean((0, 1)) if self.batchwise else scores.mean(1)
            balance = means.square().sum(-1).mean()
        return super().training_step(batch, batch_idx) + balance


@pytest.mark.parametrize("batchwise", [False, True])
def test_tokens_sorted_by_expert_are_not_what_couples(batchwise: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        report = verify(Balanced(batchwise), moe.batch(4), [*place(0, 1), split(2)])
    assert report.verdict == ("verified except" if batchwise else "verified")
    assert [(c.region, c.operation) for c in report.couplings] == (
        [("PP=0", "aten.pow.Tensor_Scalar")] if batchwise else []
    )


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_which_models_couple_their_samples(name: str) -> None:
    c = captured(name)
    half = c.case.size // 2
    found = find_dependences(c.step, c.tensors, c.leaves, [Slice(0, half), Slice(half, c.case.size)])
    assert bool(found) == (name in COUPLED), found
