"""A small zoo of models with two pipeline stages each, which together have everything that makes a step more
than a stack of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_piper as piper


class Model(L.LightningModule):
    """A module that logs its loss and trains with AdamW."""

    lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def done(self, loss: Tensor) -> Tensor:
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class MLP(Model):
    """A model that also has several metrics, a parameter that nothing uses, a frozen parameter, and two
    parameter groups, of which one is on the second stage.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.unused = nn.Linear(3, 3)
        self.second[0].bias.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        with piper.annotate("PP"):
            hidden = self.first(x)
            self.log("hidden", hidden.abs().mean(), sync_dist=True)
        with piper.annotate("PP"):
            out = self.second(hidden)
            loss = F.mse_loss(out, y)
        self.log_dict({"largest": out.max(), "constant": 3.0}, reduce_fx="max")
        return {"loss": self.done(loss)}

    def configure_optimizers(self) -> Any:
        second = {id(p) for p in self.second.parameters()}
        groups = [
            {"params": [p for p in self.parameters() if id(p) not in second]},
            {"params": list(self.second.parameters()), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Tied(Model):
    """Token embedding and output layer share one parameter, which both stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = F.gelu(self.inner(self.embedding(batch["tokens"])))
        with piper.annotate("PP", 1):
            logits = self.head(self.norm(x))
            return self.done(F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))


class Varied(Tied):
    """Also: a frozen parameter, one without dimensions, one that is not contiguous, and two groups by a mark
    on the parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 8).t())
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.randn(8), requires_grad=False)
        self.wide = nn.Sequential(nn.Linear(8, 400), nn.GELU(), nn.Linear(400, 8))
        for p in self.parameters():
            p.decays = p.ndim > 1  # type: ignore[attr-defined]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = F.gelu(self.inner(self.embedding(batch["tokens"]))) @ self.mix + self.offset
        with piper.annotate("PP", 1):
            x = x + self.wide(self.norm(x)) + self.offset
            logits = self.head(x) * self.temperature
            return self.done(F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))

    def configure_optimizers(self) -> Any:
        marked = [
            [p for p in self.parameters() if p.decays is decays and p.requires_grad]
            for decays in (True, False)
        ]  # type: ignore[attr-defined]
        return torch.optim.AdamW(
            [{"params": marked[0]}, {"params": marked[1], "weight_decay": 0.0, "lr": self.lr / 2}],
            lr=self.lr,
            weight_decay=0.1,
        )


@dataclass
class Images:
    pixels: Tensor
    labels: Tensor
    scale: float = 0.5


class ConvNet(Model):
    """Batch norms on both stages, so that the step changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.norm2 = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 3)

    def training_step(self, batch: Images) -> Tensor:
        with piper.annotate("PP"):
            x = F.relu(self.norm(self.conv(batch.pixels * batch.scale)))
            x = F.adaptive_avg_pool2d(x, 2).flatten(1)
        with piper.annotate("PP"):
            return self.done(F.cross_entropy(self.out(self.norm2(x)), batch.labels))


class _Mapped(Dataset[Any]):
    def __init__(self, data: TensorDataset, names: tuple[str, str]) -> None:
        self.data, self.names = data, names

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return dict(zip(self.names, self.data[i], strict=True))


def _images(samples: list[tuple[Tensor, Tensor]]) -> Images:
    pixels, labels = zip(*samples, strict=True)
    return Images(torch.stack(pixels), torch.stack(labels))


def vectors(samples: int = 40, batch_size: int = 8, shuffle: bool = False, seed: int = 0) -> DataLoader[Any]:
    """A loader for `MLP`."""
    g = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(samples, 8, generator=g), torch.randn(samples, 4, generator=g))
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def texts(samples: int = 40, batch_size: int = 8, length: int = 6) -> DataLoader[Any]:
    """A loader for `Tied`, whose batches are dicts."""
    g = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(11, (samples, length), generator=g) for _ in range(2))
    return DataLoader(_Mapped(TensorDataset(tokens, targets), ("tokens", "targets")), batch_size=batch_size)


def images(samples: int = 40, batch_size: int = 8) -> DataLoader[Any]:
    """A loader for `ConvNet`, whose batches are dataclass instances with a constant."""
    g = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.rand(samples, 1, 8, 8, generator=g), torch.randint(3, (samples,), generator=g))
    return DataLoader(data, batch_size=batch_size, collate_fn=_images)


ZOO: dict[str, tuple[Any, Any]] = {
    "mlp": (MLP, vectors),
    "dropout": (lambda: MLP(dropout=0.3), vectors),
    "tied": (Tied, texts),
    "varied": (Varied, texts),
    "conv": (ConvNet, images),
}


def make(name: str, seed: int = 0, **data: Any) -> tuple[Model, DataLoader[Any]]:
    """A model of the zoo, with the same values at every call, and its data."""
    model, loader = ZOO[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(), loader(**data)
