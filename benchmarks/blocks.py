"""Checks that the measured blocks of a step add up to the step.

The ratio is the sum of F and B over all blocks, divided by the time of the whole step, forward and backward,
on one device in eager torch.

    python benchmarks/blocks.py

Whole steps and measurements take turns, and medians count. The benchmark uses one thread and measures process
time, because other work on the machine would stretch a whole step more than a short pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from _gpt import Config, Plain, batch
from torch import Tensor, nn

from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.measurement import measured


class Net(L.LightningModule):
    """A network with a loss over classes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def tower(width: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())))


class Towers(L.LightningModule):
    """Two towers with a loss over the pairs of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = tower(width), tower(width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = F.normalize(self.left(batch[0]), dim=-1), F.normalize(self.right(batch[1]), dim=-1)
        return (1 - (a * b).sum(-1)).mean()


def resnet() -> nn.Module:
    stages = [
        nn.Sequential(Residual(w // 2 if s > 1 else w, w, s), Residual(w, w, 1))
        for w, s in ((32, 1), (64, 2), (128, 2))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    )


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())), nn.Linear(width, 10)
    )


def models(samples: int) -> dict[str, tuple[L.LightningModule, Any]]:
    torch.manual_seed(0)
    c = Config(cut=(3, 3))
    labels = torch.randint(10, (samples * 16,))
    return {
        "GPT": (Plain(c), batch(c, 0, samples)),
        "MLP": (Net(mlp(512)), (torch.randn(samples * 16, 512), labels)),
        "ResNet": (Net(resnet()), (torch.randn(samples, 3, 32, 32), labels[:samples])),
        "two towers": (Towers(512), (torch.randn(samples * 16, 512), torch.randn(samples * 16, 512))),
    }


def whole(module: L.LightningModule, batch: Any) -> Callable[[], None]:
    def step() -> None:
        loss: Any = module.training_step(batch, 0)
        loss.backward()
        module.zero_grad()

    return step


def seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':12} whole step ms   sum of blocks ms   ratio   (of each round: least to most)")
    for name, (module, data) in models(args.samples).items():
        cut = blocks_of(module, data)
        step = whole(module, data)
        step()
        steps, sums = [], []
        for _ in range(args.rounds):
            own = median(seconds(step) for _ in range(5))
            found = measured(module, data, samples=[cut.step.size], cut=cut, clock=time.process_time)
            works = [block.work[cut.step.size, 1] for block in found.blocks]
            steps.append(own)
            sums.append(float(sum(w.forward + w.backward_input + w.backward_weights for w in works)))
        ratios = [a / b for a, b in zip(sums, steps, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(
            f"{name:12} {median(steps) * 1e3:13.2f} {median(sums) * 1e3:18.2f} {median(ratios):7.3f}   "
            f"({spread})",
            flush=True,
        )


if __name__ == "__main__":
    main()
