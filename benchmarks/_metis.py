"""Compares this package's search with Metis (Um et al. 2024) on Metis's published profiles.

Metis ranks uniform plans of a GPT on 8 devices by replicas, stages, tensor-parallel degree and samples of a
microbatch. Its profiles and ranking are published. This module evaluates these plans by a reimplementation of
Metis's formula and by this package's estimate. Then it does the same with the best plans of this package's
search.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lightning_piper.search import Block, Candidate, Layout, Work, Workload, best_of
from lightning_piper.search.estimate import memory_of, time_of
from lightning_piper.search.stage_costs import CostModel
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Hardware

GIGA = 2**20 * 1000  # Metis's unit of bandwidth: 2**20 bytes per millisecond.
INSIDE, BETWEEN = 46, 10  # bandwidth inside a node of four devices, and between nodes
SEQUENCE, WIDTH = 1024, 4096  # sequence length and features of the GPT
MEMORY, SAMPLES, DEVICES = 80 * 2**30, 128, 8


class Plan(NamedTuple):
    """A uniform plan: the numbers of replicas and samples of a microbatch, the tensor-parallel degree
    (`tensor`), and the first layer of each stage except the first stage (`cuts`)."""

    replicas: int
    tensor: int
    samples: int
    cuts: tuple[int, ...]


class Profile(NamedTuple):
    """The profile of Metis.

    Attributes:
        times: Milliseconds of each layer, by (tensor-parallel degree, samples).
        memory: Megabytes of each layer, by (tensor-parallel degree, samples).
        between: Milliseconds between forward and backward pass, by (tensor-parallel degree, samples).
        params: The bytes of each layer's parameters.
        update: The milliseconds of the optimizer step.
        batch: The milliseconds to make a batch.
    """

    times: dict[tuple[int, int], list[float]]
    memory: dict[tuple[int, int], list[float]]
    between: dict[tuple[int, int], float]
    params: list[int]
    update: float
    batch: float


def read(folder: Path) -> Profile:
    times, memory, between = {}, {}, {}
    model: dict[str, Any] = {}
    for path in sorted(folder.glob("DeviceType.A100_*.json")):
        tensor, samples = map(int, re.findall(r"tp(\d+)_bs(\d+)", path.name)[0])
        content = json.loads(path.read_text())
        times[tensor, samples] = content["execution_time"]["layer_compute_total_ms"]
        memory[tensor, samples] = content["execution_memory"]["layer_memory_total_mb"]
        between[tensor, samples] = content["execution_time"]["forward_backward_time_ms"] - sum(
            times[tensor, samples]
        )
        if (tensor, samples) == (1, 1):
            model = content
    taken = model["execution_time"]
    return Profile(times, memory, between, model["model"]["parameters"]["parameters_per_layer_bytes"],
                   2 * taken["optimizer_time_ms"], taken["batch_generator_time_ms"])  # fmt: skip


def published(text: str) -> list[tuple[Plan, float]]:
    """Return the plans of Metis's published ranking, each with its milliseconds. A row has a rank, replicas,
    stages, tensor-parallel degree, samples of a microbatch, all samples, and milliseconds.
    """
    rows = re.findall(r"^\d+,(\d+),(\d+),(\d+),(\d+),\d+,([\d.]+)", text, re.MULTILINE)
    return [(Plan(int(r), int(t), int(b), even(int(p))), float(cost)) for r, p, t, b, cost in rows]


def even(stages: int, layers: int = 10) -> tuple[int, ...]:
    """Return Metis's cuts: the first and last layer are extra, and the stages from the second on get the
    remainder.
    """
    each, more = divmod(layers - 2, stages)
    counts = [each + (0 < s <= more) + (s == 0) + (s == stages - 1) for s in range(stages)]
    return tuple(sum(counts[:s]) for s in range(1, stages))


def cost(profile: Profile, plan: Plan) -> float:
    """Return the milliseconds by Metis's formula.

    It adds a pipeline of the slowest stage's microbatches, the time between passes, the optimizer step, the
    sum of the largest stage's gradients over the slowest link, messages, and making batches.
    """
    key, edges = (plan.tensor, plan.samples), (0, *plan.cuts, 10)
    spans = list(pairwise(edges))
    stages = [sum(profile.times[key][i:j]) for i, j in spans]
    microbatches = SAMPLES // plan.samples // plan.replicas
    link = (INSIDE if plan.replicas * plan.tensor <= 4 else BETWEEN) * 2**20
    largest = max(sum(profile.params[i:j]) / plan.tensor for i, j in spans)
    summed = 2 * (plan.replicas - 1) / plan.replicas * largest / link
    size = plan.samples * SEQUENCE * WIDTH / 2**20
    group = plan.replicas * plan.tensor
    sent = sum(
        size / (INSIDE if (s + 2) * group <= 4 or s * group // 4 == ((s + 2) * group - 1) // 4 else BETWEEN)
        for s in range(len(plan.cuts))
    )
    return (
        (microbatches - 1) * max(stages)
        + sum(stages)
        + profile.between[key] * microbatches
        + profile.update / len(stages) / plan.tensor
        + summed
        + sent
        + profile.batch * microbatches
    )


def workload(profile: Profile) -> Workload:
    """Return Metis's layers as a workload.

    A forward pass is a third of both passes. Memory that does not grow with samples belongs to parameters.
    The time between the passes is work of the last layer.
    """
    degrees = sorted({t for t, _ in profile.times})
    blocks, static = [], 0.0
    for k, size in enumerate(profile.params):
        work = {}
        for t in degrees:
            saved = max((profile.memory[t, 2][k] - profile.memory[t, 1][k]) * 2**20, 0)
            for (tensor, n), times in profile.times.items():
                if tensor == t:
                    third = (times[k] + (profile.between[t, n] if k == 9 else 0)) / 3e3
                    work[n, t] = Work(third, third, third, saved * n, 0, n * SEQUENCE * WIDTH)
            if t == 1:
                static += profile.memory[1, 1][k] * 2**20 - saved
        name = f"layer {k}"
        blocks.append(Block(name, work, {name: size}, frozenset({name})))
    return Workload(tuple(blocks), SAMPLES, max(static / sum(profile.params) - 2, 0))


def compare(folder: Path) -> None:
    profile = read(folder / "profile_data_samples")
    links = ((4, Link(0.0, INSIDE * GIGA)), (8, Link(0.0, BETWEEN * GIGA)))
    hardware = Hardware("A100", MEMORY, {}, 1.0, links, Link(0.0, None), 0)
    found = best_of(
        workload(profile), hardware, DEVICES, schedules=("one_f_one_b",), levels=(0,), all_devices=True
    )
    model = CostModel(found.space)

    def show(what: str, plan: Plan, theirs: float | None) -> None:
        stages = len(plan.cuts) + 1
        layout = Layout(
            "one_f_one_b",
            1,
            stages,
            plan.replicas,
            plan.tensor,
            1,
            SAMPLES // plan.replicas // plan.samples,
            True,
        )
        layout = layout if layout in set(found.space.layouts()) else layout._replace(schedule="gpipe")
        candidate = Candidate(layout, (0,) * layout.stages, 0, 0, plan.cuts)
        formula = (
            f"{cost(profile, plan):9.1f}" if (plan.tensor, plan.samples) in profile.times else "not profiled"
        )
        time = float(time_of(model, candidate)) * 1e3
        need = float(max(memory_of(model, candidate)[0])) / 2**30
        print(
            f"{what:10} {plan!s:62} published {theirs or 0:9.1f}  its formula {formula:>12}  ours "
            f"{time:9.1f} ms {need:6.1f} GiB"
        )

    for plan, theirs in published((folder / "results/homo_cost_model").read_text()):
        show("Metis", plan, theirs)
    for row in found.table[:6]:
        layout = row.candidate.layout
        if not row.reason.startswith("memory"):
            samples = SAMPLES // layout.replicas // layout.microbatches
            show("search", Plan(layout.replicas, layout.tensor, samples, row.candidate.cuts), None)
    print(f"proved to within {float(found.gap):.1%}")
