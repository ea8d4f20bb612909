"""Compares the predicted and the measured time of the programs that a search finds best, next to torch's own
ways to train.

All systems run in processes over gloo. For each model, the search proposes programs from costs that were
measured while all processes worked. The speed of a shared machine varies. So costs are measured again in
several rounds, and in each round the best programs run alone, as in training. The predictions are compared
with these runs by the medians over the rounds.

Then the programs, DDP, FSDP2, Schedule1F1B and DualPipeV live in the same processes and take turns of some
steps, so that disturbances affect all of them. The pipelines of torch use the cuts that are best by the same
costs. All systems are slower in turns, because other systems have used the caches and memory. A step includes
gradients and the optimizer's update.

    python benchmarks/auto.py [--ranks 2] [--steps 16] [--rounds 5] [--programs 5] [--models gpt,moe]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _launch import is_rank, join, launch
from _models import MODELS, Chain
from _systems import Batch, Step, data_parallel, ours, pipeline

import lightning_piper as piper
from lightning_piper.processes.heap import keep_freed_memory
from lightning_piper.processes.world import World
from lightning_piper.search import Candidate, Written, best_of
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.estimate import time_of
from lightning_piper.search.program_writer import write
from lightning_piper.search.report import described
from lightning_piper.search.stage_costs import CostModel
from lightning_piper.session.concurrent_measurement import measured_together
from lightning_piper.simulate.hardware import Hardware

# Number of consecutive steps of a system. The first step does not count, because another system has used the
# caches and memory.
TURN = 3


@dataclasses.dataclass
class System:
    """A system to run.

    Attributes:
        predicted: For our programs, the predicted seconds of a step; None for other systems.
        build: Makes the step.
        candidate: For our programs, the candidate of the search; None for other systems.
        step: The step that `build` made; None while the system is not built.
        executor: The executor of our program; None for other systems.
        again: The predictions from the costs measured in each round.
        alone: For each round, the seconds of a step without other systems.
        seconds: The seconds of each step in turns, on the slowest rank.
    """

    name: str
    predicted: float | None
    build: Callable[[], Any]
    candidate: Candidate | None = None
    step: Step | None = None
    executor: Any = None
    again: list[float] = dataclasses.field(default_factory=list)
    alone: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def proposed(
    chain: Chain, batch: Batch, world: World, programs: int
) -> tuple[list[tuple[Candidate, Written, float]], list[Any], Any]:
    """Return the best programs (candidate, program, predicted seconds), torch's pipelines (name, cuts, number
    of microbatches), and the search space. Collective."""
    torch.manual_seed(0)
    costs = measured_together(chain, batch, world)
    found = world.on_rank_zero(lambda: _searched(chain, batch, world.size, programs, *costs))
    assert found is not None
    return found


def _searched(
    chain: Chain, batch: Batch, ranks: int, programs: int, workload: Workload, hardware: Hardware
) -> Any:
    cut = blocks_of(chain, batch)
    find = partial(best_of, workload, hardware, ranks, "8GiB", all_devices=True)
    found = find()
    chosen: dict[str, tuple[Candidate, Written, float]] = {}
    for row in found.table:
        if max(row.estimate.memory) <= found.space.memory:
            made = write(row.candidate, cut.stages(row.candidate.cuts))
            chosen.setdefault(str(made), (row.candidate, made, float(row.estimate.time)))
    peers = []
    for name, schedule in (("Schedule1F1B", "one_f_one_b"), ("DualPipeV", "dualpipev")):
        try:
            table = find(schedules=(schedule,), levels=(0,), budget=500).table
        except piper.SearchError:
            continue
        whole = [
            row.candidate
            for row in table
            if (lay := row.candidate.layout).ranks == ranks
            and lay.microbatches >= lay.stages
            and not row.candidate.recomputed + row.candidate.offloaded
        ]
        peers += [
            (f"torch {name}, {c.layout.microbatches} microbatches", c.cuts, c.layout.microbatches)
            for c in whole[:2]
        ]
    return list(chosen.values())[:programs], peers, found.space


def compare(name: str, rank: int, world: World, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    chain, batch = MODELS[name]()
    start = time.perf_counter()
    programs, pipelines, space = proposed(chain, batch, world, args.programs)
    if rank == 0:
        print(
            f"\n{name}, {world.size} processes: searched in {time.perf_counter() - start:.1f} s; "
            f"{shown_links(space.hardware)}",
            flush=True,
        )
    systems = [
        System(
            described(c, len(space.workload.blocks)),
            predicted,
            partial(ours, chain, batch, w, rank, world.size),
            c,
        )
        for c, w, predicted in programs
    ]
    systems.append(System("torch DDP", None, partial(data_parallel, chain, batch, rank, world.size, False)))
    systems.append(System("torch FSDP2", None, partial(data_parallel, chain, batch, rank, world.size, True)))
    systems += [
        System(f"{n}, cut {cuts}", None, partial(pipeline, chain, batch, cuts, mb, rank, world.size))
        for n, cuts, mb in pipelines
    ]
    for _ in range(args.rounds):
        workload, hardware = measured_together(chain, batch, world)
        model = CostModel(dataclasses.replace(space, workload=workload, hardware=hardware))
        for system in systems:
            if system.candidate is not None and built(system, rank):
                system.again.append(float(time_of(model, system.candidate)))
                system.alone.append(
                    statistics.median([timed(system) for _ in range(args.steps + TURN)][TURN:])
                )
                system.step = system.executor = None
    ready = [system for system in systems if built(system, rank)]
    turns(ready, args.steps)
    if rank == 0:
        show(ready)


def shown_links(hardware: Hardware) -> str:
    named = {"message": hardware.links[-1][1]}
    named |= {
        f"{kind} of {n}": getattr(links, kind)
        for n, links in hardware.collectives.items()
        for kind in links._fields
    }
    return "; ".join(
        f"{name} {float(x.latency) * 1e6:.0f} us, {float(x.bandwidth) / 1e9:.2f} GB/s"
        for name, x in named.items()
    )


def built(system: System, rank: int) -> bool:
    try:
        made = system.build()
    except piper.PiperError as error:
        if rank == 0:
            print(f"  refused: {system.name}: {' '.join(str(error).split())[:200]}")
        return False
    system.step, system.executor = made if isinstance(made, tuple) else (made, None)
    return True


def timed(system: System) -> float:
    """Return the seconds of a step on the slowest rank. Collective."""
    dist.barrier()
    start = time.perf_counter()
    assert system.step is not None
    system.step()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def turns(systems: list[System], steps: int) -> None:
    for i in range(steps // (TURN - 1) + 1):
        for system in systems[i % len(systems) :] + systems[: i % len(systems)]:
            for k in range(TURN):
                took = timed(system)
                if i and k:
                    system.seconds.append(took)


def show(systems: list[System]) -> None:
    chosen, *others = [s for s in systems if s.predicted is not None]
    peer = min((s for s in systems if s.predicted is None), key=lambda s: s.median)

    def over(other: System) -> float:
        """Return the median ratio of paired steps, because the machine's speed varies."""
        return statistics.median(x / y for x, y in zip(chosen.seconds, other.seconds, strict=True))

    print("  predicted, in rounds  alone (ms)   ratio       (of rounds)   among all     least")
    for s in systems:
        ahead = " " * 58
        if s.predicted is not None:
            again, alone = statistics.median(s.again), statistics.median(s.alone)
            ratios = sorted(x / y for x, y in zip(s.again, s.alone, strict=True))
            ahead = f"{s.predicted * 1e3:9.2f} {again * 1e3:9.2f}  {alone * 1e3:9.2f}  {again / alone:6.3f}"
            ahead += f"  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"  {ahead} {s.median * 1e3:9.2f} {min(s.seconds) * 1e3:9.2f}  {s.name}")
    print(f"  chosen / best of ours {max(1.0, *map(over, others)):.3f}", end="; ")
    print(f"chosen / best of torch's ({peer.name}) {over(peer):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    if not is_rank():
        options = {"steps": args.steps, "rounds": args.rounds, "programs": args.programs}
        shared = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        for name in args.models.split(","):  # separate processes for each model, as in training
            launch(args.ranks, "--models", name, *shared, timeout=1800)
        return
    warnings.filterwarnings("ignore")
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": os.environ["RANK"]}
    rank, size = join()
    keep_freed_memory()  # as PiperStrategy does; it applies to all systems
    world = World(rank, size, torch.device("cpu"))
    compare(args.models, rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
