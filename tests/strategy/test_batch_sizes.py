"""Steps whose Python code depends on the number of samples, so that a microbatch or a replica runs other
operations than the whole batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET

Loss = Callable[[Tensor, Tensor], Tensor]


class Net(L.LightningModule):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss = nn.Linear(4, 4).double(), loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def doubled_if_many(h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    return loss * 2 if len(h) > 12 else loss


def doubled_if_a_multiple(h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    return loss * 2 if len(h) % 16 == 0 else loss


DEPEND: dict[str, Loss] = {
    "an operation more": doubled_if_many,
    "an operation more for multiples": doubled_if_a_multiple,
    "a number that may be a multiple of the size": lambda h, y: F.mse_loss(
        h * (2.0 if len(h) > 12 else 1.0), y
    ),
    "another number": lambda h, y: F.mse_loss(h + (0.5 if len(h) > 12 else 0.25), y),
    "a logarithm": lambda h, y: F.mse_loss(h * math.log(len(h)), y),
}
DO_NOT: dict[str, Loss] = {
    "a mean": F.mse_loss,
    "a sum over the size": lambda h, y: (h - y).square().sum() / (len(h) * h.shape[1]),
    "a threshold that no size reaches": lambda h, y: F.mse_loss(h * (2.0 if len(h) > 100 else 1.0), y),
    "views": lambda h, y: F.mse_loss(h.view(len(h) * 2, 2), y.reshape(-1, 2)),
}
TWO = piper.Split(filter={}, dim_name="MB", num_microbatches=2)
PROGRAMS = {
    "microbatches": [piper.Place(filter={}, devices=[0]), TWO],
    "replicas": [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])],
}


def fit(loss: Loss, strategy: Any) -> tuple[dict[str, Tensor], list[str]]:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(32, 4, generator=draw, dtype=torch.float64) for _ in range(2)))
    module = Net(loss)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=16))
    said = [str(each.message) for each in caught]
    return module.state_dict(), [text for text in said if "than the whole batch on one device" in text]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("loss", DEPEND)
def test_what_differs_from_one_device_is_said(loss: str, program: str) -> None:
    wanted, _ = fit(DEPEND[loss], "auto")
    state, said = fit(DEPEND[loss], piper.PiperStrategy(PROGRAMS[program], transport="local"))
    assert not all(torch.allclose(state[name], x) for name, x in wanted.items())
    assert len(said) == 1 and "test_batch_sizes.py" in said[0], said


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("loss", DO_NOT)
def test_others_are_one_device_s(loss: str, program: str) -> None:
    wanted, _ = fit(DO_NOT[loss], "auto")
    state, said = fit(DO_NOT[loss], piper.PiperStrategy(PROGRAMS[program], transport="local"))
    assert all(torch.allclose(state[name], x, rtol=0, atol=1e-14) for name, x in wanted.items())
    assert not said


@pytest.mark.parametrize("samples", [33, 34])
def test_a_batch_without_samples_for_a_device_is_refused(samples: int) -> None:
    """Each microbatch runs on its own device. With one sample, a device has no work."""
    apart = [TWO, *(piper.Place(filter={"MB": i}, devices=[i]) for i in range(2))]
    module = Net(F.mse_loss)
    data = TensorDataset(*(torch.randn(samples, 4, dtype=torch.float64) for _ in range(2)))
    run = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=piper.PiperStrategy(apart, transport="local"),
        max_epochs=1,
        **QUIET,
    )
    if samples == 34:
        run.fit(module, DataLoader(data, batch_size=16))
        return
    with pytest.raises(
        piper.PiperError, match=r"^batch of 1 sample: device 1 would have no part in the step.*PIPER-D025"
    ):
        run.fit(module, DataLoader(data, batch_size=16))
