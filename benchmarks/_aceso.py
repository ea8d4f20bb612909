"""Aceso (Liu et al. 2024) moves operations, devices and recomputation between stages of a GPT until no bottleneck is left. Its
profiles, its search and its cost model are published. What does its search find from its profiles, and what does ours? Both plans
by its cost model, which is run as it is, and by our estimate.

A plan of either is written as its cost model reads it: of each stage the operations, of each operation members of the tensor axis,
replicas, and whether it is recomputed. Aceso's may differ among stages. Ours are uniform, and recompute by what a module may do by
itself: some operations of a stage's layers, more of its first ones. Its cost model knows neither sums of gradients over replicas
nor an update, so here they take no time; replicas of a stage are on one node. It adds messages to a stage's work; ours arrive while
devices compute.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lightning_piper.search import Block, Work, Workload, best_of
from lightning_piper.search.estimate import virtual_time
from lightning_piper.search.rows import rows_of
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Collectives, Hardware

CASES = {"1_3B": (24, 1, 4), "2_6B": (32, 1, 8), "6_7B": (32, 2, 8), "13B": (40, 4, 8)}  # layers, nodes, devices of each
SAMPLES, MEMORY, SECONDS = 1024, 28000, 200  # of a step; megabytes of a device; that its search may take for a number of stages
LAYER = 13  # operations; one comes before all layers, two behind them
BORDERS = (tuple(range(LAYER)), (0, 2, 8), (0, 8))  # of these: all; projections, attention, rest; attention, rest
MEGA = 2**20
GAP, BUDGET = 0.002, 1000  # of each search

Key = tuple[int, int]  # samples of a microbatch, members of the tensor axis
Config = dict[str, Any]  # a plan as its cost model reads it


class Op(NamedTuple):
    """Microseconds and megabytes, of a device."""

    forward: float
    backward: float
    input: float
    output: float
    weights: float
    saved: float
    reserved_forward: float
    reserved_backward: float


class Choice(NamedTuple):
    """What each layer recomputes: operations from the first to the last, whose outputs but the last one are not kept."""

    first: int
    last: int
    freed: float
    again: float


class Case(NamedTuple):
    """A model on its devices: its profile, names of a layer's operations and of all, and the links in a node and between nodes."""

    repository: Path
    size: str
    profile: dict[tuple[str, Key], Op]
    layer: list[str]
    chain: list[str]
    near: Link
    far: Link

    @property
    def devices(self) -> int:
        _, nodes, each = CASES[self.size]
        return nodes * each


class Plan(NamedTuple):
    """With milliseconds and megabytes by its cost model."""

    time: float
    memory: float
    config: Config


def read(repository: Path, size: str) -> Case:
    folder = repository / "profiler/profiled-time-eurosys"
    profile, names = {}, []
    for path in sorted(folder.glob(f"gpt_{size}_mbs*_tp*_algo0.csv")):
        samples, tensor = map(int, re.findall(r"mbs(\d+)_tp(\d+)", path.name)[0])
        with path.open() as file:
            rows = list(csv.reader(file))[1:]
        names = [row[0] for row in rows]
        profile.update({(row[0], (samples, tensor)): _op(row) for row in rows})
    if not profile:
        sys.exit(f"{folder} has no profiles of GPT {size}; give a copy of microsoft/SuperScaler, branch Aceso")
    layer = names[1 : 1 + LAYER]
    chain = [names[0], *layer * CASES[size][0], *names[1 + LAYER :]]
    return Case(repository, size, profile, layer, chain, *(_link(folder / f"p2p_{where}_node.csv") for where in ("intra", "inter")))


def _op(row: Sequence[str]) -> Op:
    """As its memory counts: the output of a softmax is that of the dropout behind it, of which half is a mask."""
    op = Op(*map(float, row[1:9]))
    return op._replace(saved=op.saved * {"enc-attention-softmax": 0, "enc-attention-dropout": 1.5}.get(row[0], 1))


