"""Errors of tensors, and of their division over devices."""

from __future__ import annotations

from typing import Any

import torch

import lightning_piper as piper
from tests.dags import Fixed
from tests.errors.case import Case, Cases, module_of

MODEL = """\
import lightning as L
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper


class Blocks(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with piper.annotate("PP", 0):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        with piper.annotate("PP", 1):
            return F.mse_loss(x, y)
"""

TITLE = "Tensors on several devices"
INTRO = (
    "Piper raises these errors when `shard_weights` or `shard_sequences` divides tensors. The module is\n\n"
    "```python\n" + MODEL.rstrip() + "\n```"
)

PLACE = {"op": "place", "filter": {}, "devices": [0, 1]}
REPLICATE = {"op": "replicate", "filter": {}, "devices": [0, 1]}


def shard(**fields: Any) -> dict[str, Any]:
    return {
        "op": "shard_weights",
        "filter": {},
        "devices": [0, 1],
        "axis": "tp",
        "params": {"up.weight": 0, "down.weight": 1},
    } | fields


def compiled(*program: Any) -> Any:
    batch = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    return piper.compile(module_of("blocks.py", MODEL, "Blocks", ()), batch, list(program))


CASES: Cases = [
    Case("a pattern does not match a parameter", lambda: compiled(PLACE, shard(params={"*.up": 0}))),
    Case("a pattern does not match a region", lambda: compiled(PLACE, shard(values={"LAYERS=*": 1}))),
    Case("a dimension cannot be divided", lambda: compiled(PLACE, shard(params={"norm.weight": 1}))),
    Case("a dimension is not a number", lambda: compiled(PLACE, shard(params={"up.weight": "rows"}))),
    Case("an operation needs the whole parameter", lambda: compiled(PLACE, shard(params={"norm.weight": 0}))),
    Case("a sequence cannot be divided", lambda: compiled(PLACE, shard(values={"*": 1}))),
    Case("the program does not have the axis",
        lambda: compiled({**PLACE, "axes": ["dp"]}, shard(devices=None))),
    Case("some regions are not placed", lambda: compiled({**PLACE, "filter": {"PP": 0}}, shard())),
    Case("`replicate`, a directive of another package, and then `shard_weights`",
         lambda: compiled(PLACE, REPLICATE, Fixed(), shard())),
    Case("two `shard_weights` directives for the same axis", lambda: compiled(PLACE, shard(), shard())),
    Case("the filter leaves out a region that reads a "
         "parameter", lambda: compiled(PLACE, shard(filter={"PP": 1}))),
    Case("`tensor_parallel` does not find a weight to shard", lambda: piper.tensor_parallel(
        module_of("blocks.py", MODEL, "Blocks", ()), (torch.randn(4, 3, 8), torch.randn(4, 3, 8)), 7)),
]  # fmt: skip
