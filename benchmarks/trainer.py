"""Compares the seconds of a step under PiperStrategy and under Lightning's DDPStrategy, with replicas on a few
processes.

Fits of both strategies take turns in the same processes, on all cores (free) and with each process on one core
(pinned). Two free processes may share a core: the kernel may put a process that wakes up where the process that wakes
it runs. The processor time of a step also counts on a busy machine.

| kind | what it is | peer |
|---|---|---|
| tiny | two small layers, where a step is all overhead | DDP |
| tiny_eager | the same, but the step reads a tensor's value, so it runs uncaptured | DDP |
| GAN | two optimizers, manual optimization | DDP that looks for unused parameters |
| ResNet | batch norms, whose statistics no replicated graph can have | DDP |
| GPT | the model of the other benchmarks | DDP |
| ZeRO-1, ZeRO-1_eager | the same with shards of AdamW's state, captured and uncaptured | DDP with torch's
ZeroRedundancyOptimizer |

    python benchmarks/trainer.py [--rounds 7] [--steps 60] [--processes 2] [--kind tiny]
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from _gpt import Config, Module, batch
from _launch import is_rank, launch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # Lightning removes the variable after a fit


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TinyEager(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.net(batch[0]).square().mean()
        return loss if loss.item() < 1e3 else loss * 0.5


class Gan(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(
            nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32)
        )
        self.judge = nn.Sequential(
            nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
        )

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


class Gpt(Module):
    """A GPT of six layers, without stages. With `divided`, torch's own optimizer shards its states."""

    def __init__(self, divided: bool = False) -> None:
        super().__init__(Config(cut=(6,), d=128, seq=64, vocab=1024))
        self.divided = divided

    def configure_optimizers(self) -> Any:
        if self.divided:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class GptEager(Gpt):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e3 else loss * 0.5


def vectors(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 32), torch.randn(n, 32)


def images(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 3, 16, 16), torch.randint(10, (n,))


def words(n: int) -> tuple[Tensor, ...]:
    return batch(Config(seq=64, vocab=1024), 0, n)


Data = Callable[[int], tuple[Tensor, ...]]
KINDS: dict[str, tuple[type[L.LightningModule], Data]] = {
    "tiny": (Tiny, vectors),
    "tiny_eager": (TinyEager, vectors),
    "GAN": (Gan, vectors),
    "ResNet": (ResNet, images),
    "GPT": (Gpt, words),
    "ZeRO-1": (Gpt, words),
    "ZeRO-1_eager": (GptEager, words),
}


class Clock(L.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append((time.perf_counter(), time.process_time()))


def loader(make: Data, steps: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(*make(16 * PROCESSES * steps)), batch_size=16)


def pin(cores: Collection[int]) -> None:
    """Let all threads of this process run on these cores only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def fit(kind: str, peer: bool, steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, without the first steps, and the median of its processor time."""
    torch.manual_seed(0)
    module, make = KINDS[kind]
    made = module(divided=True) if peer and kind in ZERO else module()
    clock = Clock()
    L.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=(ddp if peer else ours)(kind),
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[Environment()],
    ).fit(made, loader(make, steps))
    wall, processor = (1e3 * np.diff(clock.seen, axis=0))[5:].T
    return float(np.median(wall)), float(np.median(processor))


class Environment(LightningEnvironment):
    """An environment whose processes have been started already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return int(os.environ["RANK"])


ZERO = ("ZeRO-1", "ZeRO-1_eager")


def ddp(kind: str) -> Any:
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=kind == "GAN")


def ours(kind: str) -> Any:
    every: dict[str, Any] = {"filter": {}, "devices": list(range(PROCESSES))}
    return piper.PiperStrategy([piper.Place(**every), piper.Replicate(**every, shard_optimizer=kind in ZERO)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    given = parser.parse_args()
    kinds = given.kind or list(KINDS)
    if not is_rank():
        for kind in kinds:
            launch(given.processes, f"--rounds={given.rounds}", f"--steps={given.steps}", f"--kind={kind}")
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (kind,) = kinds
    cores = sorted(os.sched_getaffinity(0))
    modes = {"free": cores, "pinned": [cores[int(os.environ["RANK"]) % len(cores)]]}
    found: dict[str, list[list[tuple[float, float]]]] = {mode: [] for mode in modes}
    for _ in range(given.rounds):
        for mode, own in modes.items():
            pin(own)
            found[mode].append([fit(kind, peer, given.steps) for peer in (False, True)])
    for mode, rounds in found.items() if os.environ["RANK"] == "0" else ():
        times = np.array(rounds)  # round, system, wall or processor time
        (own, own_processor), (peer, peer_processor) = np.median(times, axis=0)
        spread = np.quantile(times[..., 0], 0.9, axis=0) / (own, peer)
        low, middle, high = np.quantile(times[:, 0, 0] / times[:, 1, 0], (0, 0.5, 1))
        print(
            f"{kind:13} {mode:7} ratio {middle:.3f} ({low:.3f} to {high:.3f}): PiperStrategy {own:.2f} ms, p90 "
            f"{spread[0]:.2f} of it, processor {own_processor:.2f} ms; peer {peer:.2f} ms, p90 {spread[1]:.2f} of it, "
            f"processor {peer_processor:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
