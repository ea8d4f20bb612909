"""Compares this package's search with Aceso (Liu et al. 2024) on Aceso's published profiles.

Aceso moves operations, devices and recomputation between stages of a GPT until no bottleneck is left. Its
profiles, search and cost model are published. This module runs both searches on the profiles. It reports both
plans by Aceso's own cost model, which runs unchanged, and by this package's estimate.

A plan is written in the format of Aceso's cost model: the operations of each stage, and for each operation
the tensor-parallel degree, the replicas, and whether it is recomputed. Aceso's values may differ among
stages. The plans of this package are uniform, and recompute by module: some operations of a stage's layers,
and more operations of its first layers.

Aceso's cost model has no gradient sums over replicas and no optimizer step, so here they take no time. The
replicas of a stage are on one node. The cost model adds messages to a stage's work, but in our estimate they
overlap computation.
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

# Layers, nodes, devices of each node.
CASES = {"1_3B": (24, 1, 4), "2_6B": (32, 1, 8), "6_7B": (32, 2, 8), "13B": (40, 4, 8)}
# Samples of a step, megabytes of a device, and seconds of Aceso's search for each number of stages.
SAMPLES, MEMORY, SECONDS = 1024, 28000, 200
LAYER = 13  # operations of a layer; one comes before all layers, two after them
# Operations of a layer at which a stage may begin: any; projections, attention, others; attention, others.
BORDERS = (tuple(range(LAYER)), (0, 2, 8), (0, 8))
MEGA = 2**20
GAP, BUDGET = 0.002, 1000  # arguments of `best_of` for each search

Key = tuple[int, int]  # (samples of a microbatch, tensor-parallel degree)
Config = dict[str, Any]  # a plan in the format of Aceso's cost model


class Op(NamedTuple):
    """The costs of one operation on a device, in microseconds and megabytes."""

    forward: float
    backward: float
    input: float
    output: float
    weights: float
    saved: float
    reserved_forward: float
    reserved_backward: float


class Choice(NamedTuple):
    """A choice of the operations of a layer to recompute: from number `first` to number `last`. All their
    outputs except the last one are freed. `freed` is the megabytes freed, and `again` the microseconds of the
    recomputation. With `last` -1, nothing is recomputed.
    """

    first: int
    last: int
    freed: float
    again: float


class Case(NamedTuple):
    """A model on its devices.

    Attributes:
        repository: A copy of Aceso's repository.
        size: The key of the model in `CASES`.
        profile: (operation, key) -> its costs.
        layer: The names of a layer's operations.
        chain: The names of all operations of the model, in order.
        near, far: The links inside a node and between nodes.
    """

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
    """A plan with its milliseconds and megabytes by Aceso's cost model."""

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
        sys.exit(
            f"{folder} has no profiles of GPT {size}; give a copy of microsoft/SuperScaler, branch Aceso"
        )
    layer = names[1 : 1 + LAYER]
    chain = [names[0], *layer * CASES[size][0], *names[1 + LAYER :]]
    return Case(
        repository,
        size,
        profile,
        layer,
        chain,
        *(_link(folder / f"p2p_{where}_node.csv") for where in ("intra", "inter")),
    )


def _op(row: Sequence[str]) -> Op:
    """Parse a row, with Aceso's memory rules: softmax and dropout share an output, and dropout adds a mask of
    half its size.
    """
    op = Op(*map(float, row[1:9]))
    return op._replace(
        saved=op.saved * {"enc-attention-softmax": 0, "enc-attention-dropout": 1.5}.get(row[0], 1)
    )


def _link(path: Path) -> Link:
    """Fit a line through the smallest and the largest message. The file has megabytes, and gigabytes per
    second.
    """
    with path.open() as file:
        sizes, speeds = ([float(x) for x in row] for row in csv.reader(file))
    low, high = (sizes[k] / speeds[k] / 1e3 for k in (0, -1))
    each = (high - low) / (sizes[-1] - sizes[0])
    return Link(max(low - each * sizes[0], 0), MEGA / each)


def choices(case: Case, key: Key) -> list[Choice]:
    """Return recomputation choices of a layer that free more and more memory. The first choice recomputes
    nothing. Each next choice costs the least additional time for each additional megabyte.
    """
    ops = [case.profile[name, key] for name in case.layer]
    every = [Choice(a, b, sum(op.saved for op in ops[a:b]), sum(op.forward for op in ops[a : b + 1]))
             for a in range(LAYER) for b in range(a + 1, LAYER)]  # fmt: skip
    found = [Choice(0, -1, 0, 0)]
    while more := [each for each in every if each.freed > found[-1].freed]:
        last = found[-1]
        found.append(
            min(more, key=lambda each: ((each.again - last.again) / (each.freed - last.freed), -each.freed))
        )
    return found


