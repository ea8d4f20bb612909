"""Sharded tensors in exact arithmetic: sums of integers have the same bits in any order, so no bit may
differ.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Place, Replicate, Split
from tests.groups import marked
from tests.tensors import divided, stages

WORDS, DIM, LENGTH = 16, 8, 4
PARAMS: dict[str, Any] = {
    "embed.weight": 0,
    "*.qkv.weight": (0, 3),
    "*.out.weight": 1,
    "*.up.weight": 0,
    "*.down.weight": 1,
}


class Block(nn.Module):
    """An attention without a softmax, and a gated network: products and sums of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(((q @ k.transpose(-1, -2)).sign() @ v).transpose(1, 2).flatten(2))
        return (x + self.down(self.up(x).relu())).clamp(-8, 8)


class Whole(L.LightningModule):
    """Batch: words [n, 4], and weights of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, DIM), nn.ModuleList(Block() for _ in range(2))
        for x in self.parameters():
            x.data = torch.randint(-2, 3, x.shape).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, weights = batch
        with piper.annotate("LAYER", 0):
            x = self.embed(words)
        for i, block in enumerate(self.blocks, 1):
            with piper.annotate("LAYER", i):
                x = block(x)
        with piper.annotate("LAYER", 3):
            return (x * weights).sum((1, 2)).mean()


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (8, LENGTH), generator=draw), torch.randint(
        -2, 3, (8, LENGTH, DIM), generator=draw
    ).double()


def place(count: int) -> Place:
    return Place(filter={}, devices=list(range(count)))


PROGRAMS: dict[str, list[Any]] = {
    "two": [place(2), divided([0, 1], params=PARAMS)],
    "four": [place(4), divided([0, 1, 2, 3], params=PARAMS)],
    "sequence": [place(2), divided([0, 1], sequence=True, params=PARAMS)],
    "sequence alone": [place(4), divided([0, 1, 2, 3], params={}, values={"*": 1})],
    "stages": [*stages([[0, 1], [2, 3]]), divided([[0, 1], [2, 3]], sequence=True, params=PARAMS)],
    "zero1": [
        Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"]),
        divided(None, params=PARAMS),
        Replicate(filter={}, devices=[0, 1, 2, 3], shard_optimizer=True),
    ],
    "zero3": [
        Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"]),
        Split(filter={}, dim_name="MB", num_microbatches=2),
        divided(None, params=PARAMS),
        Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True),
    ],
}


@pytest.mark.parametrize("name", marked(PROGRAMS, ["stages"]))
def test_every_bit_is_that_of_one_device(name):
    report = piper.verify(whole(), batch(), PROGRAMS[name])
    assert report.verdict == "verified"
    assert {row.single.verdict for row in report.rows} == {"bitwise equal"}, report


def test_other_numbers_are_rounded():
    """Else the ones above would say nothing."""
    module = whole()
    for x in module.parameters():
        x.data /= 3
    report = piper.verify(module, batch(), PROGRAMS["two"])
    assert report.verdict == "verified" and report.rows[-1].single.verdict == "equal within rounding"
