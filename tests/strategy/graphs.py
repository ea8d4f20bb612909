"""Trainings on batches that hold more than tensors of one size: graphs in objects of their own classes,
texts, paths and arrays.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_piper as piper
from tests.strategy.fitting import Batches, Counted, trainer, values

Outcome = dict[str, Any]


class Store:
    """Attributes in a mapping and a reference back to the graph, as graph libraries have them."""

    def __init__(self, owner: Any, **tensors: Any) -> None:
        self._mapping, self._owner = tensors, weakref.ref(owner)


class Graph:
    """Nodes [n, 4], edges [2, e], of which graph each node is [n], one target a graph [g, 2]; a name that no
    step reads.
    """

    def __init__(self, **tensors: Any) -> None:
        self._store, self.name, self.tag = Store(self, **tensors), Path("graph"), object()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store._owner()._store._mapping[name]

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        made = Graph(**{key: x.to(device) for key, x in self._store._mapping.items()})
        made.name, made.tag = self.name, self.tag
        return made


def graph(seed: int, graphs: int = 3) -> Graph:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 6, (graphs,), generator=draw)
    nodes = int(sizes.sum())
    return Graph(
        x=torch.randn(nodes, 4, generator=draw, dtype=torch.float64),
        edges=torch.randint(nodes, (2, 3 * nodes), generator=draw),
        of=torch.repeat_interleave(torch.arange(graphs), sizes),
        y=torch.randn(graphs, 2, generator=draw, dtype=torch.float64),
    )


def named(seed: int) -> Graph:
    found = graph(seed)
    found.name = Path(f"graph{seed}")
    return found


class Messages(L.LightningModule):
    """A network in which each node gets the sum of its neighbors, and in which a graph's value is the mean
    of its nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()

    def loss(self, batch: Any) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.first(batch.x)
            h = torch.tanh(h + torch.zeros_like(h).index_add(0, batch.edges[1], h[batch.edges[0]]))
        with piper.annotate("PP", 1):
            pooled = h.new_zeros(len(batch.y), 6).index_add(0, batch.of, h)
            return (self.second(pooled) - batch.y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, batch_size=3)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=3)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "name": batch.name, "batch": batch}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def make(cls: type[L.LightningModule] = Messages) -> L.LightningModule:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return cls()


SEEDS = [[1, 2, 1, 3], [4, 5, 6, 4]]  # seeds of the batches of two replicas
STAGES = [piper.Place(filter={"PP": 0}, devices=[0]), piper.Place(filter={"PP": 1}, devices=[1])]
REPLICAS = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])]


def train(rank: int) -> Outcome:
    module = make()
    fit, record = trainer(piper.PiperStrategy(REPLICAS), devices=2, max_steps=4, num_sanity_val_steps=0)
    fit.fit(module, Batches(map(named, SEEDS[rank])), Counted(map(named, SEEDS[rank][:2])))
    found = {"values": values(module), "losses": record.losses, "val": fit.callback_metrics["val"]}
    predicted: Any = fit.predict(module, Batches(map(named, SEEDS[rank][:2])))
    return found | {"names": [x["name"].name for x in predicted], "predicted": [x["loss"] for x in predicted]}


class Table(L.LightningModule):
    """A batch has a table of three rows. So it can be cut by samples only if it has three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1, dtype=torch.float64)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.last(batch["x"]) * batch["table"].mean()).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


SAMPLES = [[4, 3, 2, 5], [3, 5, 3, 3]]  # of the batches of two replicas


def tables(rank: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    shapes = [{"x": (samples, 4), "table": (3,)} for samples in SAMPLES[rank]]
    return [
        {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in each.items()}
        for each in shapes
    ]


def train_tables(rank: int) -> Outcome:
    module = make(Table)
    fit, record = trainer(piper.PiperStrategy(REPLICAS, timeout=60), devices=2, max_steps=4)
    before = fit.validate(module, Counted(tables(rank)), verbose=False)
    fit.fit(module, Batches(tables(rank)))
    return {"values": values(module), "losses": record.losses, "val": before[0]["val"]}


class Encoding(UserDict[str, Any]):
    """The result of a tokenizer."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoding:
        self.data = {key: x.to(device) for key, x in self.data.items()}
        return self
