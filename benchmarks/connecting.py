"""Counts the communicators of a process at the start of a ZeRO-3 pipeline.

It counts how many communicators a process makes, and the longest chain of communicators that are made one
after the other by processes that wait for each other. It starts and times up to 8 processes. For more
processes, it compiles all plans and counts their calls.

    python benchmarks/connecting.py [--real 2 4 8] [--counted 256 1024 4096]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Hashable, Mapping

import torch
import torch.distributed as dist
from _chain import Chain
from _launch import is_rank, join, launch
from plans import zero3

import lightning_piper as piper
from lightning_piper.plan import Plan, Plans
from lightning_piper.runtime import ProcessTransport
from lightning_piper.runtime.process import in_order


def plans_of(size: int, stages: int = 16) -> Plans:
    stages = min(stages, max(1, size // 2))
    replicas = size // stages
    return piper.compile(Chain(stages, 4), torch.randn(4 * replicas, 4), zero3(stages, replicas, 4)).plans


def longest_chain(plans: Mapping[int, Plan]) -> int:
    """Return the length of the longest chain of communicators that are made one after the other.

    A communicator is made when all its members have made their earlier ones.
    """
    queues: dict[int, list[Hashable]] = {}
    members: Counter[Hashable] = Counter()
    for device, plan in plans.items():
        queues[device] = list(in_order(plan))
        members.update(queues[device])
    level, waiting, position = dict.fromkeys(plans, 0), dict[Hashable, list[int]](), dict.fromkeys(plans, 0)
    ready = list(plans)
    while ready:
        device = ready.pop()
        if position[device] < len(queues[device]):
            here = waiting.setdefault(queues[device][position[device]], [])
            here.append(device)
            if len(here) == members[queues[device][position[device]]]:
                done = 1 + max(level[d] for d in here)
                for d in here:
                    level[d], position[d] = done, position[d] + 1
                ready += here
    assert all(position[d] == len(queues[d]) for d in plans), "processes wait for each other"
    return max(level.values())


def real() -> None:
    rank, size = join()
    plans, seconds = plans_of(size), []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        transport = ProcessTransport(plans, range(size), torch.device("cpu"))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        transport.close()
    if rank == 0:
        row(size, plans, f"{1e3 * statistics.median(seconds):.0f} ms")
    dist.destroy_process_group()


def row(size: int, plans: Plans, took: str) -> None:
    made = [len(plan.channels) + len(plan.groups) for plan in plans.values()]
    # If all processes took part in making all communicators, each process would make this many calls.
    before = len({key for plan in plans.values() for key in (*plan.channels, *plan.groups)})
    print(f"| {size} | {max(made)} | {before} | {longest_chain(plans)} | {took} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--counted", type=int, nargs="*", default=[256, 1024, 4096])
    args = parser.parse_args()
    if is_rank():
        real()
        return
    print(
        "| processes | communicators, and calls, of one | calls of one if each makes all | longest chain | "
        "measured |"
    )
    print("|---|---|---|---|---|", flush=True)
    for size in args.real:
        launch(size)
    for size in args.counted:
        row(size, plans_of(size), "")


if __name__ == "__main__":
    main()
