"""Predicted against measured: the programs that a search finds best, run in two processes over gloo.

For each model the search proposes programs from costs measured in one process and a link measured between two. Each is trained for
some steps, in turns, and the median time of its plan (without the optimizer's update) is compared with the predicted one.

    python benchmarks/auto.py [--steps 12] [--programs 5] [--models gpt,mlp]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from _gpt import Config, Module, batch
from _launch import is_rank, join, launch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_piper as piper
from lightning_piper.directives import Directive
from lightning_piper.processes.world import World
from lightning_piper.search import Written, best_of
from lightning_piper.search.blocks import blocks_of
from lightning_piper.search.report import described
from lightning_piper.search.writing import write
from lightning_piper.session.choosing import measured_together
from lightning_piper.simulate.hardware import Hardware
from lightning_piper.strategy.fit import Fit

SAMPLES = 16
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Stack(L.LightningModule):
    """Layers of different sizes, and a head."""

    def __init__(self, first: nn.Module, layers: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = first, nn.ModuleList(layers), last

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.last(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.gelu(self.one(F.gelu(x))))


def gpt() -> tuple[L.LightningModule, Any]:
    return Module(Config()), batch(Config(), 0, SAMPLES)


def mlp() -> tuple[L.LightningModule, Any]:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]
    module = Stack(nn.Linear(256, 1024), layers, nn.Linear(1024, 10))
    return module, (torch.randn(512, 256), torch.randint(0, 10, (512,)))


def resnet() -> tuple[L.LightningModule, Any]:
    first, last = nn.Conv2d(3, 32, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    module = Stack(first, [Residual(32) for _ in range(6)], last)
    return module, (torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,)))


def uneven() -> tuple[L.LightningModule, Any]:
    """A table of words that is larger than all the rest."""
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    module = Stack(nn.EmbeddingBag(60000, 256), layers, nn.Linear(256, 100))
    return module, (torch.randint(0, 60000, (256, 32)), torch.randint(0, 100, (256,)))


MODELS: dict[str, Callable[[], tuple[L.LightningModule, Any]]] = {"gpt": gpt, "mlp": mlp, "resnet": resnet, "uneven": uneven}


class Same(Dataset[Any]):
    """The same batch again and again, or a replica's part of it."""

    def __init__(self, leaves: Any, steps: int) -> None:
        self.leaves, self.steps = leaves, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, i: int) -> Any:
        return tuple(self.leaves)


def seconds(make: Callable[[], tuple[L.LightningModule, Any]], written: Written, rank: int, steps: int) -> float:
    """Median time of a step's plan in this process."""
    torch.manual_seed(0)
    module, leaves = make()
    written.annotate(module)
    if written.replicas > 1:
        part = leaves[0].shape[0] // written.replicas
        leaves = [x[rank * part : (rank + 1) * part] for x in leaves]
    times: list[float] = []
    original = Fit.step

    def timed(self: Fit, *args: Any, **options: Any) -> Any:
        torch.distributed.barrier()
        start = time.perf_counter()
        result = original(self, *args, **options)
        times.append(time.perf_counter() - start)
        return result

    Fit.step = timed  # type: ignore[method-assign]
    try:
        strategy = piper.PiperStrategy(list[Directive](written.directives))
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, **QUIET)
        trainer.fit(module, DataLoader(Same(leaves, steps), batch_size=None))
    finally:
        Fit.step = original  # type: ignore[method-assign]
    return statistics.median(times[3:])


def compare(name: str, rank: int, world: World, steps: int, programs: int) -> None:
    make = MODELS[name]
    torch.manual_seed(0)
    module, leaves = make()
    workload, link = measured_together(module, leaves, world)

    def find() -> list[tuple[Written, float, str]]:
        cut = blocks_of(module, leaves)
        hardware = dataclasses.replace(Hardware.measure(), links=((2, link),))
        found = best_of(workload, hardware, 2, "8GiB", all_devices=True)
        rows = [row for row in found.table if max(row.estimate.memory) <= found.space.memory and row.candidate.layout.tensor == 1]
        chosen: dict[str, tuple[Written, float, str]] = {}
        for row in rows:
            made = write(row.candidate, cut.stages(row.candidate.cuts))
            chosen.setdefault(str(made), (made, float(row.estimate.time), described(row.candidate)))
        return list(chosen.values())[:programs]

    found = world.on_rank_zero(find)
    assert found is not None
    if rank == 0:
        print(f"{name}: link {float(link.latency) * 1e6:.0f} us, {float(link.bandwidth or 0) / 1e9:.2f} GB/s", flush=True)
    for written, predicted, what in found:
        try:
            own = seconds(make, written, rank, steps)
        except piper.PiperError as error:
            own = float("nan")
            what = f"{what}: {str(error)[:100]}"
        slowest = max(world.gather(own))
        if rank == 0:
            print(
                f"  {predicted * 1e3:8.2f} ms predicted {slowest * 1e3:8.2f} measured {predicted / slowest:6.3f}  {what}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--programs", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    if not is_rank():
        launch(2, "--steps", str(args.steps), "--programs", str(args.programs), "--models", args.models)
        return
    warnings.filterwarnings("ignore")
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": os.environ["RANK"]}
    rank, size = join()
    world = World(rank, size, torch.device("cpu"))
    for name in args.models.split(","):
        compare(name, rank, world, args.steps, args.programs)


if __name__ == "__main__":
    main()
