"""Mean average precision of detected boxes, as torchmetrics computes it, in training, validation and test."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.detection import mean_ap

import lightning_piper as piper
from tests.distributed.processes import launch_trainings
from tests.groups import marked
from tests.strategy.fitting import QUIET
from tests.strategy.metric_jobs import PROGRAMS

for package in ("pycocotools", "torchvision"):
    pytest.importorskip(package, reason="torchmetrics computes mean average precision with it")

BATCH, BOXES, CLASSES = 8, 3, 2


class Detector(L.LightningModule):
    """Batch: images [n, 6], boxes [n, 3, 4] as corners, and classes [n, 3]. Each image gets as many boxes as
    are sure enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
            nn.Linear(16, BOXES * (4 + CLASSES)),
        )
        precision = {
            step: mean_ap.MeanAveragePrecision(box_format="cxcywh") for step in ("fit", "validate", "test")
        }
        self.found = nn.ModuleDict(precision)

    def _shared(self, batch: Any, step: str) -> Tensor:
        x, boxes, classes = batch
        with piper.annotate("PP", 0):
            hidden = self.first(x)
        with piper.annotate("PP", 1):
            where, scores = self.second(hidden).unflatten(1, (BOXES, -1)).split((4, CLASSES), -1)
            where = torch.cat((where[..., :2], where[..., 2:].exp()), -1)
            loss = (where - boxes).abs().mean() + nn.functional.cross_entropy(
                scores.flatten(0, 1), classes.flatten()
            )
        sure, chosen = scores.detach().softmax(-1).max(-1)
        taken = sure > 0.55
        found = [
            {"boxes": w[t], "scores": s[t], "labels": c[t]}
            for w, s, c, t in zip(where.detach(), sure, chosen, taken, strict=True)
        ]
        self.found[step].update(
            found, [{"boxes": b, "labels": c} for b, c in zip(boxes, classes, strict=True)]
        )
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._shared(batch, "fit")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._shared(batch, "validate")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._shared(batch, "test")

    def _end(self, step: str) -> None:
        values = self.found[step].compute()
        self.log_dict({f"{step}_{name}": values[name] for name in ("map", "map_50", "mar_10")})
        self.found[step].reset()

    def on_train_epoch_end(self) -> None:
        self._end("fit")

    def on_validation_epoch_end(self) -> None:
        self._end("validate")

    def on_test_epoch_end(self) -> None:
        self._end("test")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def images(count: int, seed: int) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    boxes = torch.stack((x[:, :3].tanh(), x[:, 3:].tanh(), torch.ones(count, 3), torch.ones(count, 3)), -1)
    return list(zip(x, boxes, (x[:, :3] > 0).long(), strict=True))


def run(strategy: Any, devices: int, replicas: int, replica: int, epochs: int = 6) -> dict[str, float]:
    torch.manual_seed(0)
    module = Detector().double()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        **QUIET,
    )

    def loader(count: int, seed: int) -> DataLoader[Any]:
        return DataLoader(images(count, seed)[replica::replicas], batch_size=BATCH // replicas)

    trainer.fit(module, loader(40, 0), loader(16, 1))
    fitted = {name: float(x) for name, x in trainer.callback_metrics.items()}
    trainer.test(module, loader(24, 2), verbose=False)
    return fitted | {name: float(x) for name, x in trainer.callback_metrics.items()}


def work(rank: int, name: str) -> dict[str, float]:
    program, size, replicas = PROGRAMS[name]
    return run(piper.PiperStrategy(program()), size, replicas, rank * replicas // size)


@pytest.mark.parametrize("name", marked(PROGRAMS, ["pp2_dp2"]))
def test_every_process_logs_what_one_device_logs(name, tmp_path):
    alone, fewer = run("auto", 1, 1, 0), run("auto", 1, 1, 0, epochs=5)
    assert len(alone) == 9 and all(0.05 < x < 1 for x in alone.values())
    for found in launch_trainings(PROGRAMS[name][1], work, tmp_path, name):
        assert found == pytest.approx(alone, rel=1e-6) and found != pytest.approx(
            fewer, rel=1e-3
        )  # they are in single precision
