"""A step with very many operations runs uncaptured, if nothing but the checks is lost by that."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.capture.graph_cache import tracing_run
from property_tests.test_steps import QUIET, Batches

SAID = "calls more than 10 operations"


class Loop(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = batch
            for _ in range(10):
                h = torch.tanh(self.cell(h))
        with piper.annotate("PP", 1):
            return self.head(h).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    module, batches = Loop().double(), [torch.rand(4, 4).double() for _ in range(3)]
    L.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **QUIET).fit(
        module, Batches(batches)
    )
    return {name: x.detach() for name, x in module.state_dict().items()}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_run, "OPERATIONS", 10)


def test_it_trains_as_a_plain_trainer() -> None:
    with pytest.warns(UserWarning, match=f"(?s)could not capture training_step.*{SAID}") as caught:
        found = trained(piper.PiperStrategy())
    assert not any("To get an error" in str(each.message) for each in caught)
    alone = trained("auto")
    assert all(torch.equal(found[name], x) for name, x in alone.items())


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: piper.PiperStrategy(capture="always"),
        lambda: piper.PiperStrategy(piper.schedules.one_f_one_b(2, 2), transport="local"),
        lambda: piper.PiperStrategy([piper.Place([0, 1]), piper.Replicate(zero=1)], transport="local"),
    ],
    ids=["always", "stages", "shards"],
)
def test_it_is_captured_where_more_is_asked_for(
    strategy: Any, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []
    refuse = tracing_run._refuse_long
    monkeypatch.setattr(tracing_run, "_refuse_long", lambda: captured.append(refuse()))
    trained(strategy())
    assert captured and not any(SAID in str(each.message) for each in recwarn)
