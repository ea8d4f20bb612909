"""Measures the costs of a step's parts while all processes compute. As in training, cores then share caches,
memory and clocks.

If there are more processes than cores, as many processes measure at once as there are cores. In training,
more processes than cores share the cores. How much this costs depends on the schedule, and the estimate of a
program accounts for this cost.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_piper.compiler import compile
from lightning_piper.directives import Place, Replicate
from lightning_piper.processes.world import World, together
from lightning_piper.runtime import Executor, ProcessTransport
from lightning_piper.runtime.collectives import Members
from lightning_piper.runtime.same_machine.shared_memory import messages_of
from lightning_piper.search.costs.blocks import BlockCut
from lightning_piper.search.costs.measurement import measured
from lightning_piper.search.costs.optimizers import ADAM
from lightning_piper.search.costs.parameters import CACHES, Optimizer, wait
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.proposal import CALLS, sizes_of
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Collectives, Hardware

# Bytes of the small and of the large message that measure a link, and number of repetitions.
SMALL, LARGE, ROUNDS = (1 << 10, 1 << 22, 15)
# The largest number of parameters of the step with almost no work. Steps of modules with more parameters have
# far more real work than overhead.
PARAMS = 200
FLOAT = torch.float32  # dtype of the messages, whatever the user's default dtype is
# The largest number of bytes of a measured collective. Modules with fewer bytes of parameters use fewer
# bytes.
MOST = 1 << 26


def measured_together(
    module: nn.Module,
    batch: Any,
    world: World,
    optimizer: Optimizer = torch.optim.AdamW,
    states: float = ADAM,
    cut: BlockCut | None = None,
) -> tuple[Workload, Hardware]:
    """Return the costs of a step, and a description of this machine with its links. Collective.

    Args:
        batch: The batch of one step.
        world: The processes as one replica.
        optimizer: Makes the optimizer whose update is measured.
        states: Bytes of optimizer state for each byte of parameters; 2 for Adam.
        cut: The blocks of the module and the batch; None to find them.

    Raises:
        PiperError: A process, which the error names, cannot measure the step.
    """
    links = _links(world)
    large = min(MOST, max(LARGE, sum(x.nbytes for x in module.parameters()))) // 1024 * 1024
    degrees = (
        [n for n in range(2, world.size + 1) if world.size % n == 0] if world.device.type == "cpu" else []
    )
    collectives = {
        n: Collectives(*(_link_of(world, n, large, each) for each in (_sums, _scatters, _gathers)))
        for n in degrees
    }
    local, neighbors = world.on_this_machine()
    most = max(world.gather(neighbors))
    at_once = min(world.gather(_cores(world, neighbors)))
    step = _step_of(world, min(PARAMS, sum(p.requires_grad for p in module.parameters())))
    workload: Workload | None = None
    failure: Exception | None = None
    for turn in range(0, most, at_once):
        world.gather(None)  # begin together
        if turn <= local < turn + at_once:
            try:
                workload = measured(module, batch, sizes_of(batch), CALLS, states, cut, optimizer=optimizer)
            except Exception as error:  # raised below, after every process has had its turn
                failure = error

    def outcome() -> Workload | None:
        if failure is not None:
            raise failure
        return workload

    found = [each for each in together(world, "measuring the step", outcome) if each is not None]
    slowest = max(
        found, key=lambda each: sum(sum(work[:3]) for block in each.blocks for work in block.work.values())
    )
    hardware = world.on_rank_zero(Hardware.measure)
    assert hardware is not None
    every = at_once * world.size // most  # processes on different machines do not share cores
    return slowest, dataclasses.replace(
        hardware, links=links, collectives=collectives, at_once=every, step=step
    )


class _Least(nn.Module):
    """A step with almost no work and a given number of parameters."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(1, dtype=FLOAT) for _ in range(params))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (batch * torch.cat(list(self.params))).mean()


