"""Mistakes of gradient accumulation and of losses. docs/museum.md describes each of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.capture.graph_cache import cached_graphs
from lightning_piper.errors import VerificationError
from property_tests.mutations.harness import TABLE
from tests.museum.cases import Case, assert_caught
from tests.strategy.fitting import distance, local, sharing_captures, trainer, values
from tests.strategy.models import MLP, vectors

CASES = {
    "mean_of_means": Case("tokens weighed as samples", "execution", "metric returned loss differs", "pipeline"),
    "mean_of_metrics": Case("mean of means", "training", "differs"),
    "tokens_of_one_replica": Case("denominator of one replica", "graph", "divides by .*counts of one replica"),
    "smoothing_not_divided": Case("one tangent for all terms", "execution", "gradient shared.weight differs"),
    "negatives_without_gradient": Case(
        "gradients of one replica for the sum", "training", "gradient .* differs"
    ),
    "contrast_times_replicas": Case(
        "loss of the whole batch in each replica", "capture", "computed from gathered samples"
    ),
    "own_negatives_only": Case(
        "samples of one replica", "graph", "but the batch is divided over 2 replicas"
    ),
    "statistics_of_parts": Case(
        "statistics of the batch not summed", "graph", "Sum it over the whole batch first"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])


class Words(L.LightningModule):
    """Predicts words, of which padding (-100) does not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = self.embedding(batch[0]).tanh()
        with piper.annotate("PP", 1):
            return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def padded(batch_size: int) -> DataLoader[Any]:
    """Return texts, of which the first half are long and the second half are short."""
    draw = torch.Generator().manual_seed(1)
    words, targets = (torch.randint(0, 11, (8, 6), generator=draw) for _ in range(2))
    targets[4:, 1:] = -100
    return DataLoader(TensorDataset(words, targets), batch_size=batch_size)


@sharing_captures
def test_accumulated_batches_are_weighed_alike() -> None:
    """`accumulate="tokens"` gives the gradient of one large batch. The mean of batches, which Lightning takes, is
    another gradient.
    """
    found = {}
    for accumulate in ("whole", "batches", "tokens"):
        whole = accumulate == "whole"
        strategy = "auto" if whole else local(accumulate=accumulate)
        run, _ = trainer(strategy, max_steps=1, accumulate_grad_batches=1 if whole else 2)
        module = Words()
        run.fit(module, padded(8 if whole else 4))
        found[accumulate] = values(module)
    assert distance(found["whole"], found["tokens"]) < 1e-5
    assert distance(found["whole"], found["batches"]) > 1e-3


def test_a_microbatch_without_tokens() -> None:
    """A mean over no tokens is NaN. Piper weights sums, so the microbatch adds nothing."""
    words, targets = padded(8).dataset.tensors  # type: ignore[attr-defined]
    targets[2:4] = -100
    program = [piper.Place([0]), piper.Split(4)]
    assert piper.verify(Words(), (words, targets), program).verdict == "verified"
    cached_graphs.forget()
    with (
        TABLE["tokens weighed as samples"].patch() as seeded,
        pytest.raises(VerificationError, match="is NaN"),
    ):
        piper.verify(Words(), (words, targets), program)
    cached_graphs.forget()
    assert seeded.hits


class Rescales(L.Callback):
    """Divides all gradients so far by the number of microbatches, after each batch of an accumulation."""

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for p in module.parameters():
            if p.grad is not None:
                p.grad.div_(4)


@sharing_captures
def test_accumulated_gradients_are_scaled_again() -> None:
    """The weight of a microbatch is part of the graph, so nothing scales gradients afterwards."""
    found = []
    for strategy, callbacks in (("auto", []), (local(), []), (local(), [Rescales()])):
        run, _ = trainer(strategy, callbacks, max_steps=2, accumulate_grad_batches=2)
        module = Words()
        run.fit(module, padded(4))
        found.append(values(module))
    assert distance(found[0], found[1]) < 1e-5 and distance(found[0], found[2]) > 1e-3


class Evaluated(MLP):
    """Does not learn, so that an accumulation changes nothing. With `shared`, the loss is the one of an
    accumulation also in the validation.
    """

    lr = 0.0

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self.second(self.first(batch[0])), batch[1])
        self.log("validated", loss / self.trainer.accumulate_grad_batches if self.shared else loss)


@sharing_captures
def test_an_accumulation_divides_the_validation() -> None:
    """Piper captures the validation step separately, and logs the loss without the factor of an accumulation."""
    found = []
    for strategy, accumulate, shared in (("auto", 1, False), (local(), 4, False), (local(), 4, True)):
        torch.manual_seed(0)
        run, _ = trainer(strategy, max_epochs=1, max_steps=-1, accumulate_grad_batches=accumulate)
        run.fit(Evaluated(shared), vectors(), vectors(seed=1))
        found.append({name: run.callback_metrics[name] for name in ("train_loss_epoch", "validated")})
    torch.testing.assert_close(found[0], found[1])
    assert found[2]["validated"] < 0.3 * found[0]["validated"]


class Normed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.out(self.norm(self.first(batch[0])).relu()), batch[1])


def test_a_batch_norm_of_microbatches() -> None:
    batch = torch.randn(8, 8), torch.randn(8, 4)
    assert piper.verify(Normed(), batch, [piper.Place([0])]).verdict == "verified"
    report = piper.verify(Normed(), batch, [piper.Place([0]), piper.Split(4)])
    assert report.verdict == "verified except"
    assert "batch_norm" in str(report) and "mixes the samples of a batch" in str(report)
