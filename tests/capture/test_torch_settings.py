"""A step is not captured if it changes settings of torch, unless it restores them. The settings are as before then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError

Change = Callable[[], None]


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.change()
        return loss


def disables_gradients() -> None:
    torch.set_grad_enabled(False)


def sets_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)


LEFT: dict[str, Change] = {
    "set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "set_grad_enabled": disables_gradients,
    "set_autocast_enabled": sets_autocast,
}
CALLED: dict[str, Change] = {
    "set_default_device": lambda: torch.set_default_device("cpu"),
    "set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
}


def settings() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


@pytest.mark.parametrize("name", [*LEFT, *CALLED])
def test_a_step_that_changes_a_setting_is_refused_and_the_setting_is_as_before(name: str) -> None:
    before = settings()
    with pytest.raises(
        CaptureError, match=rf"training_step (calls|changes torch's settings by) torch\.{name}"
    ):
        capture(Net(LEFT.get(name) or CALLED[name]), torch.ones(2, 4)).at(2)
    assert settings() == before


def restores() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)
    with torch.no_grad(), torch.autocast("cpu"):
        pass


def test_a_step_that_restores_a_setting_is_captured() -> None:
    assert capture(Net(restores), torch.ones(2, 4)).at(2).regions
