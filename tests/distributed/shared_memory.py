"""The work of the ranks in test_shared_memory.py."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.runtime.collectives import Members
from lightning_piper.runtime.same_machine import shared_memory
from lightning_piper.runtime.same_machine.shared_blocks import shared_blocks
from lightning_piper.runtime.same_machine.shared_memory import DIRECT, PIECE, SharedMessages, messages_of

# These need memfd_create and /proc, and no limit of file sizes.
POSSIBLE = shared_memory._opened(*shared_memory._address()) is not None
SIZE = 3
ORDER = [2, 0, 1]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


def values(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return values of very different magnitudes, so that their sum depends on the order of the terms."""
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (made * 10.0 ** (3 * rank)).to(dtype)


def sizes(dtype: torch.dtype) -> list[int]:
    """Return sizes below and above the size from which messages use memory, and of several blocks, the last
    one not full.
    """
    few = DIRECT // dtype.itemsize
    return [few, few + 1, 2 * (PIECE // dtype.itemsize) + 3]


def _shared() -> SharedMessages:
    messages = messages_of(dist.group.WORLD)
    assert isinstance(messages, SharedMessages)
    return messages


def sums(rank: int, wait_alike: bool) -> list[torch.Tensor]:
    members = Members(_shared(), ORDER, rank, native=False)
    members.wait_alike = wait_alike
    made = [values(rank, dtype, numel) for dtype in DTYPES for numel in sizes(dtype)]
    sums = [members.add_up(x) for x in made]  # all sums are in flight at once
    for work, _ in sums:
        work.wait()
    return [total for _, total in sums]


def _taken() -> int:
    """Return the number of blocks in use."""
    return sum(not block.free for block in shared_blocks()._at.values())


def sums_in_place(rank: int, wait_alike: bool) -> list[tuple[torch.Tensor, torch.Tensor, bool, int]]:
    """Sum tensors in memory that the other ranks read. Returns the sum, the summed tensor, whether the sum is
    in the tensor's place, and the number of blocks that it took.
    """
    members, found = Members(_shared(), ORDER, rank, native=False), []
    members.wait_alike = wait_alike
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
    """Send parts of a tensor in memory that the other ranks read twice, with a change in between. Returns the
    received parts.
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
    """Return whether a block is used again: while a view of its content exists, while another rank has not
    read it, and after both.
    """
    messages, numel = _shared(), 3 * DIRECT
    x = shared_blocks().empty(numel, torch.float32).fill_(float(rank))
    place, view = x.data_ptr(), x[5:7]
    messages.send(x, [(rank + 1) % SIZE])
    del x
    found = [shared_blocks().empty(numel, torch.float32).data_ptr() == place]
    del view
    found.append(shared_blocks().empty(numel, torch.float32).data_ptr() == place)
    dist.barrier()  # no rank has read before
    room, before = torch.empty(numel), (rank - 1) % SIZE
    messages.receive(room, before).wait()
    assert torch.equal(room, torch.full_like(room, before))
    dist.barrier()
    taken = [shared_blocks().empty(numel, torch.float32) for _ in shared_blocks()._at.copy()]
    return [*found, any(each.data_ptr() == place for each in taken)]


def exchanges(rank: int) -> list[list[torch.Tensor]]:
    """Send another part, of another size, to each member, and the same part to all members."""
    members = Members(_shared(), ORDER, rank, native=False)
    numel = DIRECT // 4
    apart = [torch.full((numel + 1 + i + members.own,), 10.0 * members.own + i) for i in range(SIZE)]
    rooms = [torch.zeros(numel + 1 + members.own + i) for i in range(SIZE)]
    same, others = torch.full((2 * numel,), float(members.own)), [torch.zeros(2 * numel) for _ in range(SIZE)]
    works = members.exchange(apart, rooms) + members.exchange([same] * SIZE, others)
    for part in (*apart, same):
        part.zero_()  # the sent values have been copied already
    for work in works:
        work.wait()
    return [rooms, others]


def growth(rank: int) -> tuple[list[int], torch.Tensor]:
    """Return the bytes of this process's memory after rounds of sums of changing sizes, and the last sum."""
    members = Members(_shared(), ORDER, rank, native=False)
    ends = []
    for round_ in range(12):
        for numel in (30_000, 50_000, 30_001, 70_000 + 1000 * round_):
            x = values(rank, torch.float64, numel)
            members.add_up(x)[0].wait()
        ends.append(os.fstat(shared_blocks().file).st_size)
    return ends, x


def given_back(rank: int) -> list[int]:
    """Return the bytes of this process's memory after a sum, after its group is closed, and after another
    sum, which is checked.
    """
    found = []
    for turn in range(2):
        group = dist.new_group()
        messages = messages_of(group)
        x = torch.full((2**20,), 1.0 + turn)
        Members(messages, ORDER, rank, native=False).add_up(x)[0].wait()
        assert torch.equal(x, torch.full_like(x, 3.0 + 3 * turn))
        dist.barrier()  # all ranks have read
        found.append(os.fstat(shared_blocks().file).st_blocks * 512)
        messages.close()
        found.append(os.fstat(shared_blocks().file).st_blocks * 512)
    return found


def reach(rank: int, kind: str) -> str:
    """Return how messages travel if the processes are on several machines, or if one process cannot make
    shared memory.
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
    opened, writing_end = [], shared_memory.writing_end

    def counted(process: int, file: int) -> int | None:
        opened.append(process)
        return writing_end(process, file)

    shared_memory.writing_end = counted  # type: ignore[assignment]
    messages = messages_of(dist.group.WORLD)
    if kind == "another machine":  # ranks 0 and 2 share a machine, and open nothing by rank 1's process ID
        assert len(opened) == (0 if rank == 1 else 1)
    x = torch.full((DIRECT,), float(rank))
    Members(messages, ORDER, rank, native=False).add_up(x)[0].wait()
    assert float(x[0]) == float(x[-1]) == 3.0
    return type(messages).__name__


def full(rank: int) -> str:
    """Return the error of a rank that has no address space left for a message."""
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
    """Return the error of a rank whose memory disappears in the middle of a message."""
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
