"""What `PiperStrategy("auto")` does at the first batch of a fit: rank 0 searches a program, and all processes take it over."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_piper.capture import flatten
from lightning_piper.directives import Directive, parse
from lightning_piper.errors import CaptureError, PiperError
from lightning_piper.processes.joining import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.search.measuring import measured
from lightning_piper.search.proposing import CALLS, Proposal, search, sizes_of
from lightning_piper.search.report import described, size
from lightning_piper.search.workload import Workload
from lightning_piper.search.writing import TAG, Written
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Hardware

CACHE = "XDG_CACHE_HOME"  # names the folder in which the folder of this package is; ~/.cache if it is not set
MESSAGE, ROUNDS = 1 << 22, 5  # bytes, and how often they are sent to and fro, to measure a link
SPARED = (
    0.1  # share of a device's memory that the search leaves to what it does not know: the interpreter, kernels, other callbacks
)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why in some lines."""

    written: Written
    lines: tuple[str, ...]


def choose(module: nn.Module, batch: Any, world: World, alone: World, say: Callable[[str], None]) -> Choice | None:
    """The program for a fit; None where there can be data parallelism alone: the step cannot be captured, or batches of several
    processes are not one. Collective.

    Args:
        module: whole, in every process.
        batch: this process's first one.
        world: the processes, each of which draws data of its own.
        alone: the same as one replica.
        say: tells the user what was chosen.

    Raises:
        SearchError: nothing fits: says the least memory that would do.
    """
    try:
        every = BatchJoin(alone).joined(batch)
    except PiperError:
        return None

    memory = _memory(module, world)
    path = _file(module, every, world, memory)
    found = world.on_rank_zero(lambda: _read(path))
    if found is None:
        try:
            costs = measured_together(module, every, alone)
        except CaptureError:
            return None  # whoever runs the step says why; it is alike in all processes
        found = world.on_rank_zero(lambda: _searched(module, every, world.size, memory, *costs))
        assert found is not None
        if world.is_rank_zero:
            _write(path, found)
    say("\n".join(found.lines))
    return found


def measured_together(module: nn.Module, batch: Any, world: World) -> tuple[Workload, Link]:
    """What a step's blocks cost, and a message, while all processes are at work, as they are in training: cores share caches,
    memory and clocks. Of the slowest process. Collective.

    Args:
        world: as one replica.
    """
    link = _link(world)
    world.gather(None)  # begin together
    workload = measured(module, batch, sizes_of(batch), CALLS)
    found = world.gather(workload)
    return max(found, key=lambda each: sum(sum(work[:3]) for block in each.blocks for work in block.work.values())), link


def _searched(module: nn.Module, batch: Any, devices: int, memory: int, workload: Workload, link: Link) -> Choice:
    hardware = dataclasses.replace(Hardware.measure(), links=((devices, link),))
    return _told(search(module, batch, devices, memory, hardware=hardware, workload=workload, all_devices=True))


def _told(proposal: Proposal) -> Choice:
    chosen, found = proposal.chosen, proposal.found
    others = [row for row in found.table if row.candidate != chosen]
    lines = [
        f"PiperStrategy chose {described(chosen)}",
        f"  predicted: {proposal.time * 1e3:.4g} ms a step, {size(proposal.memory)} on the fullest device",
        *(f"  and not {described(row.candidate)}: {row.estimate.time * 1e3:.4g} ms, {row.reason}" for row in others[:1]),
        f"  of {found.size:,} programs, {found.evaluated:,} were estimated; the rest was excluded by bounds",
        f"  it is checked, and kept in {_folder()}: PiperStrategy(directives=...) takes it from there",
    ]
    return Choice(proposal.written, tuple(lines))


# What there is


def _link(world: World) -> Link:
    """Between the first process and the last one, for tensors of the host, while messages go both ways: seconds of a message, and
    bytes a second. Collective."""
    other = {0: world.size - 1, world.size - 1: 0}.get(world.rank)
    times: dict[int, list[float]] = {1: [], MESSAGE // 4: []}
    for _ in range(ROUNDS + 1):
        for count in times:
            own, theirs = torch.zeros(count), torch.empty(count)
            start = time.perf_counter()
            if other is not None:
                sent = dist.isend(own, other, group=world.host_group)
                dist.recv(theirs, other, group=world.host_group)
                assert sent is not None
                sent.wait()
            times[count].append(time.perf_counter() - start)
    small, large = (found[1:] for found in times.values())
    latency, whole = min(small), median(large)
    return world.broadcast(Link(latency, MESSAGE / max(whole - latency, whole / 2)))


def _memory(module: nn.Module, world: World) -> int:
    """Bytes that the search may use of each device: of a GPU its own, else what this process may use of the host."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[1] * (1 - SPARED))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(name).read_text().strip() if Path(name).is_file() else ""
        found += [int(text) // local] if text.isdecimal() else []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        # Address space that the interpreter and its libraries have taken already is not for training, but the module's is.
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").is_file() else 0
        own = sum(x.nbytes for x in (*module.parameters(), *module.buffers()) if x.device.type == "cpu")
        found.append(max(limit - pages * os.sysconf("SC_PAGE_SIZE") + own, 1))
    return int(min(found) * (1 - SPARED))


# The cache: by model and machine


def _folder() -> Path:
    return Path(os.environ.get(CACHE) or Path.home() / ".cache") / "lightning_piper" / "programs"


def _file(module: nn.Module, batch: Any, world: World, memory: int) -> Path:
    """Named by all that the choice follows from: modules and their tensors, the batch, versions, devices and their memory."""
    spec = flatten(batch)[1]
    about = [
        *(f"{name} {type(part).__qualname__}" for name, part in module.named_modules()),
        *(f"{name} {tuple(x.shape)} {x.dtype} {x.requires_grad}" for name, x in module.named_parameters()),
        repr(spec.key), torch.__version__, platform.node(), platform.processor(), str(os.cpu_count()),
        torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        str(world.size), str(torch.get_num_threads()), str(round(memory, -8)),
    ]  # fmt: skip
    return _folder() / f"{hashlib.blake2b(chr(10).join(about).encode(), digest_size=16).hexdigest()}.json"


def _read(path: Path) -> Choice | None:
    """What was chosen before; None if there is nothing that can be used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        directives: tuple[Directive, ...] = tuple(parse(content["directives"]))
        stages = tuple(tuple(map(str, stage)) for stage in content["annotate"][TAG])
        return Choice(Written(stages, directives, int(content["about"]["replicas"])), tuple(map(str, content["about"]["lines"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PiperError):
        return None


def _write(path: Path, choice: Choice) -> None:
    content = choice.written.to_json() | {"about": {"replicas": choice.written.replicas, "lines": list(choice.lines)}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # the next fit searches again