class Model(NamedTuple):
    """A case with a number of replicas, samples of a microbatch and a tensor-parallel degree (`key`).

    `known` has the recomputation choices of a layer, and `chosen` the index of each layer's choice. `parts`
    are the operations of a layer at which stages may begin.
    """

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
        """Return an operation of the chain, whether it is recomputed, and whether its output is freed."""
        layer, place = divmod(k - 1, LAYER)
        choice = self.known[self.chosen[layer] if 0 <= layer < len(self.chosen) else 0]
        op = self.case.profile[self.case.chain[k], self.key]
        return op, choice.first <= place <= choice.last, choice.first <= place < choice.last

    @property
    def floor(self) -> float:
        """The milliseconds of a step if all stages have equal work."""
        work = (
            sum(
                op.forward * (1 + again) + op.backward
                for op, again, _ in map(self.op, range(len(self.case.chain)))
            )
            / 1e3
        )
        return work / self.stages * (SAMPLES // self.replicas // self.key[0] + self.stages - 1)

    @property
    def edges(self) -> list[int]:
        """The operations at which stages may begin: before and after all layers, and in each layer; and the
        end.
        """
        inside = [1 + LAYER * layer + part for layer in range(len(self.chosen)) for part in self.parts]
        return [0, *inside, 1 + LAYER * len(self.chosen), len(self.case.chain)]

    def workload(self) -> Workload:
        """Return the workload of one replica. Other numbers of samples are not profiled, so they get a huge
        time.
        """
        samples, tensor = self.key
        blocks = []
        for i, j in pairwise(self.edges):
            ops = [self.op(k) for k in range(i, j)]
            forward = sum(op.forward for op, _, _ in ops) / 1e6
            half = sum(op.backward + op.forward * again for op, again, _ in ops) / 2e6
            work = Work(forward, half, half, 0, 0, ops[-1][0].output * MEGA)
            blocks.append(
                Block(
                    f"{i}", {self.key: work, (2 * samples, tensor): work._replace(forward=1e6)}, {f"{i}": 1}
                )
            )
        return Workload(tuple(blocks), SAMPLES // self.replicas, least=samples)

    def memory(self, stage: int, i: int, j: int) -> float:
        """Return the megabytes of a device of this stage for the operations from i to j.

        They are the parameters and gradients in float16, the same and two moments in float32, saved values of
        microbatches in flight, one layer's recomputed values, and buffers.
        """
        ops = [self.op(k) for k in range(i, j)]
        weights = sum(op.weights for op, _, _ in ops)
        kept = ops[0][0].input + sum(op.saved for op, _, freed in ops if not freed)
        again = max(
            sum(op.saved for op, _, freed in ops[k : k + LAYER] if freed) for k in range(0, len(ops), LAYER)
        )
        reserved = max(op.reserved_forward for op, _, _ in ops) + max(
            op.reserved_backward for op, _, _ in ops
        )
        return 8 * weights + kept * (self.stages - stage) + again + max(reserved, weights)

    def fitting(self, edges: Sequence[int]) -> Model | None:
        """Return the model with the least recomputation with which each stage fits into memory; None if a
        stage does not fit with the last choice in all its layers. The first layers of a stage may use the
        next choice after the choice of its other layers.
        """
        chosen = [0] * len(self.chosen)
        for stage, (i, j) in enumerate(pairwise(edges)):
            own = sorted({(k - 1) // LAYER for k in range(i, j) if 0 < k <= LAYER * len(chosen)})
            # A stage owns a layer if it has the layer's middle.
            own = [layer for layer in own if i <= 1 + LAYER * layer + LAYER // 2 < j]
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
    """Return the milliseconds and megabytes of a plan by Aceso's cost model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(config))
        said = _run(case, "aceso_cost_model.py", "--initial-point", path)
    time, memory = (
        float(re.findall(rf"{what} = ([\d.]+)", said)[0]) for what in ("overall time", "max allocated memory")
    )
    return time, memory


def _run(case: Case, script: str, *args: object) -> str:
    _, nodes, each = CASES[case.size]
    profiled = f"{case.repository.resolve() / 'profiler/profiled-time-eurosys'}{os.sep}"
    options = [
        "--profiled-time-path",
        profiled,
        "--num-nodes",
        nodes,
        "--num-gpus-per-node",
        each,
        "--memory-limit",
        MEMORY,
        *args,
    ]
    command = [sys.executable, script, *map(str, options)]
    return subprocess.run(
        command, cwd=case.repository / "search", check=True, capture_output=True, text=True
    ).stdout


def ours(case: Case, config: Config) -> float:
    """Return the milliseconds of a plan in our virtual time: 1F1B, with messages that overlap computation."""
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
        hops.append(
            (case.far if devices % CASES[case.size][2] == 0 else case.near).time(
                int(ops[-1][0].output * MEGA)
            )
        )
    rows = rows_of("one_f_one_b", 1, len(passes), SAMPLES // config["micro_batch_size"])
    return 1e3 * float(max(virtual_time(rows, passes, hops[:-1])[0]))


def its_best(case: Case) -> Plan:
    """Return the plan that Aceso's search finds within the time limit of its authors."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trends", "top_configs", "csv"):
            (Path(folder) / name).mkdir()
        model = ("--model-name", "gpt", "--model-size", case.size, "--global-batch-size", SAMPLES)
        effort = ("--max-num-hops", 7, "--time-budget-total", SECONDS)
        _run(
            case,
            "aceso_search.py",
            *model,
            *effort,
            "--log-path",
            f"{folder}/",
            "--config-save-path",
            f"{folder}/",
        )
        (path,) = Path(folder).glob("top_configs/*.json")
        config = json.loads(path.read_text())
        return Plan(*its(case, config), config)


def our_best(case: Case) -> Plan | None:
    """Return the best plan by Aceso's cost model that our search finds, over replicas, microbatches and
    tensor-parallel degrees.

    The search cuts the chain into stages. Then stages recompute as much as they need to fit, and the search
    cuts the chain again with the new work. This is done with cuts anywhere, and with cuts only at few
    operations of a layer, because the same budget then covers more of the possible cuts. Settings that cannot
    be better with any cut are skipped. None if no plan fits into memory.
    """
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
    """Return the milliseconds that Aceso's authors publish for their plan by their cost model."""
    with (case.repository / "results/ref/perf_model_time_large_gpt.csv").open() as file:
        sizes, _, predicted = csv.reader(file)
    return 1e3 * float(dict(zip(sizes, predicted, strict=True))[case.size])


def _cut(model: Model) -> tuple[int, ...]:
    """Return the first operation of each stage, and the end.

    Replicas cost no time here, so the search cuts one replica, with the devices divided by the number of
    replicas.
    """
    case, each = model.case, CASES[model.case.size][2]
    free, never = Link(0.0, None), Link(1e9, None)
    links = ((each // model.replicas, case.near), (65536, case.far))
    devices = case.devices // model.replicas
    sums = {2**k: Collectives(never, never, never) for k in range(1, devices.bit_length())}
    hardware = Hardware("V100", 2**40, {}, 1.0, links, free, 0, collectives=sums)
    work, schedules = model.workload(), ("one_f_one_b",)
    found = best_of(
        work, hardware, devices, schedules=schedules, levels=(0,), gap=GAP, budget=BUDGET, all_devices=True
    )
    return (0, *(model.edges[cut] for cut in found.best.cuts), len(case.chain))


def described(config: Config) -> str:
    """Describe a plan: for each stage the operations, the recomputed ones, and replicas x tensor-parallel
    degree.
    """
    columns = ("recompute_ops", "data_parallel_size_of_each_op", "model_parallel_size_of_each_op")
    stages = []
    for again, replicas, tensor in zip(*(config[name] for name in columns), strict=True):
        ways = sorted({f"{n}x{t}" for n, t in zip(replicas, tensor, strict=True)})
        stages.append(f"{len(again)}-{sum(again)}/{'|'.join(ways)}")
    return f"{config['micro_batch_size']} samples: {' '.join(stages)}"


def compare(repository: Path, size: str) -> None:
    case = read(repository, size)
    print(
        f"GPT {size} on {case.devices} devices, of each stage: operations - recomputed / replicas x tensor "
        "axis"
    )
    print(f"published              {published(case):9.1f} ms")
    for what, found in (("Aceso", its_best(case)), ("search", our_best(case))):
        if found is None:
            print(f"{what:7} nothing fits")
            continue
        estimate = f"{ours(case, found.config):9.1f} ms"
        print(
            f"{what:7} its cost model {found.time:9.1f} ms {found.memory:8.1f} MB  ours {estimate}  "
            f"{described(found.config)}"
        )
