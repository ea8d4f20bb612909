"""Processes that trace a step once for all of them, and runs that take the traced step from an earlier run,
train to the same bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper import Place, Replicate
from lightning_piper.cache import CACHE
from lightning_piper.capture.graph_cache import cached_graphs
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET

BOTH = [Place(filter={}, devices=[0, 1])]
PROGRAMS: dict[str, Any] = {
    "replicas": [*BOTH, Replicate(filter={}, devices=[0, 1])],
    "stages": piper.schedules.one_f_one_b(stages=2, microbatches=2),
    "zero3": [*BOTH, Replicate(filter={}, devices=[0, 1], shard_params=True)],
}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.scale = 1.5

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for i, stage in enumerate(self.stages):
            with piper.annotate("PP", i):
                x = stage(x)
        loss = (x.square().mean() * self.scale) ** 1.5
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def fit(name: str, scale: float = 1.5) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net()
    module.scale = scale
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
    strategy = piper.PiperStrategy(PROGRAMS[name])
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, use_distributed_sampler=False, **QUIET
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    return module.state_dict() | {"loss": trainer.callback_metrics["loss"]}


def train(rank: int, folder: str) -> dict[str, Any]:
    counted, own = [0], cached_graphs._made

    def counting(*args: Any) -> tuple[bytes, torch.fx.Graph]:
        counted[0] += 1
        return own(*args)

    cached_graphs._made = counting
    found: dict[str, Any] = {}
    for name in PROGRAMS:
        for kept, scale in (("nowhere", 1.5), ("first", 1.5), ("again", 1.5), ("other", 2.5)):
            os.environ[CACHE] = os.devnull if kept == "nowhere" else str(Path(folder) / name)
            cached_graphs.forget()
            before = counted[0]
            found[f"{name} {kept}"] = fit(name, scale), counted[0] - before
    return found


def test_processes_that_share_traces_train_to_the_same_bits(tmp_path):
    ranks = launch_trainings(2, train, tmp_path / "ranks", str(tmp_path / "kept"))
    for name in PROGRAMS:
        traces = {
            kept: [found[f"{name} {kept}"][1] for found in ranks]
            for kept in ("nowhere", "first", "again", "other")
        }
        alone = traces["nowhere"][0]
        assert traces["nowhere"] == [alone, alone]
        assert alone >= 1
        assert sum(traces["first"]) == alone
        assert traces["again"] == [0, 0]
        assert sum(traces["other"]) == alone  # a number in Python is another
        for found in ranks:
            states = {kept: found[f"{name} {kept}"][0] for kept in traces}
            for kept in ("first", "again"):
                assert all(torch.equal(x, states[kept][key]) for key, x in states["nowhere"].items())
            assert not all(torch.equal(x, states["other"][key]) for key, x in states["nowhere"].items())
