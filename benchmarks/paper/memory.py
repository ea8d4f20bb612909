"""R3 and the slope of memory: the peaks of devices from their plans.

A device holds its parameters, its part of the optimizer states of Adam (two tensors of the parameters' dtype),
and the values of the step, which include gradients and gathered parameters. The CUDA context and the
fragmentation of memory are not counted. R3 changes one assumption at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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


class Assumption(NamedTuple):
    """The assumptions of a row of R3.

    Attributes:
        name: The name of the row.
        saved: The values that forward passes save, as for `compiled`.
        other: The values that forward passes of the other system save.
        float32: As for `total`.
        apart: Whether a device keeps the whole gradients of all microbatches apart until the last one is over.
        memory: GB of a device.
    """

    name: str
    saved: str = "all"
    other: str = "all"
    float32: bool = False
    apart: bool = False
    memory: float = 40

    def limits(
        self, setting: Setting, plans: Mapping[int, list[Held]], each: Mapping[str, list[float]]
    ) -> list[int]:
        """Return the smallest microbatches that do not fit: with ZeRO-1, ZeRO-2, ZeRO-2 of the other system, and
        the same for ZeRO-3.

        Args:
            setting: The setting.
            plans: Level of ZeRO -> the bytes on each device.
            each: Saved values, as for `compiled` -> for each device, the bytes of a sequence.
        """
        found = []
        for zero, plan, other in ((1, 1, False), (2, 2, False), (2, 1, True), (3, 3, False), (3, 1, True)):
            limits = []
            for held, grows in zip(plans[plan], each[self.other if other else self.saved], strict=True):
                base = total(held, zero, setting.replicas, self.float32) - held.growing
                base += held.params if other and zero == 3 else 0
                base += (setting.microbatches - 1) * held.params if self.apart and plan == 1 else 0
                limits.append(first(base, grows, self.memory * GB))
            found.append(min(limits))
        return found


ASSUMPTIONS = (
    Assumption("bfloat16, as in the paper's scripts"),
    Assumption("float32 gradients and states", float32=True),
    Assumption("gradients of all microbatches are kept apart", apart=True),
    Assumption("passes save as little as with `torch.compile`", "min-cut", "min-cut"),
    Assumption("the same, but the other system does not compile", "min-cut"),
    Assumption("the same, and only 28 GB are free", "min-cut", memory=28),
    Assumption("recomputation", "inputs", "inputs"),
)


def r3(samples: int = 16) -> None:
    """Print the smallest microbatches of the 9B model on PP8 x DP4 that do not fit, for each level of ZeRO.

    The other system does not reshard between the microbatches of a step: a device has whole gradients, and with
    ZeRO-3 also the gathered parameters of all its layers.
    """
    setting = Setting("9B", 8, 4, samples)

    def bytes_of(zero: int, saved: str = "all") -> list[Held]:
        return held(compiled(setting, "1F1B", zero, saved=saved), range(setting.ranks))

    def rows() -> Iterator[list[object]]:
        yield ["paper", "", "nothing fits", 32, 4, 40, 12]
        plans = {zero: bytes_of(zero) for zero in (1, 2, 3)}
        # The level of ZeRO changes the bytes of a sequence by less than 2%.
        saved = {"all": plans[1], "min-cut": bytes_of(1, "min-cut"), "inputs": bytes_of(1, "inputs")}
        each = {name: [device.growing / samples for device in devices] for name, devices in saved.items()}
        for row in ASSUMPTIONS:
            yield [row.name, each[row.saved][0] / GB, *row.limits(setting, plans, each)]

    ways = ["ZeRO-1", "ZeRO-2", "ZeRO-2, other system", "ZeRO-3", "ZeRO-3, other system"]
    show(["9B, PP8 x DP4, assumption", "GB a sequence, rank 0", *ways], rows())


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
