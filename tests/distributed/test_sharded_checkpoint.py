"""Sharded checkpoints of real processes: a changed number of processes, failures of one process, and killed
processes.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import signal
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_piper.checkpoint import tensor_ranges as ranges_module
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.checkpoint.locations import LocalLocation
from lightning_piper.checkpoint.sharded_checkpoint import load, save
from lightning_piper.checkpoint.tensor_ranges import SaveRanges, TensorRange
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from tests.distributed.processes import LIMIT, PATIENCE, launch

SHAPES = {
    "state_dict.a": (7, 5),
    "state_dict.b": (301,),
    "optimizer_states.0.a.exp_avg": (7, 5),
    "state_dict.empty": (0, 3),
}
SIZES = (4, 2, 1, 3)


class Some(World):
    """A group of the first processes of the run."""

    def __init__(self, rank, size, group):
        super().__init__(rank, size, torch.device("cpu"))
        self.group = group

    @property
    def host_group(self):
        return self.group

    def broadcast(self, value):
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def content(key, round_):
    draw = torch.Generator().manual_seed(hash((sorted(SHAPES).index(key), round_)))
    return torch.randn(math.prod(SHAPES[key]), generator=draw)


def ranges(key, rank, size, seed, replicas):
    """Return the ranges that a process holds: its parts of a random division. Some processes hold the same
    part.
    """
    draw = random.Random(f"{key} {size} {seed}")
    numel = math.prod(SHAPES[key])
    cuts = sorted({0, numel, *(draw.randint(0, numel) for _ in range(size + 1))})
    for start, stop in list(itertools.pairwise(cuts)) or [(0, 0)]:
        if rank in draw.sample(range(size), draw.randint(1, size) if replicas else 1):
            yield start, stop


def held(rank, size, seed, round_):
    return [
        TensorRange(key, shape, a, b, content(key, round_)[a:b])
        for key, shape in SHAPES.items()
        for a, b in ranges(key, rank, size, seed, replicas=seed % 3)
    ]


def chain(rank, folder, rounds):
    """Save on some processes and load on others, under random divisions. Returns how many ranges this process
    has compared.
    """
    groups = {size: dist.new_group(range(size)) for size in sorted(SIZES)}
    ranges_module.CHUNK = 20
    compared = 0
    order = list(SIZES) * rounds
    for number, (size, after) in enumerate(itertools.pairwise(order)):
        if rank < size:
            save(
                f"{folder}/last.ckpt",
                held(rank, size, 2 * number, number),
                {"from": size},
                Some(rank, size, groups[size]),
            )
        dist.barrier()
        if rank < after:
            wanted = [
                TensorRange(p.key, p.shape, p.start, p.stop, torch.full_like(p.tensor, math.nan))
                for p in held(rank, after, 2 * number + 1, number)
            ]
            assert load(f"{folder}/last.ckpt", wanted, Some(rank, after, groups[after])) == {"from": size}
            for p in wanted:
                assert torch.equal(p.tensor, content(p.key, number)[p.start : p.stop]), p.key
                compared += 1
        dist.barrier()
    return compared


def test_other_numbers_of_processes(tmp_path):
    found = launch(4, chain, tmp_path / "run", str(tmp_path), 5)
    assert all(isinstance(x, int) and x > 20 for x in found), found
    (tmp_path / "last.ckpt" / "manifest.json").stat()
    into = {"state_dict.b": torch.empty(301)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(into, checkpoint_id=tmp_path / "last.ckpt")
    assert torch.equal(into["state_dict.b"], content("state_dict.b", 18))


def everybody(rank):
    return World(rank, dist.get_world_size(), torch.device("cpu"), PATIENCE)


def attempt(work):
    try:
        work()
    except PiperError as error:
        return str(error)
    return "no error"


def errors(rank, folder):
    """Return the error that each process gets if one of them fails, or if a file is damaged."""
    world = everybody(rank)
    path = Path(folder) / "last.ckpt"
    save(path, held(rank, 3, 0, 1), {}, world)
    found = {}

    def failing(self, write_item):
        raise OSError("disk full")

    if rank == 1:
        own, SaveRanges.resolve_data = SaveRanges.resolve_data, failing
    found["save"] = attempt(lambda: save(path, held(rank, 3, 0, 2), {}, world))
    if rank == 1:
        SaveRanges.resolve_data = own
    dist.barrier()
    found["files"] = sorted(x.name for x in Path(folder).iterdir() if x.suffix in (".ckpt", ".tmp"))
    dist.barrier()
    key = "state_dict.b"
    more = [TensorRange("only rank 2 wants this", (1,), 0, 1, torch.empty(1))] if rank == 2 else []
    found["missing"] = attempt(lambda: load(path, more, world))
    bad = [TensorRange(key, (300,), 0, 1, torch.empty(1))] if rank == 1 else []
    found["shape"] = attempt(lambda: load(path, bad, world))
    found["gap"] = attempt(lambda: save(path, [p for p in held(rank, 3, 0, 2) if rank != 1], {}, world))
    room = torch.empty(301)
    load(path, [TensorRange(key, (301,), 0, 301, room)], world)
    found["earlier"] = torch.equal(room, content(key, 1))
    for file in ("__0_0.distcp", "__2_0.distcp"):
        dist.barrier()
        before = (path / file).read_bytes()
        dist.barrier()
        if rank == 0:
            (path / file).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        dist.barrier()
        found[file] = attempt(lambda: load(path, [], world))
        dist.barrier()
        if rank == 0:
            (path / file).write_bytes(before)
    private = Path(tempfile.mkdtemp(dir=folder))  # each process writes into a directory of its own
    with mock.patch.object(LocalLocation, "opened", lambda self, address: LocalFolder(private)):
        found["not shared"] = attempt(
            lambda: save(Path(folder) / "not shared" / "last.ckpt", held(rank, 3, 0, 1), {}, world)
        )
    return found


def test_all_processes_fail_alike(tmp_path):
    found = launch(3, errors, tmp_path / "run", str(tmp_path))
    assert all(isinstance(x, dict) for x in found), found
    assert found[0] == found[1] == found[2]
    seen = found[0]
    assert "last.ckpt failed on rank 1: OSError: disk full" in seen["save"]
    assert seen["files"] == ["last.ckpt"]
    assert "does not have only rank 2 wants this" in seen["missing"]
    assert "state_dict.b has shape [301] in the checkpoint" in seen["shape"]
    assert "no process holds elements" in seen["gap"]
    assert seen["earlier"]
    for file in ("__0_0.distcp", "__2_0.distcp"):
        assert f"last.ckpt/{file} does not have the content that was saved" in seen[file]
    assert "a directory that all processes share" in seen["not shared"]


def dying(rank, folder, victim, event, changes):
    """Save twice. During the second save, one process is killed at its n-th call that changes files."""
    import sys

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=PATIENCE
    )
    world = everybody(rank)
    save(f"{folder}/last.ckpt", held(rank, 2, 0, 1), {}, world)
    count = 0

    def profile(frame, kind, called):
        nonlocal count
        if kind in ("c_call", "c_return") and called.__name__ in changes:
            count += 1
            if count > event:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        sys.setprofile(profile)
    save(f"{folder}/last.ckpt", held(rank, 2, 0, 2), {}, world)


@pytest.mark.parametrize("victim, event", [(0, 0), (0, 6), (0, 12), (0, 40), (1, 0), (1, 2), (1, 4)])
def test_a_process_is_killed(victim, event, tmp_path):
    """The earlier checkpoint or the new one loads, here on one process."""
    context = multiprocessing.get_context("forkserver")
    changes = {"mkdir", "rename", "replace", "unlink", "rmdir", "open", "close", "fsync"}
    workers = [
        context.Process(target=dying, args=(rank, str(tmp_path), victim, event, changes)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT.total_seconds())
    assert workers[victim].exitcode == -signal.SIGKILL
    assert workers[1 - victim].exitcode == 1  # it fails, it does not hang
    room = torch.empty(301)
    load(
        tmp_path / "last.ckpt",
        [TensorRange("state_dict.b", (301,), 0, 301, room)],
        World(0, 1, torch.device("cpu")),
    )
    assert any(torch.equal(room, content("state_dict.b", i)) for i in (1, 2))
