"""What ranks do in test_shared_memory.py."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.runtime import shared_memory
from lightning_piper.runtime.collectives import Members
from lightning_piper.runtime.shared_blocks import shared_blocks
from lightning_piper.runtime.shared_memory import DIRECT, PIECE, SharedMessages, messages_of

# Not without memfd_create and /proc, nor where files are limited.
POSSIBLE = shared_memory._opened(*shared_memory._address()) is not None
SIZE = 3
ORDER = [2, 0, 1]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


def values(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Of magnitudes so different that the order in which they are added shows."""
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (made * 10.0 ** (3 * rank)).to(dtype)


def sizes(dtype: torch.dtype) -> list[int]:
    """On both sides of the size from which on memory is used, and of several pieces, the last one not
    full.
    """
    few = DIRECT // dtype.itemsize
    return [few, few + 1, 2 * (PIECE // dtype.itemsize) + 3]


def _shared() -> SharedMessages:
    messages = messages_of(dist.group.WORLD)
    assert isinstance(messages, SharedMessages)
    return messages


def sums(rank: int) -> list[torch.Tensor]:
    members = Members(_shared(), ORDER, rank, native=False)
    made = [values(rank, dtype, numel) for dtype in DTYPES for numel in sizes(dtype)]
    sums = [members.add_up(x) for x in made]  # all of them are under way at once
    for work, _ in sums:
        work.wait()
    return [total for _, total in sums]


def _taken() -> int:
    """Blocks that are in use."""
    return sum(not block.free for block in shared_blocks()._at.values())


def sums_in_place(rank: int) -> list[tuple[torch.Tensor, torch.Tensor, bool, int]]:
    """Of tensors that lie where the others read them: the sum, what has been summed, does the sum lie in its
    place, and how many blocks it took.
    """
    members, found = Members(_shared(), ORDER, rank, native=False), []
    for dtype in DTYPES:
        numel = sizes(dtype)[-1]
        x = shared_blocks().empty(numel, dtype)
        x.copy_(values(rank, dtype, numel))
        taken = _taken()
        work, total = members.add_up(x)
        more = _taken() - taken
        work.wait()
        dist.barrier()
        found.append((total.clone(), x.clone(), total.data_ptr() == x.data_ptr(), more))
        del work, total
    return found


def parts_in_place(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Parts of a tensor that lies where the others read it, sent twice, with a change in between: what came
    from the others.
    """
    messages = _shared()
    others = [other for other in range(SIZE) if other != rank]
    numel = 2 * DIRECT
    x = shared_blocks().empty(SIZE * numel, torch.float32)
    rounds, taken = [], _taken()
    for turn in range(2):
        x.copy_(torch.arange(SIZE).repeat_interleave(numel) + 10 * rank + 100 * turn)
        rooms = [torch.empty(numel) for _ in others]
        for other in others:
            messages.send(x[other * numel : (other + 1) * numel], [other])
        assert _taken() == taken + turn * len(others)
        dist.barrier()
        for room, other in zip(rooms, others, strict=True):
            messages.receive(room, other).wait()
        dist.barrier()
        rounds.append(rooms)
    return rounds[0], rounds[1], rank


def lent_again(rank: int) -> list[bool]:
    """Is a block lent again: while a view of what lies in it is there, while another has not read it, and
    after both.
    """
    messages, numel = _shared(), 3 * DIRECT
    x = shared_blocks().empty(numel, torch.float32).fill_(float(rank))
    place, view = x.data_ptr(), x[5:7]
    messages.send(x, [(rank + 1) % SIZE])
    del x
    found = [shared_blocks().empty(numel, torch.float32).data_ptr() == place]
    del view
    found.append(shared_blocks().empty(numel, torch.float32).data_ptr() == place)
    dist.barrier()  # nobody has read before
    room, before = torch.empty(numel), (rank - 1) % SIZE
    messages.receive(room, before).wait()
    assert torch.equal(room, torch.full_like(room, before))
    dist.barrier()
    taken = [shared_blocks().empty(numel, torch.float32) for _ in shared_blocks()._at.copy()]
    return [*found, any(each.data_ptr() == place for each in taken)]


def exchanges(rank: int) -> list[list[torch.Tensor]]:
    """To each member another part, of another size; and to all the same."""
    members = Members(_shared(), ORDER, rank, native=False)
    numel = DIRECT // 4
    apart = [torch.full((numel + 1 + i + members.own,), 10.0 * members.own + i) for i in range(SIZE)]
    rooms = [torch.zeros(numel + 1 + members.own + i) for i in range(SIZE)]
    same, others = torch.full((2 * numel,), float(members.own)), [torch.zeros(2 * numel) for _ in range(SIZE)]
    works = members.exchange(apart, rooms) + members.exchange([same] * SIZE, others)
    for part in (*apart, same):
        part.zero_()  # what is sent was taken already
    for work in works:
        work.wait()
    return [rooms, others]


def growth(rank: int) -> tuple[list[int], torch.Tensor]:
    """Bytes of this process's memory after rounds of sums of sizes that change, and the last sum."""
    members = Members(_shared(), ORDER, rank, native=False)
    ends = []
    for round_ in range(12):
        for numel in (30_000, 50_000, 30_001, 70_000 + 1000 * round_):
            x = values(rank, torch.float64, numel)
            members.add_up(x)[0].wait()
        ends.append(os.fstat(shared_blocks().file).st_size)
    return ends, x


def given_back(rank: int) -> list[int]:
    """Bytes of this process's memory that are there after a sum, after a group is closed, and after another
    sum, which is right.
    """
    found = []
    for turn in range(2):
        group = dist.new_group()
        messages = messages_of(group)
        x = torch.full((2**20,), 1.0 + turn)
        Members(messages, ORDER, rank, native=False).add_up(x)[0].wait()
        assert torch.equal(x, torch.full_like(x, 3.0 + 3 * turn))
        dist.barrier()  # all have read
        found.append(os.fstat(shared_blocks().file).st_blocks * 512)
        messages.close()
        found.append(os.fstat(shared_blocks().file).st_blocks * 512)
    return found


def reach(rank: int, kind: str) -> str:
    """How messages travel where the processes are not on one machine, or one of them can make no such
    memory.
    """
    if kind == "another machine" and rank == 1:
        shared_memory._machine = lambda: 7  # type: ignore[assignment]

    def refused(*args: Any) -> Any:
        raise OSError("no such call")

    if kind == "no memory" and rank == 2:
        os.memfd_create = refused  # type: ignore[assignment]
    if kind == "no pipes" and rank == 1:
        os.pipe = refused  # type: ignore[assignment]
    if kind == "files of few bytes" and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    if kind == "another file" and rank == 0:
        real = shared_memory._address
        shared_memory._address = lambda: [*real()[:3], real()[3] ^ 1]  # type: ignore[assignment]
    messages = messages_of(dist.group.WORLD)
    x = torch.full((DIRECT,), float(rank))
    Members(messages, ORDER, rank, native=False).add_up(x)[0].wait()
    assert float(x[0]) == float(x[-1]) == 3.0
    return type(messages).__name__


def full(rank: int) -> str:
    """What is said where there is no more address space for a message."""
    members = Members(_shared(), ORDER, rank, native=False)
    x = torch.ones(2**22)
    resource.setrlimit(
        resource.RLIMIT_AS, (int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE, -1)
    )
    try:
        members.add_up(x)
    except torch.OutOfMemoryError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return ""


def broken(rank: int) -> str:
    """What is said where a rank's memory is gone in the middle of a message."""
    members: Any = Members(_shared(), ORDER, rank, native=False)
    x = torch.ones(DIRECT)
    work, _ = members.add_up(x)
    dist.barrier()
    if rank == 1:
        os.ftruncate(shared_blocks().file, 0)
    dist.barrier()
    try:
        if rank != 1:
            work.wait()
    except RuntimeError as error:
        return str(error)
    return ""
