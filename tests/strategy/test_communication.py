"""Steps that communicate with other processes: they are refused where the processes may run different parts
of the step, and otherwise left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch import Tensor

import lightning_piper as piper
from tests.strategy.fitting import local, trainer
from tests.strategy.partial_capture import Branch, data

CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "isend": lambda x: dist.isend(x, 0),
    "object": lambda x: dist.all_gather_object([None], {"count": 1}),
    "new_group": lambda x: dist.new_group([0]),
    "differentiable": lambda x: torch.distributed.nn.all_reduce(x),
    "functional": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of one process, in which every call would return."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Communicates(Branch):
    """
    Args:
        call: The name in `CALLS` of the call that the step makes.
        when: "before" or "after" the captured call, or "backward" in a hook of the backward pass.
        decides: Whether the step also reads a value, so that it cannot be captured for that reason alone.
    """

    def __init__(self, call: str, when: str = "before", decides: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.double()
        self.call, self.when, self.decides = CALLS[call], when, decides

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        count = torch.ones(())
        if self.when == "before":
            self.call(count)
        made = self.body(batch[0])
        if self.decides and made.sum().item() > 1e9:
            return made.sum()
        if self.when == "after":
            self.call(count)
        if self.when == "backward":
            made.register_hook(lambda gradient: self.call(gradient.detach().clone()) and None)
        return (made - batch[1]).square().mean() / count


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
@pytest.mark.parametrize(
    "call, when, decides",
    [
        *((call, "before", False) for call in CALLS),
        ("all_reduce", "after", True),
        ("functional", "after", True),
        ("all_reduce", "backward", False),
        ("isend", "backward", True),
    ],
)
def test_stages_refuse_it(call, when, decides):
    fit, _ = trainer(local(piper.schedules.one_f_one_b(stages=2, microbatches=4)))
    with pytest.raises(
        piper.PiperError, match=r"test_communication.py:\d+ \(.*communicates with other processes.* hook"
    ):
        fit.fit(Communicates(call, when, decides), data())
    count = torch.ones(())
    dist.all_reduce(count)  # everything is as it was
    assert count == 1


def test_replicas_make_the_call():
    """It runs as under DDP, and the warning says the true reason."""
    one, other = Communicates("all_reduce"), Communicates("all_reduce")
    with pytest.warns(UserWarning, match=r"runs uncaptured.*communicates with other processes"):
        trainer(local([]))[0].fit(one, data())
    trainer("auto")[0].fit(other, data())
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
