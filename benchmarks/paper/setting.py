"""The setting of the paper's measurements: nodes of 8 A100, and durations from one measured number.

The number is `FORWARD`, the time of the forward pass of a stage of 1F1B. The time of each pass is the sum of
the times of its operations on an A100 (the longer of arithmetic and memory traffic), times one factor. The
factor is such that the forward pass of a middle stage takes `FORWARD`. Nothing else is calibrated.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import NamedTuple

import torch

from examples.qwen3_moe.model import on_meta
from examples.qwen3_moe.programs import SCHEDULES, program, replicas_inside
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import Order, Recompute, parse
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import PassKey
from lightning_piper.plan.instructions import Run
from lightning_piper.search.costs.analytic_costs import costs_of
from lightning_piper.search.costs.operation_costs import seconds
from lightning_piper.simulate import Hardware, Network
from lightning_piper.simulate.durations import WorkDurations
from lightning_piper.simulate.engine import Trace, run_in_virtual_time

FORWARD = 0.040  # seconds of the forward pass of a stage of 1F1B, as the paper reports
LENGTH = 512  # tokens of a sequence
A100 = Hardware.read("a100-p4d")


class Setting(NamedTuple):
    """A model on a cluster.

    Attributes:
        size: The model, a key of `SIZES`.
        ranks: The number of pipeline ranks. They are on one node.
        replicas: The number of replicas, each on a node of its own.
        samples: The sequences of a microbatch of one replica.
        experts: The number of devices that divide the experts.
        forward: Seconds of the forward pass of a middle stage of 1F1B, the calibration.
    """

    size: str
    ranks: int
    replicas: int
    samples: int
    experts: int = 1
    forward: float = FORWARD

    @property
    def microbatches(self) -> int:
        return 2 * self.ranks

    @property
    def groups(self) -> list[list[int]]:
        return replicas_inside(self.ranks, self.replicas)

    def hardware(self, share: float = 1, alone: float = 1, packed: bool = False) -> Hardware:
        """Return the nodes. Links across nodes reach `share` of their bandwidth, and one exchange alone reaches
        `alone` of this share. Only the first `ranks` GPUs of a node are used, or all of them (`packed`)."""
        (size, inside), (count, across) = A100.links
        port, card = A100.shared
        assert across.bandwidth is not None and card is not None
        across = dataclasses.replace(across, bandwidth=across.bandwidth * share)
        card = card._replace(bandwidth=card.bandwidth * share, single=card.single * share * alone)
        return dataclasses.replace(
            A100, links=((size if packed else self.ranks, inside), (count, across)), shared=(port, card)
        )


@cache
def _captured(size: str, stages: int) -> CapturedStep:
    batch = torch.zeros(1, LENGTH + 1, dtype=torch.long, device="meta")
    return capture(on_meta(size, stages), batch)


def captured(setting: Setting, stages: int) -> CapturedStep:
    """Return the step of a model with `stages` stages, without data. Settings of one model share their traces."""
    samples = setting.replicas * setting.microbatches * setting.samples
    return _captured(setting.size, stages).resized(samples)


@cache
def roofline(setting: Setting, stages: int) -> dict[PassKey, float]:
    """Return the seconds of each pass of a microbatch on an A100 at its full speed."""
    costs = costs_of(captured(setting, stages), setting.samples)
    return {key: seconds(found, A100) for key, found in costs.items()}


def durations(setting: Setting, stages: int, head: bool = False) -> dict[PassKey, float]:
    """Return the seconds of each pass of a microbatch.

    The forward passes of a middle stage of 1F1B take `setting.forward` seconds. With several stages on each rank,
    `stages // setting.ranks` consecutive stages have the layers of one stage of 1F1B.

    Args:
        setting: The setting.
        stages: The number of stages of the captured step.
        head: Whether the output layer and the loss run at the full speed of an A100. They are the last stage
            without its layers.
    """
    times, each = roofline(setting, stages), stages // setting.ranks
    middle = range(setting.ranks // 2 * each, (setting.ranks // 2 + 1) * each)
    regions = captured(setting, stages).at(setting.samples).regions
    full = sum(times[r.index, "F"] for r in regions if r.tags["PP"] in middle)
    made = {key: t * setting.forward / full for key, t in times.items()}
    if head:
        last = regions[-1].index
        layer = max(r.index for r in regions if r.tags["PP"] == stages - 2)
        for kind in ("F", "B", "BI", "BW"):
            extra = times[last, kind] - times.get((layer, kind), 0)
            made[last, kind] -= extra * (setting.forward / full - 1)
    return made


@cache
def compiled(
    setting: Setting,
    schedule: str,
    zero: int = 1,
    stream: str = "alltoall",
    bucket: float = 25,
    overlaps: bool = True,
    saved: str = "all",
) -> Compiled:
    """Compile a program for a setting. The static check of these programs takes longer than the compilation,
    so a test runs it on the tiny model instead.

    Args:
        setting: The setting.
        schedule: A key of `SCHEDULES`.
        zero: The level of ZeRO, 0 to 3.
        stream: The stream of the exchanges of tokens.
        bucket: MB of gradients in one sum.
        overlaps: Whether the passes of an overlap group may overlap. Otherwise they run one after the other.
        saved: The values that forward passes save. "all": all values that the backward passes read. "inputs":
            the inputs of their stages. "min-cut": the values that the partitioner of `torch.compile` chooses.
    """
    directives = program(
        schedule, setting.groups, setting.microbatches, zero, setting.experts, stream, bucket
    )
    if not overlaps:
        directives = [in_turn(each) if isinstance(each, Order) else each for each in directives]
    if saved != "all":
        directives.append(Recompute(keep=1.0 if saved == "min-cut" else None))
    step = captured(setting, SCHEDULES[schedule][1] * setting.ranks)
    return compile_step(step, tuple(parse(directives)), verify=False)


def in_turn(order: Order) -> Order:
    """Return the order in which the passes of each overlap group run one after the other."""
    groups = [group if isinstance(group, list) else [group] for group in order.filters]
    return Order(filters=[one for group in groups for one in group])


def simulated(
    setting: Setting,
    made: Compiled,
    network: Network | None = None,
    head: bool = False,
) -> Trace:
    """Run a step in virtual time, in seconds.

    Args:
        setting: The setting.
        made: The compiled program.
        network: The links (default: the links of the setting's hardware, which exchanges share).
        head: As for `durations`.
    """
    stages = 1 + max(chunk.tags["PP"] for chunk in made.dag.of_type(Chunk))
    times = durations(setting, stages, head)
    # A backward pass that has only one of the two parts is as long as the whole pass.
    table = {
        f"%{c.id}": times.get((c.region, c.kind), times[c.region, c.kind[0]]) for c in made.dag.of_type(Chunk)
    }
    chunks = [i.node for plan in made.plans.values() for i in plan.instructions if isinstance(i, Run)]
    work = WorkDurations(made.dag, table, chunks)
    return run_in_virtual_time(made.dag, made.plans, work, network or setting.hardware().network(made.plans))
