"""Training steps that are not captured, in replicas on two processes: seconds a step of a Trainer under PiperStrategy and under
Lightning's DDPStrategy, which take turns.

A GAN with two optimizers (manual optimisation), a small residual network with batch norm, whose statistics no replicated graph can
have, and a tiny network that asks for a value, where a step is all overhead.

    python benchmarks/uncaptured.py [--rounds 5] [--steps 40]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from _launch import is_rank, launch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        return loss if loss.item() < 1e3 else loss * 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Gan(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32))
        self.judge = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, noise = batch
        maker, judge = self.optimizers()
        for optimizer, parts in ((maker, self.net), (judge, self.judge)):
            self.toggle_optimizer(optimizer)
            made = self.net(noise)
            if parts is self.net:
                loss = F.softplus(-self.judge(made)).mean()
            else:
                loss = F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(made.detach())).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.Adam(self.judge.parameters(), 1e-3)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolve = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.convolve(x))


class ResNet(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            *(Residual(32) for _ in range(6)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


KINDS: dict[str, tuple[type[Tiny], bool]] = {"tiny": (Tiny, False), "GAN": (Gan, False), "ResNet": (ResNet, True)}


class Clock(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append(time.perf_counter())


def data(images: bool, steps: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    n = 32 * steps
    x = torch.randn(n, 3, 16, 16) if images else torch.randn(n, 32)
    return DataLoader(TensorDataset(x, torch.randint(10, (n,)) if images else torch.randn(n, 32)), batch_size=16)


def fit(kind: str, strategy: Any, steps: int) -> float:
    """Median of the seconds a step, without the first ones."""
    torch.manual_seed(0)
    module, images = KINDS[kind]
    clock = Clock()
    L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=[clock], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[Environment()],
    ).fit(module(), data(images, steps))  # fmt: skip
    times = [b - a for a, b in zip(clock.seen, clock.seen[1:], strict=False)]
    return statistics.median(times[5:])


class Environment(LightningEnvironment):
    """The processes are there."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return int(os.environ["RANK"])


def ddp(kind: str) -> Any:
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=kind == "GAN")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kind", choices=list(KINDS))
    given = parser.parse_args()
    kinds = [given.kind] if given.kind else list(KINDS)
    if not is_rank():
        for kind in kinds:
            launch(2, f"--rounds={given.rounds}", f"--steps={given.steps}", f"--kind={kind}")
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"DDP": [], "replicas": []}
    for _ in range(given.rounds):
        found["DDP"].append(fit(kinds[0], ddp(kinds[0]), given.steps))
        found["replicas"].append(fit(kinds[0], piper.PiperStrategy(), given.steps))
    if os.environ["RANK"] == "0":
        medians = {name: statistics.median(times) for name, times in found.items()}
        ratios = sorted(a / b for a, b in zip(found["replicas"], found["DDP"], strict=True))
        shown = ", ".join(f"{name} {1e3 * x:.2f} ms" for name, x in medians.items())
        ratio = medians["replicas"] / medians["DDP"]
        print(f"{kinds[0]:8} {shown}; ratio of medians {ratio:.3f}, of pairs {', '.join(f'{r:.3f}' for r in ratios)}")


if __name__ == "__main__":
    main()
