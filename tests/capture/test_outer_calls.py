"""A result counts as handed on only if no code outside of annotated calls has read it, also if a later call fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.annotate import numbering
from lightning_piper.capture.eager.outer_calls import ModuleCallLog


class Stage(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            return super().forward(x)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim:
            raise ZeroDivisionError
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.failing = Stage(2, 2), Stage(2, 2), Failing()


def handed_on(read: bool, fails: bool) -> list[bool]:
    """Return `handed_on` of the two stages. The result of the first stage goes to the second one.

    Args:
        read: whether the step also reads the first result itself.
        fails: whether a call between the stages raises an error, which the step catches.
    """
    net, log = Net(), ModuleCallLog()
    with numbering(), log.following(net):
        hidden = net.first(torch.ones(2, 2))
        if read:
            hidden.sum()
        if fails:
            with pytest.raises(ZeroDivisionError):
                net.failing(torch.ones(2))
        net.second(hidden)
    return [call.handed_on for call in log.captured]


def test_a_result_that_only_a_stage_reads_is_handed_on() -> None:
    assert handed_on(read=False, fails=False) == [True, False]
    assert handed_on(read=False, fails=True) == [True, False]


@pytest.mark.parametrize("fails", [False, True])
def test_a_read_of_the_step_itself_counts(fails: bool) -> None:
    assert handed_on(read=True, fails=fails) == [False, False]