def _step_of(world: World, params: int) -> float:
    """Return the seconds of a step with almost no work, replicated over all processes. Collective."""
    ranks, batch, module = list(range(world.size)), torch.ones(world.size, 1, dtype=FLOAT), _Least(params)
    program = [
        Place(filter={}, devices=ranks),
        *([Replicate(filter={}, devices=ranks)] if world.size > 1 else []),
    ]
    compiled = compile(module, batch, program, device=world.device.type)
    tensors = {name: p.detach().to(world.device) for name, p in module.named_parameters()}
    transport = ProcessTransport(compiled.plans, ranks=ranks, device=world.device)
    executor = Executor(compiled.plans[world.rank], compiled.step, tensors, {}, transport, world.device)
    leaf, times = batch[:1].to(world.device), list[float]()
    # Writing to these bytes evicts the caches, as the passes of a real step do.
    others = torch.zeros(CACHES, dtype=torch.uint8, device=world.device)
    for _ in range(2 * ROUNDS + 1):
        others.add_(1)
        world.gather(None)
        wait(world.device)
        start = time.perf_counter()
        executor.step([leaf], seed=0)
        wait(world.device)
        times.append(time.perf_counter() - start)
    return max(world.gather(median(times[1:])))


def _cores(world: World, neighbors: int) -> int:
    """Return how many of this machine's processes can compute at once: all processes with an accelerator, or
    as many as the cores allow. `neighbors` is the number of processes on this machine."""
    if world.device.type != "cpu":
        return neighbors
    return max(1, min(neighbors, len(os.sched_getaffinity(0)) // torch.get_num_threads()))


# Takes the members and the bytes to exchange. Returns a function that runs the exchange.
Exchange = Callable[[Members, torch.Tensor], Callable[[], object]]


def _links(world: World) -> tuple[tuple[int, Link], ...]:
    """Measure the link over all processes. If each machine has equally many consecutive processes, at least two, also
    measure the link within a machine. Collective.

    Returns:
        (number of processes, link), as in `Hardware.links`.
    """
    machines = world.gather(platform.node())
    inside = machines.count(machines[0])
    blocks = [machines[i : i + inside] for i in range(0, world.size, inside)]
    equal = all(block == [block[0]] * inside for block in blocks) and len(blocks) == len(set(machines))
    sizes = [inside] if equal and 1 < inside < world.size else []
    return tuple((size, _link_of(world, size, LARGE, _messages)) for size in [*sizes, world.size])


def _link_of(world: World, members: int, large: int, exchange: Exchange) -> Link:
    """Measure the latency and the bandwidth of an exchange within groups of neighboring ranks, with a small
    and a large tensor. All groups measure at once. Collective.

    Args:
        members: Number of ranks in a group.
        large: Bytes of the large tensor.
    """
    first = world.rank - world.rank % members
    group = world.group_of(range(first, first + members))
    own = Members(messages_of(group, world.timeout), list(range(members)), world.rank - first, native=False)
    # a multiple of the number of members, so that all parts have the same length
    sizes = [nbytes // FLOAT.itemsize // members * members for nbytes in (SMALL, large)]
    runs = [(exchange(own, torch.zeros(size, dtype=FLOAT)), list[float]()) for size in sizes]
    for _ in range(ROUNDS + 1):
        for run, times in runs:
            dist.barrier(group=group)
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    small, whole = (median(times[1:]) for _, times in runs)
    found = world.gather((small, whole))
    latency, whole = max(x for x, _ in found), max(x for _, x in found)
    return Link(latency, large / max(whole - latency, whole / 2))


def _messages(members: Members, x: torch.Tensor) -> Callable[[], object]:
    """Return a function in which the first and the last rank of the group send to each other at the same
    time."""
    other = {0: len(members.ranks) - 1, len(members.ranks) - 1: 0}.get(members.own)

    def run() -> None:
        if other is not None:
            messages = members.messages
            for work in [messages.receive(torch.empty_like(x), other), *messages.send(x, [other])]:
                work.wait()

    return run


def _sums(members: Members, x: torch.Tensor) -> Callable[[], object]:
    return lambda: members.add_up(x)[0].wait()


def _scatters(members: Members, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs a reduce-scatter of a tensor."""
    parts = x.chunk(len(members.ranks))
    rooms = [torch.empty_like(part) for part in parts]

    def run() -> None:
        for work in members.exchange(parts, rooms):
            work.wait()
        for i in members.others:
            parts[members.own].add_(rooms[i])

    return run


def _gathers(members: Members, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs an all-gather of a tensor."""
    part = x.chunk(len(members.ranks))[members.own]
    rooms = torch.empty_like(x).chunk(len(members.ranks))

    def run() -> None:
        for work in members.exchange([part] * len(members.ranks), rooms):
            work.wait()
        rooms[members.own].copy_(part)

    return run
