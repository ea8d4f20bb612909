"""Records of `logging` that format numbers whose values are not known while a step is captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_piper.capture import capture
from lightning_piper.capture.proxies.deferred_numbers import LATER

LOGGER = logging.getLogger("lightning_piper.tests.logged_texts")
TEXTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "item": (lambda loss: LOGGER.warning("loss %.3f", loss.item()), f"loss {LATER}"),
    "tensor": (lambda loss: LOGGER.warning("loss %5.2f", loss), f"loss {LATER}"),
    "percent": (lambda loss: LOGGER.warning("%d%% %.1f%%", 5, 100 * loss.item()), f"5% {LATER}%"),
    "names": (
        lambda loss: LOGGER.warning("%(step)03d %(loss).2f", {"step": 7, "loss": loss.item()}),
        f"7 {LATER}",
    ),
    "known": (lambda loss: LOGGER.warning("%03d %.2f%%", 7, 1.5), "007 1.50%"),  # the negative control
}


class Logs(L.LightningModule):
    def __init__(self, log: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 1), log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).mean()
        self.write(loss)
        return loss


@pytest.mark.parametrize("name", TEXTS)
def test_a_record_of_an_unknown_number_shows_the_phrase(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's `logging` catches errors of a text and prints them, so the run would go on with an error on the
    screen at each trace."""
    log, text = TEXTS[name]
    own = logging.LogRecord.getMessage
    with caplog.at_level(logging.WARNING, logger=LOGGER.name):
        assert capture(Logs(log), torch.ones(4, 4)).at(4).regions
    assert text in caplog.text and "Logging error" not in capsys.readouterr().err
    assert logging.LogRecord.getMessage is own
