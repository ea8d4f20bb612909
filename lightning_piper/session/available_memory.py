"""The memory that a program may use on each device, and the checks that a replica of the whole module, or the
module alone, fits into this memory."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import torch
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import named_tensors
from lightning_piper.processes.world import World
from lightning_piper.search.accounting import needed_by_replicas
from lightning_piper.search.proposal import FRAGMENTATION
from lightning_piper.search.report import size

# Bytes of address space that graphs, communicators and their threads take before the first step.
THREADS = 450 << 20
# Files with the limit of a container's memory, and with the bytes that it uses (cgroup, versions 2 and 1).
_GROUPS = Path("/sys/fs/cgroup")
_CONTAINERS = (
    (_GROUPS / "memory.max", _GROUPS / "memory.current"),
    (_GROUPS / "memory" / "memory.limit_in_bytes", _GROUPS / "memory" / "memory.usage_in_bytes"),
)
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


def lacks_memory(module: nn.Module, world: World) -> str | None:
    """Return which process does not have memory for the module's tensors whose values it does not have, and how
    much it needs; None if all processes have enough. Collective."""
    shares = _shares(world)
    missing = {id(x): x.numel() * x.dtype.itemsize for _, x in named_tensors(module) if x.is_meta}
    for rank, (needed, free) in enumerate(
        world.gather((sum(missing.values()), _free(world.device, *shares)))
    ):
        if needed > free:
            return f"the whole module needs {size(needed)} more memory on rank {rank}, which has {size(free)} free"
    return None


def _shares(world: World) -> tuple[int, int]:
    """Return the number of processes on this machine, and the number of these that are in this container and
    share its limit of memory. Collective."""
    files = [limit.stat() for limit, _ in _CONTAINERS if limit.is_file()]
    container = [(file.st_dev, file.st_ino) for file in files]
    return world.on_this_machine()[1], world.on_this_machine(container)[1]


def _free(device: torch.device, processes: int, contained: int) -> int:
    """Return the bytes that this process may still allocate: of its accelerator, or its share of the host's
    memory that is available. The arguments are as for `_own`."""
    if device.type != "cpu":
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return torch.accelerator.get_memory_info(device)[0] + unused
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    if found is None:  # a system without this file
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    free = [(int(found[1]) << 10) // processes]
    for limit, used in _CONTAINERS:
        most, now = _text(limit), _text(used)
        free += [(int(most) - int(now)) // contained] if most.isdecimal() and now.isdecimal() else []
    return max(min(free), 0)


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def memory_of(module: nn.Module, world: World) -> int:
    """Return the bytes that a program may use on each device. Collective.

    The result is the memory of the smallest device, less the share `SPARED`. The smallest one counts because
    any device may be the fullest.
    """
    own = _own(module, world.device, *_shares(world))
    return min(world.gather(int(own * (1 - SPARED))))


def _own(module: nn.Module, device: torch.device, processes: int, contained: int) -> int:
    """Return the bytes that this process may use: the total memory of its accelerator, or its share of the
    host's memory. The limits of a container (cgroup) and of the address space can make this share smaller.

    Args:
        module: The module. If the address space is limited, the memory of the module's CPU tensors counts as
            available, because the program uses these tensors.
        device: This process's device.
        processes: Number of processes that share the host.
        contained: Number of these that share the limit of this process's container.
    """
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[1]
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes]
    for name, _ in _CONTAINERS:
        text = _text(name)
        found += [int(text) // contained] if text.isdecimal() else []
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
