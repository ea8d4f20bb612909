"""`ModelParallelStrategy` resumes from a checkpoint of one device: Adam's averages go to other parameters.

The optimizer has its groups in another order than the module has its layers. The script prints the first weight
of each layer after the fourth step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from examples.found.report import report

QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
        return self(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": self.head.parameters()}, {"params": self.body.parameters()}], 0.01
        )


def train(steps: int, strategy: Any = "auto", resumed: Path | None = None) -> tuple[L.Trainer, list[float]]:
    data = torch.utils.data.DataLoader(torch.eye(4), 4)
    net = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, max_epochs=9, **QUIET
    )
    trainer.fit(net, data, ckpt_path=resumed)
    weights = [layer.weight.data for layer in (net.body, net.head)]
    return trainer, [(getattr(w, "full_tensor", lambda w=w: w)()[0, 0]).item() for w in weights]


if __name__ == "__main__":
    path = Path(tempfile.mkdtemp(), "plain.ckpt")
    train(3)[0].save_checkpoint(path)
    right = train(4, resumed=path)[1]
    report("lightning", right, train(4, ModelParallelStrategy(1, 1), path)[1])
