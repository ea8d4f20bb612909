"""R3 and the slope of memory: the peaks of devices from their plans.

A device holds its parameters, its part of the optimizer states of Adam (two tensors of the parameters' dtype),
and the values of the step, which include gradients and gathered parameters. The CUDA context and the
fragmentation of memory are not counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

import lightning_piper as piper
from benchmarks.paper.setting import Setting, compiled
from benchmarks.paper.table import show
from lightning_piper.compiler import Compiled
from lightning_piper.simulate import Network
from lightning_piper.simulate.durations import DEFAULT, WorkDurations
from lightning_piper.simulate.engine import run_in_virtual_time
from lightning_piper.simulate.memory import curves

GB = 10**9


class Held(NamedTuple):
    """Bytes on one device.

    Attributes:
        params: The parameters of the device's stages, whole.
        values: The peak of the step's values.
    """

    params: int
    values: int


def held(made: Compiled, devices: range) -> list[Held]:
    """Return the bytes on each of `devices`."""
    trace = run_in_virtual_time(made.dag, made.plans, WorkDurations(made.dag, DEFAULT), Network())
    found = []
    for device in devices:
        params = sum(made.step.params[name].spec.nbytes for name in made.params_on(device))
        found.append(Held(params, max(n for _, n in curves(made.dag, made.plans[device], trace)[0])))
    return found


def total(found: Held, zero: int, replicas: int) -> float:
    """Return the bytes of parameters, optimizer states and values of one device."""
    params = found.params / replicas if zero == 3 else found.params
    return params + 2 * found.params / (replicas if zero else 1) + found.values


class Peak(NamedTuple):
    """The peak of a device as a function of the sequences of a microbatch: `base + each * samples` bytes."""

    base: float
    each: float

    @property
    def first(self) -> tuple[int, int]:
        """The smallest microbatch that does not fit into 40 GB, and into 80 GB."""
        small, large = (max(1, math.floor((n * GB - self.base) / self.each) + 1) for n in (40, 80))
        return small, large


def line(small: float, large: float, sizes: tuple[int, int]) -> Peak:
    """Return the peak through two points. Activations grow in proportion to the samples."""
    each = (large - small) / (sizes[1] - sizes[0])
    return Peak(small - each * sizes[0], each)


def r3(sizes: tuple[int, int] = (4, 8)) -> None:
    """Print the smallest microbatches of the 9B model on PP8 x DP4 that do not fit, for each level of ZeRO.

    "Kept gathered" is a system that does not reshard between the microbatches of a step: a device has whole
    gradients, and with ZeRO-3 also the gathered parameters of all its layers.
    """
    points: dict[int, list[list[Held]]] = {}
    for samples in sizes:
        setting = Setting("9B", 8, 4, samples)
        for zero in (1, 2, 3):
            points.setdefault(zero, []).append(held(compiled(setting, "1F1B", zero), range(setting.ranks)))
    replicas, rows = 4, []
    for name, zero, plan, gathered, paper in (
        ("ZeRO-1", 1, 1, False, "nothing fits"),
        ("ZeRO-2", 2, 2, False, "32"),
        ("ZeRO-2, kept gathered", 2, 1, False, "4"),
        ("ZeRO-3", 3, 3, False, "40"),
        ("ZeRO-3, kept gathered", 3, 1, True, "12"),
    ):
        peaks = [
            line(*(total(p, zero, replicas) + gathered * p.params for p in pair), sizes)
            for pair in zip(*points[plan], strict=True)
        ]
        small, large = (min(peak.first[i] for peak in peaks) for i in (0, 1))
        worst = min(range(len(peaks)), key=lambda i: peaks[i].first)
        base, each = (x / GB for x in peaks[worst])
        rows.append([name, f"rank {worst}: {base:.1f} + {each:.2f} b", small, large, paper])
    show(["9B, PP8 x DP4", "GB at b sequences", "first not in 40 GB", "in 80 GB", "paper"], rows)


class Layers(L.LightningModule):
    """A chain of equal layers, in which parameters are much larger than activations."""

    def __init__(self, layers: int, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            with piper.annotate("LAYER"):
                batch = layer(batch).tanh()
        return batch.mean()


def peaks(zero: int) -> list[float]:
    """Return the peak of a device with 2, 4 and 8 stages, in bytes of a stage. Two replicas have all stages."""
    found = []
    for stages in (2, 4, 8):
        program = [piper.Place(devices=[0, 1]), piper.Replicate(zero=zero)]
        (device,) = held(piper.compile(Layers(stages), torch.zeros(4, 512), program), range(1))
        found.append(total(device, zero, 2) / (device.params / stages))
    return found


def slope() -> None:
    """Print how the peak of a device grows with the number of its stages, in bytes of a stage."""
    published = ("4.00", "", "", "3.06 to 3.61; 2.01 with a window of gathers")
    rows = []
    for zero, paper in enumerate(published):
        two, four, eight = peaks(zero)
        growth = [f"{x:.2f}" for x in ((four - two) / 2, (eight - four) / 4)]
        rows.append([f"ZeRO-{zero}" if zero else "DP", two, four, eight, *growth, paper])
    show(["two replicas", "2 stages", "4", "8", "slope 2 to 4", "4 to 8", "published"], rows)
