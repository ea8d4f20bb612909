"""Measures the cost of guards on Python state: checks of guards and tensors before every step, and occasional
traces.

One module has about 500 submodules, like a GPT. The other is the GPT of the examples. For this GPT, the
benchmark also makes the traces that a training of `--steps` steps makes.

    python benchmarks/guards.py [--layers 49] [--steps 1000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import compile_step
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_binding import TensorBinding
from lightning_piper.processes.world import World

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.gpt import CharGPT

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixing = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
        self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixing(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Many(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.pow(2).mean()


def microseconds(call: Callable[[], object], rounds: int = 200) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def captured(module: L.LightningModule, batch: Any) -> tuple[CapturedStep, float]:
    start = time.perf_counter()
    step = capture(module, batch)
    step.at(step.size)
    return step, time.perf_counter() - start


def binding(module: nn.Module, step: CapturedStep) -> TensorBinding:
    """Return the check of tensors for a training of the module in one process."""
    return TensorBinding(module, Ownership(module, compile_step(step, ()), World(0, 1, torch.device("cpu"))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=49)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    gpt = CharGPT()
    text = torch.zeros(32, 128, dtype=torch.long)
    retraced = sum(i & (i - 1) == 0 for i in range(1, given.steps))
    print(
        "module      submodules   guards   always   capture s   hold us   follow us   traced again   "
        "seconds of it"
    )
    for name, module, batch in (
        ("many", Many(given.layers), torch.randn(4, WIDTH)),
        ("gpt", gpt, (text, text)),
    ):
        step, seconds = captured(module, batch)
        start = time.perf_counter()
        for _ in range(retraced if name == "gpt" else 1):
            step.retrace()
        again = time.perf_counter() - start
        assert step.reads.hold()
        guards, follow = step.reads.guards, binding(module, step).follow
        size = f"{len(list(module.modules())):11} {len(guards.by_key):8} {len(guards._always):8}"
        costs = f"{seconds:11.2f} {microseconds(step.reads.hold):9.1f} {microseconds(follow):11.1f}"
        print(f"{name:10} {size} {costs} {retraced if name == 'gpt' else 1:14} {again:15.2f}", flush=True)


if __name__ == "__main__":
    main()
