"""If a step logs a value and reads it from the Trainer at once, it gets the value of this step, or the step
is not captured.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.errors import CaptureError
from tests.strategy.fitting import Batches, local, trainer

READS = {
    "get": lambda t: float(t.callback_metrics.get("loss", 0.0)),
    "item": lambda t: t.logged_metrics["loss"].detach(),
    "all": lambda t: float(dict(t.progress_bar_metrics)["loss"]),
    "in": lambda t: 2.0 if "loss" in t.callback_metrics else 1.0,
    "is empty": lambda t: 2.0 if t.callback_metrics else 1.0,
    "equals": lambda t: 2.0 if t.callback_metrics == {} else 1.0,
    "of the step": lambda t: float(t.logged_metrics["both_step"]),
}
OTHER = {
    "forked at the end of an epoch": lambda t: float(t.callback_metrics.get("both_epoch", 0.5)),
    "not in the progress bar": lambda t: float(t.progress_bar_metrics.get("both_step", 0.5)),
    "without a logger": lambda t: float(t.logged_metrics.get("hidden", 0.5)),
    "another": lambda t: float(t.callback_metrics.get("other", 0.5)),
    "at the end of an epoch": lambda t: float(t.callback_metrics.get("epoch", 0.5)),
}


class Reading(L.LightningModule):
    def __init__(self, read: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.first, self.last = read, *(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = torch.tanh(self.first(batch))
        with piper.annotate("PP", 1):
            loss = self.last(hidden).square().mean()
            self.log("loss", loss, prog_bar=True)
            self.log("both", loss, on_step=True, on_epoch=True)
            self.log("hidden", loss, logger=False)
            self.log("epoch", loss, on_step=False, on_epoch=True)
            return loss * (1 + self.read(self.trainer))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(read: Any, strategy: Any) -> dict[str, Tensor]:
    module = Reading(read)
    fit, _ = trainer(strategy, max_steps=4)
    fit.fit(
        module,
        Batches(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4)),
    )
    return dict(module.state_dict())


@pytest.mark.parametrize("name", READS)
def test_a_value_of_this_step(name: str) -> None:
    alone = trained(READS[name], "auto")
    with pytest.warns(
        UserWarning, match=r"runs uncaptured on this device\. Reason: .*after self.log\('(loss|both)'\)"
    ):
        found = trained(READS[name], local([piper.Place(filter={}, devices=[0])]))
    assert all(torch.equal(x, found[n]) for n, x in alone.items())
    with pytest.raises(CaptureError, match=r"test_logged_now.py:\d+ .*after self.log\('(loss|both)'\)"):
        trained(READS[name], local())


@pytest.mark.parametrize("name", OTHER)
def test_another_value_is_read(name: str) -> None:
    read = OTHER[name]
    assert all(torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(
        trained(read, "auto").values(), trained(read, local()).values(), strict=True))  # fmt: skip


class Weighted(Reading):
    """The weight of a step in the mean of an epoch is made of the batch index and of a counter."""

    def __init__(self) -> None:
        super().__init__(None)
        self.count = 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.last(torch.tanh(self.first(batch))).square().mean()
        for name, weight in (
            ("index", 1 + batch_idx),
            ("count", self.count),
            ("rows", len(batch) * (1 + batch_idx)),
        ):
            self.log(name, loss, on_step=False, on_epoch=True, batch_size=weight)
        return loss

    def on_train_batch_end(self, *given: Any) -> None:
        self.count += 2


def test_the_weight_of_a_logged_value_may_change_in_each_step():
    def logged(strategy: Any, weights: bool = True) -> dict[str, float]:
        module = Weighted()
        if not weights:
            module.log = lambda name, value, batch_size, **kwargs: L.LightningModule.log(
                module, name, value, **kwargs
            )  # type: ignore[method-assign,misc]
        fit, _ = trainer(strategy, max_steps=4)
        fit.fit(
            module,
            Batches(
                torch.randn(8, 4, dtype=torch.float64, generator=draw) for draw in [torch.Generator()] * 4
            ),
        )
        return {name: float(fit.callback_metrics[name]) for name in ("index", "count", "rows")}

    replicas = [piper.Place(devices=[0, 1]), piper.Replicate(devices=[0, 1])]
    plain = logged("auto")
    assert (
        logged(local(replicas))
        == pytest.approx(plain, rel=1e-12)
        == logged(local([piper.Place(devices=[0])]))
    )
    assert logged("auto", weights=False) != pytest.approx(plain, rel=1e-3)
