"""R3 and the slope of memory: the peaks of devices from their plans.

A device holds its parameters, its part of the optimizer states of Adam (two tensors of the parameters' dtype),
and the values of the step, which include gradients and gathered parameters. The CUDA context and the
fragmentation of memory are not counted. R3 also changes two assumptions: the dtype of gradients and states, and
recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

import lightning_piper as piper
from benchmarks.paper.setting import Setting, compiled
from benchmarks.paper.table import show
from lightning_piper.compiler import Compiled
from lightning_piper.simulate import Network
from lightning_piper.simulate.durations import DEFAULT, Number, WorkDurations
from lightning_piper.simulate.engine import run_in_virtual_time
from lightning_piper.simulate.memory import Curve, curves

GB = 10**9


class Held(NamedTuple):
    """Bytes on one device.

    Attributes:
        params: The parameters of the device's stages, whole.
        gradients, gathered: Gradients and gathered parameters at the peak of the step's values.
        growing: All other values at the peak, which grow in proportion to the samples.
    """

    params: int
    gradients: int
    gathered: int
    growing: int


def held(made: Compiled, devices: range) -> list[Held]:
    """Return the bytes on each of `devices`."""
    trace = run_in_virtual_time(made.dag, made.plans, WorkDurations(made.dag, DEFAULT), Network())
    found = []
    for device in devices:
        params = sum(made.step.params[name].spec.nbytes for name in made.params_on(device))
        memory, kinds, _ = curves(made.dag, made.plans[device], trace)
        moment, peak = max(memory, key=lambda point: point[1])
        gradients, gathered = (_at(kinds[kind], moment) for kind in ("gradients", "gathered"))
        found.append(Held(params, gradients, gathered, peak - gradients - gathered))
    return found


def _at(curve: Curve, moment: Number) -> int:
    """Return the value of a curve at a time."""
    return next((n for time, n in reversed(curve) if time <= moment), 0)


def total(found: Held, zero: int, replicas: int, float32: bool = False) -> float:
    """Return the bytes of parameters, optimizer states and values of one device.

    Args:
        found: The bytes of a plan in bfloat16.
        zero: The level of ZeRO.
        replicas: The number of replicas.
        float32: Whether gradients and states are float32, and the optimizer also has float32 parameters.
    """
    params = found.params / replicas if zero == 3 else found.params
    states = (6 if float32 else 2) * found.params / (replicas if zero else 1)
    return params + states + (2 if float32 else 1) * found.gradients + found.gathered + found.growing


def first(base: float, each: float, memory: float) -> int:
    """Return the smallest microbatch that does not fit if `n` sequences need `base + each * n` bytes."""
    return max(1, math.floor((memory - base) / each) + 1)


def r3(samples: int = 16) -> None:
    """Print the smallest microbatches of the 9B model on PP8 x DP4 that do not fit, for each level of ZeRO.

    "Kept gathered" is a system that does not reshard between the microbatches of a step: a device has whole
    gradients, and with ZeRO-3 also the gathered parameters of all its layers.
    """
    setting = Setting("9B", 8, 4, samples)

    def rows() -> Iterator[list[object]]:
        for assumption, float32, recompute in (
            ("as in the paper's scripts", False, False),
            ("float32 gradients and states", True, False),
            ("recomputation", False, True),
        ):
            plans = {
                zero: held(compiled(setting, "1F1B", zero, recompute=recompute), range(setting.ranks))
                for zero in (1, 2, 3)
            }
            for name, zero, plan, gathered, paper in (
                ("ZeRO-1", 1, 1, False, "nothing fits"),
                ("ZeRO-2", 2, 2, False, "32"),
                ("ZeRO-2, kept gathered", 2, 1, False, "4"),
                ("ZeRO-3", 3, 3, False, "40"),
                ("ZeRO-3, kept gathered", 3, 1, True, "12"),
            ):
                lines = [
                    (
                        total(p, zero, setting.replicas, float32) - p.growing + gathered * p.params,
                        p.growing / samples,
                    )
                    for p in plans[plan]
                ]
                limits = [min(first(*each, memory) for each in lines) for memory in (40 * GB, 80 * GB)]
                worst = min(range(len(lines)), key=lambda i: first(*lines[i], 40 * GB))
                base, each = (x / GB for x in lines[worst])
                about = f"rank {worst}: {base:.1f} + {each:.2f} n"
                yield [assumption, name, about, *limits, paper]

    show(["9B, PP8 x DP4", "", "GB of n sequences", "first not in 40 GB", "in 80 GB", "paper"], rows())


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
