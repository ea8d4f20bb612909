"""Steps that change their batch, or read state outside of the module, as users write them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_piper as piper
from tests.strategy.fitting import QUIET

Batch = dict[str, Tensor]


class Net(L.LightningModule):
    """`step` changes the batch or reads state, and returns the inputs and a factor of the loss."""

    def __init__(self, step: Callable[[Net, Batch], tuple[Tensor, float]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.double()
        self.last.weight.scale = 2.0  # type: ignore[attr-defined]
        self.step = step

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        y = batch["y"]
        with piper.annotate("PP", 0):
            x, factor = self.step(self, batch)
            h = self.hidden(x)
        with piper.annotate("PP", 1):
            return F.mse_loss(self.last(h), y) * factor

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last.weight.scale = 1.0 + batch_idx  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Unfreezes(Net):
    """The first layer is trained only in every second batch."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.trainer.fit_loop.epoch_loop.batch_idx % 2 == 1):
            return super().hidden(x)


def _in_place(net: Net, batch: Batch) -> tuple[Tensor, float]:
    return batch["x"].sub_(0.1), 1.0


def _pops(net: Net, batch: Batch) -> tuple[Tensor, float]:
    return batch.pop("x"), 1.0


def _stores(net: Net, batch: Batch) -> tuple[Tensor, float]:
    batch["double"] = batch["x"] * 2
    return batch["double"], 1.0


def _marks(net: Net, batch: Batch) -> tuple[Tensor, float]:
    batch["x"].score = 3  # type: ignore[attr-defined]
    return batch["x"], 1.0


def _counts(net: Net, batch: Batch) -> tuple[Tensor, float]:
    weight: Any = net.last.weight
    weight.calls = getattr(weight, "calls", 0) + 1
    return batch["x"], weight.calls


def _shared(net: Net, batch: Batch) -> tuple[Tensor, float]:
    batch["x"].mul_(1.5)
    return torch.cat([batch["view"], batch["x"][:, 3:]], 1), 1.0


def _apart(net: Net, batch: Batch) -> tuple[Tensor, float]:
    return _shared(net, batch)


def _reads_attribute(net: Net, batch: Batch) -> tuple[Tensor, float]:
    return batch["x"], float(net.last.weight.scale)  # type: ignore[arg-type]


def plain(net: Net, batch: Batch) -> tuple[Tensor, float]:
    return batch["x"], 1.0


def _reads_absent(net: Net, batch: Batch) -> tuple[Tensor, float]:
    return batch["x"], getattr(net.trainer.train_dataloader, "factor", 1.0)


class SetsLater(Net):
    """A hook gives the loader an attribute that the step did not find before."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.train_dataloader.factor = 3.0  # type: ignore[union-attr]


# Name of what the step changes -> the step, and the part of the batch that the warning names.
CHANGES = {
    "a tensor in place": (_in_place, "['x']"),
    "an entry removed": (_pops, "['x']"),
    "an entry stored": (_stores, "['double']"),
    "an attribute of a tensor": (_marks, "['x'].score"),
}
EQUAL: dict[str, Callable[[], Net]] = {
    "no change": lambda: Net(plain),
    "an attribute of a parameter is read": lambda: Net(_reads_attribute),
    "an attribute of a parameter is changed": lambda: Net(_counts),
    "an attribute that is absent at first": lambda: SetsLater(_reads_absent),
    "gradients are switched by a comparison": lambda: Unfreezes(plain),
}
SIZES: dict[str, Callable[[Net, Batch], tuple[Tensor, float]]] = {
    "trainer.world_size": lambda net, batch: (batch["x"], net.trainer.world_size),
    "trainer.num_devices": lambda net, batch: (batch["x"], net.trainer.num_devices),
    "torch.distributed.get_world_size()": lambda net, batch: (batch["x"], dist.get_world_size()),
}


def fit(module: Net, strategy: Any, devices: int = 1) -> tuple[dict[str, Tensor], list[str]]:
    """The values after four batches, and the package's warnings."""
    g = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(4):
        x = torch.randn(8, 4, generator=g, dtype=torch.float64)
        views = {}
        if module.step is _shared:
            views = {"view": x[:, :3]}
        if module.step is _apart:  # columns of one tensor
            x, view = torch.cat([x, x[:, :3]], 1).split([4, 3], 1)
            views = {"view": view}
        batches.append({"x": x, "y": x.sum(1, keepdim=True)} | views)
    options: dict[str, Any] = QUIET | {"max_epochs": 1, "max_steps": -1}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    said = [str(each.message) for each in found if "lightning_piper" in each.filename]
    return {name: x.detach().clone() for name, x in module.state_dict().items()}, said


def shared() -> Net:
    """A step that writes into a tensor of its batch, with a view of this tensor."""
    return Net(_shared)


def apart() -> Net:
    """The same step with a view of other columns of the same memory."""
    return Net(_apart)


def train_in_stages(rank: int, folder: Path) -> dict[str, list[str]]:
    """Train in two stages on two processes. Returns the warnings, by what the step reads."""
    places = [piper.Place(filter={"PP": i}, devices=[i]) for i in range(2)]
    return {
        name: fit(Net(step), piper.PiperStrategy(places), 2)[1]
        for name, step in {**SIZES, "nothing": plain}.items()
    }
