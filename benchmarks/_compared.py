"""Compares systems that train the same model.

For times, all systems live in the same processes and take turns step by step, so that disturbances of the
machine affect all of them. For memory, each system has its own processes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from _launch import is_rank, join, launch
from _memory import of_messages, peak_of

Step = Callable[[int], torch.Tensor | None]  # step number -> loss of this rank's data, if the rank has it
Build = Callable[[int, int], Step]  # (rank, number of ranks)
Systems = Mapping[str, tuple[Build, str]]  # name -> function that builds the system, name of its peer
Groups = Mapping[str, tuple[int, Systems]]  # name -> number of processes, systems to compare on them
WARM_UP = 3


def compare_time(systems: Systems, steps: int) -> None:
    """Print a line for each system.

    The line has the median, the quartiles and the smallest time of a step, and the median CPU time of the busiest
    process. It has the ratio to its peer three times: of the medians, as the median over pairs of steps, and of the
    CPU times. CPU times depend less on other work of the machine. The last number is the largest difference of a
    loss from the first system's loss.

    The last rank has the loss.
    """
    rank, world = join()
    built = {name: build(rank, world) for name, (build, _) in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    busy: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for i in range(steps + WARM_UP):
        # The order is random, so that no system always runs after the same system.
        for name in random.Random(i).sample(names, len(names)):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            loss = built[name](i)
            took = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= WARM_UP:
                seconds[name].append(took[0].item())
                busy[name].append(took[1].item())
            losses[name].append(float("nan") if loss is None else loss.item())
    if rank == world - 1:
        median, cpu_of = (
            {name: statistics.median(values) for name, values in times.items()} for times in (seconds, busy)
        )
        print(
            f"{'':34} median ms      quartiles   min ms   CPU ms   to its peer: medians, pairs, CPU   largest relative "
            f"difference of losses to {names[0]}"
        )
        for name, (_, peer) in systems.items():
            ratio = f"{median[name] / median[peer]:14.3f}" if peer else " " * 14
            pairs = (
                f"{statistics.median(a / b for a, b in zip(seconds[name], seconds[peer], strict=True)):8.3f}"
                f"{cpu_of[name] / cpu_of[peer]:8.3f}"
                if peer
                else ""
            )
            low, _, high = statistics.quantiles(seconds[name], n=4)
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[names[0]], strict=True))
            print(
                f"{name:34} {median[name] * 1e3:9.1f} {low * 1e3:7.1f}-{high * 1e3:6.1f} "
                f"{min(seconds[name]) * 1e3:8.1f} {cpu_of[name] * 1e3:8.1f} "
                f"{ratio} {pairs:16}      {worst:.1e}"
            )
        print(
            f"{steps} steps of each, in turns; losses over {steps + WARM_UP} steps; load of the machine "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(name: str, build: Build, note: str = "") -> None:
    """Print the peak bytes of live tensors in a step, including messages."""
    rank, world = join()
    peaks: list[float] = [0.0] * world
    dist.all_gather_object(peaks, peak_of(lambda: build(rank, world)) + of_messages())
    if rank == 0:
        print(
            f"{name:34} peak live tensor MB of a step, by rank: {', '.join(f'{p:.1f}' for p in peaks)}{note}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def run(
    doc: str | None,
    groups: Groups,
    small: Groups | None = None,
    note: Callable[[str, str], str] = lambda group, name: "",
) -> None:
    """Run a script that compares the time and memory of the systems of groups.

    Args:
        doc: The help text of the script.
        groups: The groups.
        small: The groups for the memory comparison, if other sizes show more (default: `groups`).
        note: Returns a remark on the memory of a system of a group.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--group", choices=list(groups), action="append")
    parser.add_argument("--only", choices=["time", "memory"])
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = args.group or list(groups)
    if is_rank():
        if args.memory:
            build, _ = (small or groups)[chosen[0]][1][args.memory]
            measure_memory(args.memory, build, note(chosen[0], args.memory))
        else:
            compare_time(groups[chosen[0]][1], args.steps)
        return
    for group in chosen:
        ranks, systems = groups[group]
        if args.only != "memory":
            launch(ranks, "--steps", str(args.steps), "--group", group)
        for name in systems if args.only != "time" else ():
            launch(ranks, "--group", group, "--memory", name)
