"""A decoder whose parameters an axis of devices can divide, programs that divide it, and trainings of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper import Directive, Place, Replicate, ShardWeights, Split
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import Compiled
from lightning_piper.verify import Report
from tests import programs
from tests.strategy.fitting import QUIET, traced_once

WORDS, LENGTH, DIM = 12, 6, 8
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")  # parameters whose columns or rows are sharded
PARAMS = {f"*.{name}.weight": 0 for name in COLUMNS} | {f"*.{name}.weight": 1 for name in ROWS}

VOCABULARY = {"embed.weight": 0, "head.weight": 0}


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # A bias of keys does not change any score. Its gradient consists of rounding errors only, which Adam
        # turns into steps.
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=name != "k") for name in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention, self.up, self.down = (
            Attention(heads),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))  # type: ignore[no-any-return]


class Decoder(L.LightningModule):
    """A decoder. Batch: tokens [n, 6] and the next tokens, some of which are padding (-100)."""

    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, DIM), nn.Parameter(torch.randn(LENGTH, DIM))
        self.blocks, self.norm = nn.ModuleList(Block(heads, dropout) for _ in range(2)), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def loss_of(self, batch: Any) -> Tensor:
        tokens, target = batch
        with piper.annotate("LAYER", 0):
            x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for i, block in enumerate(self.blocks, 1):
            with piper.annotate("LAYER", i):
                x = block(x)
        with piper.annotate("LAYER", 3):
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).double()


def tensors(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (count, LENGTH + 1), generator=draw)
    target = words[:, 1:].clone()
    target[torch.rand(target.shape, generator=draw) < 0.2] = -100
    return words[:, :-1].contiguous(), target


@functools.cache
def captured(make: Callable[[], L.LightningModule] = decoder) -> CapturedStep:
    """Capture a model's step for eight samples."""
    return capture(make(), tensors(8))


def compiled_for(program: Any, make: Callable[[], L.LightningModule] = decoder) -> Compiled:
    return programs.compiled(captured(make), program)


def report_of(program: Any, make: Callable[[], L.LightningModule] = decoder) -> Report:
    return programs.report(captured(make), tensors(8), program)


def divided(devices: Any, sequence: bool = False, **fields: Any) -> ShardWeights:
    values = {"LAYER=*": 1} if sequence else None
    return ShardWeights(
        **(
            {
                "filter": {},
                "devices": devices,
                "axis": "tp",
                "stream": "tp",
                "params": PARAMS,
                "values": values,
            }
            | fields
        )
    )


def stages(groups: Sequence[Sequence[int]]) -> list[Directive]:
    """Return a program that places the four layers in equal runs on groups of devices, with two
    microbatches."""
    size = 4 // len(groups)
    layers = [list(range(i * size, i * size + size)) for i in range(len(groups))]
    places = [
        Place(filter={"LAYER": layer}, devices=list(group))
        for layer, group in zip(layers, groups, strict=True)
    ]
    return [*places, Split(filter={}, dim_name="MB", num_microbatches=2)]


def replicas(levels: Mapping[str, Any]) -> list[Directive]:
    """Return a program with two replicas of a tensor-parallel pair: a 2 x 2 grid of devices. `levels` are
    fields of `Replicate`."""
    place = Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"])
    return [place, divided(None), Replicate(filter={}, devices=[0, 1, 2, 3], **levels)]


def grid(chosen: Mapping[str, Any] | None = None, start: int = 0, **axes: int) -> Place:
    """Return a `Place` on a grid of devices with consecutive numbers from `start` on. `axes` has the size of
    each axis, for example `data=2, tp=2`. `chosen` is the filter."""
    devices: Any = list(range(start, start + math.prod(axes.values())))
    for size in reversed(list(axes.values())[1:]):
        devices = [devices[i : i + size] for i in range(0, len(devices), size)]
    return Place(filter=chosen or {}, devices=devices, axes=list(axes))


@traced_once
def fit(
    module: L.LightningModule, strategy: Any, devices: int = 1, batch: int = 8, ckpt_path: str | None = None,
    replica: int | None = None, **options: Any,
) -> L.Trainer:  # fmt: skip
    """Fit the module, and return the Trainer. `replica` is 0 or 1: the number of a replica, which draws every
    other sample. None: the module gets all samples."""
    about: dict[str, Any] = QUIET | {"precision": "64-true"} | options
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **about)
    data = TensorDataset(*(x if replica is None else x[replica::2] for x in tensors(40)))
    loader = DataLoader(data, batch_size=batch)
    trainer.fit(
        module,
        loader,
        DataLoader(TensorDataset(*tensors(12)), batch_size=4),
        ckpt_path=ckpt_path,
        weights_only=False,
    )
    return trainer


def far(one: nn.Module, other: nn.Module) -> float:
    return max(
        float((x - y).abs().max())
        for x, y in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )
