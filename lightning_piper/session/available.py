"""Memory that a program may use of each device, and whether replicas fit into it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.search.accounting import needed_by_replicas
from lightning_piper.search.proposing import FRAGMENTATION
from lightning_piper.search.report import size

THREADS = 450 << 20  # bytes of address space that graphs, communicators and their threads will take before the first step
SPARED = 0.1  # share of it that is left to what a search does not know: the interpreter, kernels, other callbacks


class NoRoom(PiperError):
    """Replicas of the whole module do not fit into memory. The message says what they need."""


def check_room(compiled: Compiled, module: nn.Module, world: World, states: float) -> None:
    """Do replicas of a whole step fit? Collective.

    Args:
        states: bytes of the optimizer's state for one of parameters that get gradients.

    Raises:
        NoRoom: in one process they do not.
    """
    memory = memory_of(module, world)
    room = int(memory / (1 + FRAGMENTATION))
    own = needed_by_replicas(compiled, states, world.device.type == "cpu", room)
    needed = max(world.gather(int(own * (1 + FRAGMENTATION))))
    if needed > memory:
        raise NoRoom(f"a replica of the whole module needs {size(needed)}, and a process may use {size(memory)}")


def memory_of(module: nn.Module, world: World) -> int:
    """Bytes that the search may use of each device: of the one that has least, for any of them may be the fullest. Collective."""
    _, processes = world.on_this_machine()
    return min(world.gather(int(_own(module, world.device, processes) * (1 - SPARED))))


def _own(module: nn.Module, device: torch.device, processes: int) -> int:
    """Of this process's device: of an accelerator its own, else what this process may use of the host.

    Args:
        processes: that share the host.
    """
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[1]
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(name).read_text().strip() if Path(name).is_file() else ""
        found += [int(text) // processes] if text.isdecimal() else []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        # Address space that the interpreter and its libraries have taken already is not for training, but the module's is.
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").is_file() else 0
        own = sum(x.nbytes for x in (*module.parameters(), *module.buffers()) if x.device.type == "cpu")
        found.append(max(limit - pages * os.sysconf("SC_PAGE_SIZE") + own - THREADS, 1))
    return min(found)
