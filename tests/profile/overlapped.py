"""Recorded trainings of a small GPT on two processes, once with its repeated blocks as regions, and once with
one region for the whole model.
"""

from __future__ import annotations

import array
import fcntl
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.runtime import collectives
from lightning_piper.runtime.same_machine import shared_memory
from lightning_piper.runtime.same_machine.shared_memory import SharedSum
from tests.distributed.processes import PATIENCE, launch_trainings
from tests.strategy.fitting import QUIET, sharing_captures, trace

WORDS, LENGTH, WIDTH, LAYERS, SAMPLES = 32, 16, 32, 3, 8
SHARDED = [
    piper.Place(filter={}, devices=[0, 1]),
    piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(L.LightningModule):
    """A model without annotations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.words(batch) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Whole(GPT):
    """The same model with one annotation around its whole step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            return super().training_step(batch, batch_idx)


FITS: dict[str, tuple[type[GPT], dict[str, Any]]] = {  # name -> the model, arguments of the strategy
    "blocks": (GPT, {}),
    "one region": (Whole, {}),
    "sharded": (GPT, {"directives": SHARDED}),
    "sharded in one region": (Whole, {"directives": SHARDED}),
}


def data() -> Tensor:
    return torch.randint(WORDS, (3 * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def trace_all(folder: Path) -> None:
    for model in (GPT, Whole):
        trace(model(), data()[:SAMPLES], (SAMPLES, SAMPLES // 2), "training_step")


@contextmanager
def arriving(sums: int, arrived: list[int]) -> Iterator[None]:
    """Holds back the last of a step's `sums` buckets until the other process's contributions to all earlier
    ones have arrived, though nobody waits for them. Appends to `arrived` for how many buckets they had
    arrived.
    """
    under_way: list[SharedSum] = []

    def there() -> int:
        """The number of buckets for which the other process's notes are in the pipe; nothing else travels in
        it. The other process may already be further on, so the number is limited to the buckets that were
        started here.
        """
        (incoming,) = under_way[0]._incoming.values()
        unread = array.array("i", [0])
        fcntl.ioctl(incoming._work._inbox.file, termios.FIONREAD, unread)
        return min(unread[0] // (incoming._note.itemsize * len(incoming._note)), len(under_way))

    class Watched(SharedSum):
        def __init__(self, *args: Any) -> None:
            last = len(under_way) == sums - 1
            if last:
                end = time.monotonic() + PATIENCE.total_seconds()
                while there() < len(under_way) and time.monotonic() < end:
                    time.sleep(0.001)
                arrived.append(there())
                under_way.clear()
            super().__init__(*args)
            if not last:
                under_way.append(self)

    few = {
        module: mock.patch.object(module, "DIRECT", 4 * WIDTH) for module in (collectives, shared_memory)
    }  # the loss is smaller, every bucket is larger
    with mock.patch.object(collectives, "SharedSum", Watched), few[collectives], few[shared_memory]:
        yield


@sharing_captures
def fit_all(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (model, arguments) in FITS.items():
        strategy = piper.PiperStrategy(profile=piper.Schedule(wait=0, warmup=1, active=2), **arguments)
        options: dict[str, Any] = {**QUIET, "accelerator": "cpu", "devices": 2, "max_steps": 3}
        fit = L.Trainer(strategy=strategy, default_root_dir=folder / name, **options)
        arrived: list[int] = []
        with arriving(LAYERS + 2, arrived) if name == "blocks" else nullcontext():
            fit.fit(model(), DataLoader(data(), batch_size=SAMPLES // 2))
        found[name] = arrived
    return found


def record_all(folder: Path) -> list[dict[str, Any]]:
    """Record the trainings of `FITS`, each into a folder of its name below `folder`. Returns for each rank
    what `arriving` has found.
    """
    return launch_trainings(2, fit_all, folder / "ranks", folder, prepare=trace_all)
