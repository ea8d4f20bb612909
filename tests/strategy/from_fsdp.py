"""A training that begins under Lightning's `ModelParallelStrategy` with FSDP2, and continues elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import lightning_piper as piper
from tests.strategy.fitting import Batches, trainer

BATCHES = 3  # of each epoch


class Net(L.LightningModule):
    """A model whose parameters are in two groups, in the order of the module or not."""

    def __init__(self, sharded: bool, in_order: bool) -> None:
        super().__init__()
        self.sharded, self.in_order, self.net = sharded, in_order, None
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1, bias=False))
        self.net = net.double().eval()
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        assert self.net is not None
        self.net.eval()  # the batch norm keeps its statistics

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        assert self.net is not None
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        groups = [{"params": self.net[3].parameters(), "lr": 0.02}, {"params": self.net[:3].parameters()}]
        groups = groups[::-1] if self.in_order else groups
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def batches(rank: int) -> Batches:
    draw = torch.Generator().manual_seed(rank)
    double = {"dtype": torch.float64, "generator": draw}
    return Batches([(torch.randn(4, 8, **double), torch.randn(4, 1, **double)) for _ in range(BATCHES)])  # type: ignore[arg-type]


def train(
    rank: int, kind: str, epochs: int, source: str | None, target: Path | None, in_order: bool = False
) -> dict[str, Any]:
    """Train over two processes. Return the parameters of the whole module.

    Args:
        kind: "fsdp2", "zero3" or "replicas".
        source: The checkpoint from which to resume.
        target: The checkpoint to save.
        in_order: Whether the optimizer's groups have the parameters in the order of the module.
    """
    strategy: Any = piper.PiperStrategy("zero3" if kind == "zero3" else None)
    if kind == "fsdp2":
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=True)
    found, _ = trainer(strategy, max_steps=-1, max_epochs=epochs, devices=2)
    module = Net(kind == "fsdp2", in_order)
    found.fit(module, batches(rank), ckpt_path=source, weights_only=False)
    if target is not None:
        found.save_checkpoint(target)
    values = found.strategy.lightning_module_state_dict()
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in values.items()}