def _link(path: Path) -> Link:
    """A line through the smallest and the largest message: megabytes, and as many gigabytes a second."""
    with path.open() as file:
        sizes, speeds = ([float(x) for x in row] for row in csv.reader(file))
    low, high = (sizes[k] / speeds[k] / 1e3 for k in (0, -1))
    each = (high - low) / (sizes[-1] - sizes[0])
    return Link(max(low - each * sizes[0], 0), MEGA / each)


def choices(case: Case, key: Key) -> list[Choice]:
    """What layers may recompute, from nothing on: always the next one that frees most for its time."""
    ops = [case.profile[name, key] for name in case.layer]
    every = [Choice(a, b, sum(op.saved for op in ops[a:b]), sum(op.forward for op in ops[a : b + 1]))
             for a in range(LAYER) for b in range(a + 1, LAYER)]  # fmt: skip
    found = [Choice(0, -1, 0, 0)]
    while more := [each for each in every if each.freed > found[-1].freed]:
        last = found[-1]
        found.append(min(more, key=lambda each: ((each.again - last.again) / (each.freed - last.freed), -each.freed)))
    return found


class Model(NamedTuple):
    """The case with so many replicas, so many samples of a microbatch and members of the tensor axis, and the number of each
    layer's choice of what it recomputes. Stages may begin at these operations of a layer."""

    case: Case
    replicas: int
    key: Key
    known: list[Choice]
    chosen: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def stages(self) -> int:
        return self.case.devices // self.replicas // self.key[1]

    def op(self, k: int) -> tuple[Op, bool, bool]:
        """An operation of the chain, whether it is recomputed, and whether it keeps nothing."""
        layer, place = divmod(k - 1, LAYER)
        choice = self.known[self.chosen[layer] if 0 <= layer < len(self.chosen) else 0]
        op = self.case.profile[self.case.chain[k], self.key]
        return op, choice.first <= place <= choice.last, choice.first <= place < choice.last

    @property
    def floor(self) -> float:
        """Milliseconds of a step, if all stages have equal work."""
        work = sum(op.forward * (1 + again) + op.backward for op, again, _ in map(self.op, range(len(self.case.chain)))) / 1e3
        return work / self.stages * (SAMPLES // self.replicas // self.key[0] + self.stages - 1)

    @property
    def edges(self) -> list[int]:
        """Where stages may begin: before and behind all layers, and in each of them; and the end."""
        inside = [1 + LAYER * layer + part for layer in range(len(self.chosen)) for part in self.parts]
        return [0, *inside, 1 + LAYER * len(self.chosen), len(self.case.chain)]

    def workload(self) -> Workload:
        """Of one replica. Other samples are not profiled: more of them take for ever."""
        samples, tensor = self.key
        blocks = []
        for i, j in pairwise(self.edges):
            ops = [self.op(k) for k in range(i, j)]
            forward = sum(op.forward for op, _, _ in ops) / 1e6
            half = sum(op.backward + op.forward * again for op, again, _ in ops) / 2e6
            work = Work(forward, half, half, 0, 0, ops[-1][0].output * MEGA)
            blocks.append(Block(f"{i}", {self.key: work, (2 * samples, tensor): work._replace(forward=1e6)}, {f"{i}": 1}))
        return Workload(tuple(blocks), SAMPLES // self.replicas, least=samples)

    def memory(self, stage: int, i: int, j: int) -> float:
        """Megabytes of a device of this stage, of the operations from i to j: parameters and gradients in float16, those and two
        moments in float32, what is kept of microbatches in flight, one layer's values that are computed again, and buffers."""
        ops = [self.op(k) for k in range(i, j)]
        weights = sum(op.weights for op, _, _ in ops)
        kept = ops[0][0].input + sum(op.saved for op, _, freed in ops if not freed)
        again = max(sum(op.saved for op, _, freed in ops[k : k + LAYER] if freed) for k in range(0, len(ops), LAYER))
        reserved = max(op.reserved_forward for op, _, _ in ops) + max(op.reserved_backward for op, _, _ in ops)
        return 8 * weights + kept * (self.stages - stage) + again + max(reserved, weights)

    def fitting(self, edges: Sequence[int]) -> Model | None:
        """Each stage recomputes as little as fits: its first layers by one more choice than the others."""
        chosen = [0] * len(self.chosen)
        for stage, (i, j) in enumerate(pairwise(edges)):
            own = sorted({(k - 1) // LAYER for k in range(i, j) if 0 < k <= LAYER * len(chosen)})
            own = [layer for layer in own if i <= 1 + LAYER * layer + LAYER // 2 < j]  # that has a layer's middle
            steps = [(layer, n) for n in range(1, len(self.known)) for layer in own]
            while self._replace(chosen=tuple(chosen)).memory(stage, i, j) > MEMORY:
                if not steps:
                    return None
                layer, n = steps.pop(0)
                chosen[layer] = n
        return self._replace(chosen=tuple(chosen))

    def config(self, edges: Sequence[int]) -> Config:
        spans = list(pairwise(edges))
        return {
            "model_name": "gpt", "model_size": self.case.size, "num_layers": CASES[self.case.size][0],
            "global_batch_size": SAMPLES, "micro_batch_size": self.key[0] * self.replicas,
            "num_ops_in_each_stage": [j - i for i, j in spans],
            "model_parallel_size_of_each_op": [[self.key[1]] * (j - i) for i, j in spans],
            "data_parallel_size_of_each_op": [[self.replicas] * (j - i) for i, j in spans],
            "recompute_ops": [[int(self.op(k)[1]) for k in range(i, j)] for i, j in spans],
            "algo_of_each_op": [[0] * (j - i) for i, j in spans],
        }  # fmt: skip


def its(case: Case, config: Config) -> tuple[float, float]:
    """Milliseconds and megabytes of a plan by its own cost model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(config))
        said = _run(case, "aceso_cost_model.py", "--initial-point", path)
    time, memory = (float(re.findall(rf"{what} = ([\d.]+)", said)[0]) for what in ("overall time", "max allocated memory"))
    return time, memory


def _run(case: Case, script: str, *args: object) -> str:
    _, nodes, each = CASES[case.size]
    profiled = f"{case.repository.resolve() / 'profiler/profiled-time-eurosys'}{os.sep}"
    options = ["--profiled-time-path", profiled, "--num-nodes", nodes, "--num-gpus-per-node", each, "--memory-limit", MEMORY, *args]
    command = [sys.executable, script, *map(str, options)]
    return subprocess.run(command, cwd=case.repository / "search", check=True, capture_output=True, text=True).stdout


def ours(case: Case, config: Config) -> float:
    """Milliseconds of a plan in our virtual time: 1F1B, messages while devices compute."""
    columns = ("data_parallel_size_of_each_op", "model_parallel_size_of_each_op", "recompute_ops")
    parts = [list(zip(*each, strict=True)) for each in zip(*(config[name] for name in columns), strict=True)]
    edges = [0, *accumulate(map(len, parts))]
    passes, hops, devices = [], [], 0
    for stage, (i, j) in zip(parts, pairwise(edges), strict=True):
        ops = [(case.profile[case.chain[k], (config["micro_batch_size"] // dp, tp)], again)
               for k, (dp, tp, again) in zip(range(i, j), stage, strict=True)]  # fmt: skip
        forward = sum(op.forward for op, _ in ops) / 1e6
        backward = sum(op.backward + op.forward * again for op, again in ops) / 1e6
        passes.append((forward, backward, 0, 0))
        devices += stage[0][0] * stage[0][1]
        hops.append((case.far if devices % CASES[case.size][2] == 0 else case.near).time(int(ops[-1][0].output * MEGA)))
    rows = rows_of("one_f_one_b", 1, len(passes), SAMPLES // config["micro_batch_size"])
    return 1e3 * float(max(virtual_time(rows, passes, hops[:-1])[0]))


def its_best(case: Case) -> Plan:
    """What its search finds within the time that its authors gave it."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trends", "top_configs", "csv"):
            (Path(folder) / name).mkdir()
        model = ("--model-name", "gpt", "--model-size", case.size, "--global-batch-size", SAMPLES)
        effort = ("--max-num-hops", 7, "--time-budget-total", SECONDS)
        _run(case, "aceso_search.py", *model, *effort, "--log-path", f"{folder}/", "--config-save-path", f"{folder}/")
        (path,) = Path(folder).glob("top_configs/*.json")
        config = json.loads(path.read_text())
        return Plan(*its(case, config), config)


def our_best(case: Case) -> Plan | None:
    """The best plan by its cost model that the search finds, over replicas, microbatches and tensor axes. The search cuts the
    chain, then stages recompute what they must to fit, then it cuts the chain again, as work is now. It may cut anywhere, or only
    in few places of a layer, where its budget goes further. What cannot be better however it is cut is left out."""
    layers, _, each = CASES[case.size]
    keys = {key for _, key in case.profile}
    models = [
        Model(case, 2**k, key, choices(case, key), (0,) * layers, parts)
        for key in keys for k in range(each.bit_length()) if 2**k * key[1] <= each for parts in BORDERS
    ]  # fmt: skip
    best: Plan | None = None
    for first in sorted(models, key=lambda model: model.floor):
        model: Model | None = first
        seen = set()
        while model and model.chosen not in seen and (best is None or model.floor < best.time):
            seen.add(model.chosen)
            edges = _cut(model)
            model = model.fitting(edges)
            if model:
                config = model.config(edges)
                plan = Plan(*its(case, config), config)
                if plan.memory <= MEMORY and (best is None or plan.time < best.time):
                    best = plan
    return best


def published(case: Case) -> float:
    """Milliseconds that its authors say their cost model predicts of the plan that they found."""
    with (case.repository / "results/ref/perf_model_time_large_gpt.csv").open() as file:
        sizes, _, predicted = csv.reader(file)
    return 1e3 * float(dict(zip(sizes, predicted, strict=True))[case.size])


def _cut(model: Model) -> tuple[int, ...]:
    """The first operation of each stage, and the end. Replicas take each other no time, so the search is for one of them, on every
    so manieth device."""
    case, each = model.case, CASES[model.case.size][2]
    free, never = Link(0.0, None), Link(1e9, None)
    links = ((each // model.replicas, case.near), (65536, case.far))
    devices = case.devices // model.replicas
    sums = {2**k: Collectives(never, never, never) for k in range(1, devices.bit_length())}
    hardware = Hardware("V100", 2**40, {}, 1.0, links, free, 0, collectives=sums)
    work, schedules = model.workload(), ("one_f_one_b",)
    found = best_of(work, hardware, devices, schedules=schedules, levels=(0,), gap=GAP, budget=BUDGET, all_devices=True)
    return (0, *(model.edges[cut] for cut in found.best.cuts), len(case.chain))


def described(config: Config) -> str:
    """Of each stage: operations, of them recomputed, replicas x members of the tensor axis."""
    columns = ("recompute_ops", "data_parallel_size_of_each_op", "model_parallel_size_of_each_op")
    stages = []
    for again, replicas, tensor in zip(*(config[name] for name in columns), strict=True):
        ways = sorted({f"{n}x{t}" for n, t in zip(replicas, tensor, strict=True)})
        stages.append(f"{len(again)}-{sum(again)}/{'|'.join(ways)}")
    return f"{config['micro_batch_size']} samples: {' '.join(stages)}"


def compare(repository: Path, size: str) -> None:
    case = read(repository, size)
    print(f"GPT {size} on {case.devices} devices, of each stage: operations - recomputed / replicas x tensor axis")
    print(f"published              {published(case):9.1f} ms")
    for what, found in (("Aceso", its_best(case)), ("search", our_best(case))):
        if found is None:
            print(f"{what:7} nothing fits")
            continue
        estimate = f"{ours(case, found.config):9.1f} ms"
        print(f"{what:7} its cost model {found.time:9.1f} ms {found.memory:8.1f} MB  ours {estimate}  {described(found.config)}")
