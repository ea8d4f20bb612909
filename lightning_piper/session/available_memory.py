"""The memory that a program may use on each device, and the check that a replica of the whole module fits
into this memory."""

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
from lightning_piper.search.proposal import FRAGMENTATION
from lightning_piper.search.report import size

# Bytes of address space that graphs, communicators and their threads take before the first step.
THREADS = 450 << 20
# Share of the memory that is reserved for what a search does not count: the interpreter, kernels, callbacks.
SPARED = 0.1


class NoRoom(PiperError):
    """Replicas of the whole module do not fit into memory. The message says how much memory a replica
    needs."""


def check_room(compiled: Compiled, module: nn.Module, world: World, states: float) -> None:
    """Check that replicas of a whole step fit into memory. Collective.

    Args:
        compiled: The step of one replica.
        module: The whole module.
        states: Bytes of optimizer state for each byte of parameters that get gradients.

    Raises:
        NoRoom: The replica of some process needs more memory than a process may use.
    """
    memory = memory_of(module, world)
    room = int(memory / (1 + FRAGMENTATION))
    own = needed_by_replicas(compiled, states, world.device.type == "cpu", room)
    needed = max(world.gather(int(own * (1 + FRAGMENTATION))))
    if needed > memory:
        raise NoRoom(
            f"a replica of the whole module needs {size(needed)}, and a process may use {size(memory)}"
            " [PIPER-P002]"
        )


def memory_of(module: nn.Module, world: World) -> int:
    """Return the bytes that a program may use on each device. Collective.

    The result is the memory of the smallest device, less the share `SPARED`. The smallest one counts because
    any device may be the fullest.
    """
    _, processes = world.on_this_machine()
    return min(world.gather(int(_own(module, world.device, processes) * (1 - SPARED))))


def _own(module: nn.Module, device: torch.device, processes: int) -> int:
    """Return the bytes that this process may use: the total memory of its accelerator, or its share of the
    host's memory. The limits of a container (cgroup) and of the address space can make this share smaller.

    Args:
        module: The module. If the address space is limited, the memory of the module's CPU tensors counts as
            available, because the program uses these tensors.
        device: This process's device.
        processes: Number of processes that share the host.
    """
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[1]
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(name).read_text().strip() if Path(name).is_file() else ""
        found += [int(text) // processes] if text.isdecimal() else []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        # Address space that the interpreter and its libraries already take is not available for training.
        # Address space of the module's tensors is.
        pages = (
            int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").is_file() else 0
        )
        own = sum(x.nbytes for x in (*module.parameters(), *module.buffers()) if x.device.type == "cpu")
        found.append(max(limit - pages * os.sysconf("SC_PAGE_SIZE") + own - THREADS, 1))
    return min(found)
