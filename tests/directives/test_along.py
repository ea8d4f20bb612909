"""Operations along the dimension that members of an axis share in parts: they join, separate and reorder
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Place, ShardSequences
from lightning_piper.errors import DirectiveError
from tests.groups import marked
from tests.tensors import decoder, fit


class Net(L.LightningModule):
    """Batch: [n, length, 3]."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.work, self.first, self.last = work, nn.Linear(3, 8), nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("LAYER", 0):
            x = self.first(batch)
        with piper.annotate("LAYER", 1):
            x = self.work(x)
        with piper.annotate("LAYER", 2):
            return self.last(x).square().mean()


def doubled(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


WORK: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x, x.tanh()], 1),
    "cat of three": lambda x: torch.cat([x, x, x], 1),
    "interleaved": lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
    "pairs": lambda x: doubled(x.unflatten(1, (-1, 2)).mean(2)),
    "wide": lambda x: x.reshape(len(x), -1, 16).tanh().reshape(x.shape),
    "pooled": lambda x: doubled(F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)),
    "every second": lambda x: doubled(x[:, ::2]),
    "nothing behind": lambda x: torch.cat([x.tanh(), x[..., 8:]], -1),
    "nothing before": lambda x: torch.cat([x[..., 8:], x.tanh()], -1),
    "mask of one head": lambda x: (
        x + (x[:, None] @ x[:, None].transpose(-1, -2)).softmax(-1).mean((1, 3))[..., None]
    ),
}
# Members, positions, and the number of runs of which each member has a part.
OVER = {"two": (2, 8, 1), "three": (3, 12, 1), "four": (4, 16, 1), "runs": (2, 12, 2), "odd": (2, 6, 1)}


EVERY = [(over, name) for over in OVER for name in WORK]
OFTEN = [*EVERY[len(WORK) : 2 * len(WORK)], *EVERY[3 * len(WORK) : 4 * len(WORK)]][
    ::2
]  # three members, and runs


@pytest.mark.parametrize("over, name", marked(EVERY, OFTEN))
def test_it_equals_one_device(over, name):
    degree, length, runs = OVER[over]
    torch.manual_seed(0)
    devices = list(range(degree))
    parts = ShardSequences(filter={}, devices=devices, axis="cp", values={"*": (1, runs)}, stream="cp")
    program = [Place(filter={}, devices=devices), parts]
    report = piper.verify(Net(WORK[name]).double(), torch.randn(4, length, 3).double(), program)
    assert report.verdict == "verified" and all(row.single.verdict != "differs" for row in report.rows)


def test_one_axis_is_divided_by_one_directive():
    """Said when the program is given, before anything is captured."""
    program = [
        Place(filter={}, devices=[0, 1], axes=["tp"]),
        *(ShardSequences(filter={}, axis="tp", values={"*": 1}) for _ in range(2)),
    ]
    with pytest.raises(
        DirectiveError, match=r"several directives shard tensors along 'tp'. Combine them into one directive"
    ):
        fit(decoder(), piper.PiperStrategy(program, transport="local"), max_epochs=1)
