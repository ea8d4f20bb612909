"""Errors of experts, and of their division over devices."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse
from lightning_piper.runtime import Executor, LocalTransport, run_local, shards_of
from tests.dags import Fixed
from tests.errors.case import Case, Cases, module_of

MOE = """\
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper


class Experts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.ones(4, 6, 8)), nn.Parameter(torch.ones(4, 8, 6))

    def training_step(self, batch, batch_idx):
        x, y = batch
        with piper.annotate("PP", 0):
            score, chosen = self.router(x).max(-1)
            order = chosen.argsort(stable=True)
            counts = F.one_hot(chosen, 4).sum(0)
        with piper.annotate("PP", 0), piper.annotate("EP"):
            rows, sizes = piper.dispatch(x[order], counts)
            rows = torch.relu(piper.grouped_linear(rows, self.up, sizes))
            rows = piper.combine(piper.grouped_linear(rows, self.down, sizes))
        with piper.annotate("PP", 0):
            out = torch.zeros_like(x).index_add(0, order, rows * score[order].unsqueeze(1))
            return F.mse_loss(out.sum(1, keepdim=True), y)
"""

TITLE = "Experts on several devices"
INTRO = (
    "Piper raises these errors when the step marks experts, and when `shard_experts` "
    "divides them. The module is\n\n"
    "```python\n" + MOE.rstrip() + "\n```"
)

PLACE = {"op": "place", "filter": {}, "devices": [0, 1]}
REPLICATE = {"op": "replicate", "filter": {}, "devices": [0, 1]}
SHARD = {"op": "shard_experts", "filter": {"EP": "*"}, "devices": [0, 1]}
GELU = "rows = torch.relu(piper.grouped_linear(rows, self.up, sizes))"


def experts(*changes: tuple[str, str]) -> Any:
    return module_of("moe.py", MOE, "Experts", changes)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g)


@cache
def captured() -> Any:
    return capture(experts(), batch())


def program(what: str, *directives: Any) -> Case:
    return Case(what, lambda: compile_step(captured(), tuple(parse(list(directives)))))


def divided(what: str, *changes: tuple[str, str]) -> Case:
    """Return a case in which a changed module is divided over two devices."""
    program = [PLACE, REPLICATE, SHARD]
    return Case(what, lambda: compile_step(capture(experts(*changes), batch()), tuple(parse(program))))


def _run() -> None:
    """Run a module whose counts do not add up."""
    step = capture(experts(("F.one_hot(chosen, 4).sum(0)", "F.one_hot(chosen, 4).sum(0) + 1")), batch())
    compiled = compile_step(step, tuple(parse([PLACE, REPLICATE, SHARD])))
    tensors = {name: x.detach() for name, x in step.module.named_parameters()}
    transport, device = LocalTransport(compiled.plans), torch.device("cpu")
    run_local(
        [
            Executor(p, step, tensors, {}, transport, device, shards_of(p, tensors, device))
            for p in compiled.plans.values()
        ],
        list(batch()),
        seed=0,
    )


CASES: Cases = [
    Case("`combine` without a `dispatch`", lambda: capture(experts(
        ("rows, sizes = piper.dispatch(x[order], counts)", "rows, sizes = x[order], counts")),
        batch()).at(8)),
    Case("counts that are not integers", lambda: capture(experts(("piper.dispatch(x[order], counts)",
                                                                  "piper.dispatch(x[order], counts.float())")), batch()).at(8)),
    Case("tokens without rows", lambda: piper.dispatch(torch.ones(()), torch.ones(2, dtype=torch.int64))),
    Case("boxes with one dimension", lambda: piper.dispatch(torch.ones(4))),
    Case("`grouped_linear` of weights with the wrong shape",
         lambda: piper.grouped_linear(torch.ones(3, 8), torch.ones(2, 8, 6), torch.tensor([1, 2]))),
    Case("`grouped_linear` of several dtypes",
         lambda: piper.grouped_linear(torch.ones(3, 8), torch.ones(2, 6, 8).double(), torch.tensor([1, 2]))),
    program("a filter that does not select experts", PLACE, REPLICATE, {**SHARD, "filter": {"EP": "-"}}),
    program("`shard_experts` before `place`", SHARD),
    program("`shard_experts` over devices that are not the stage's "
            "devices", PLACE, REPLICATE, {**SHARD, "devices": [0, 2]}),
    program("`shard_experts` over one device", PLACE, REPLICATE, {**SHARD, "devices": [0]}),
    program("`shard_experts` over groups of different sizes", PLACE, {**SHARD, "devices": [[0, 1], [2, 3, 4]]}),
    program("`shard_experts` names a device twice", PLACE, {**SHARD, "devices": [[0, 1], [1, 2]]}),
    program("the devices do not divide the experts", {**PLACE, "devices": [0, 1, 2]},
        {**SHARD, "devices": [0, 1, 2]}),
    program("experts are divided twice", PLACE, REPLICATE, SHARD, SHARD),
    program("experts are divided, and other regions are not replicated", PLACE, SHARD),
    program("`split` after `shard_experts` and a directive of another package", PLACE, REPLICATE, SHARD, Fixed(),
            {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2}),
    divided("dropout in experts", (GELU, GELU + "; rows = F.dropout(rows)")),
    divided("experts read a tensor past `dispatch`", (GELU, GELU + "; rows = rows * score.mean()")),
    divided("a mean over tokens in experts", (GELU, GELU + "; rows = rows - rows.mean(0)")),
    divided("the order of tokens counts in experts", (GELU, GELU + "; rows = rows + (rows > 0).cumsum(0)")),
    divided("experts give two rows for each token",
        ("self.down, sizes))", "self.down, sizes).repeat(2, 1))[:len(x)]")),
    divided("experts take an index from a row's values",
        (GELU, GELU + "; rows = rows * torch.ones(2)[rows[:, "
                                                                       ":1].long()]")),
    divided("experts have their number as a constant", (GELU, GELU + "; rows = rows + sizes.view(4).sum()")),
    divided("the weights are not stacked by expert", ("nn.Parameter(torch.ones(4, 6, 8)), "
                                                      "nn.Parameter(torch.ones(4, 8, 6))",
                                                "nn.Linear(8, 6), nn.Linear(6, 8)"),
            ("piper.grouped_linear(rows, self.up, sizes)", "self.up(rows)"),
            ("piper.grouped_linear(rows, self.down, sizes)", "self.down(rows)")),
    divided("a region whose experts are not sharded also uses the experts' weights",
            ("return F.mse_loss(", "return self.up.mean() + F.mse_loss(")),
    divided("the weights of different experts are interleaved in "
            "memory", ("nn.Parameter(torch.ones(4, 6, 8))",
                                                          "nn.Parameter(torch.ones(6, 4, 8).transpose(0, "
                                                          "1))")),
    Case("counts that do not add up to the number of tokens", _run),
]  # fmt: skip
