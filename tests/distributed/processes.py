"""Starts real processes, joined by gloo over the loopback interface.

To run a job on several processes, write it as a function of a module, `work(rank, *args)`, and call `launch`,
which returns every rank's result. The processes are forks of one server, in which torch, Lightning and this
package are imported already, so that a launch takes a fraction of a second; each launch has processes, a
default group, a folder and a time limit of its own, and nothing of a job that fails or is killed is left to
the next one. What all ranks would compute alike, such as captured steps, belongs into `prepare`: it is done
once, before the ranks are forked. Where ranks are to fail, `run_ranks` tells how each of them ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import seconds

LIMIT = timedelta(seconds=400)  # nothing here takes that long, also on a slow machine; a test that hangs ends
PATIENCE = timedelta(seconds=300)  # of communication: what waits in vain says so before the limit is over
# In a CUDA build of torch, a fork cannot run backward passes after the process that it comes from has traced one.
TRACES_BEFORE_FORKS = torch.version.cuda is None
IMPORTS = ["torch", "torch.distributed", "lightning", "lightning_piper"]  # and what a conftest.py adds


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        exitcode: as of `multiprocessing`: negative for a signal, None if the rank was still running at the
            limit, or was stopped when the others had ended.
        at: when that was, by `time.monotonic`.
        result: what its work returned or raised; None if it did not come that far.
        said: what it wrote to stdout and stderr.
    """

    exitcode: int | None
    at: float
    result: Any
    said: str


def launch(size: int, work: Callable[..., Any], folder: Path, *args: Any, **options: Any) -> list[Any]:
    """Run `work(rank, *args)` in `size` processes; their results by rank.

    A result that is an exception is returned like any other. `options` are those of `run_ranks`.
    """
    ended = run_ranks(size, work, folder, *args, **options)
    for rank, end in enumerate(ended):
        assert end.exitcode == 0, (
            f"rank {rank} of {size} {_words(end.exitcode)}; it said:\n{end.said[-8000:]}"
        )
    return [end.result for end in ended]


def launch_trainings(
    size: int, work: Callable[..., dict[Any, Any]], folder: Path, *args: Any, **options: Any
) -> list[dict[Any, Any]]:
    """Run `work(rank, *args)`, which starts Trainers one after another and raises nothing, in `size`
    processes; what each returned.

    `options` are those of `run_ranks`.
    """
    found = launch(size, work, folder, *args, joined=False, **options)
    raised = [
        f"rank {rank}: {_read(folder / f'{rank}.txt')[-4000:]}"
        for rank, result in enumerate(found)
        if not isinstance(result, dict)
    ]
    assert not raised, "\n".join(
        raised
    )  # of all ranks: what the first one says is often only that another one is gone
    return found


def run_ranks(
    size: int,
    work: Callable[..., Any],
    folder: Path,
    *args: Any,
    prepare: Callable[..., Any] | None = None,
    joined: bool = True,
    limit: timedelta = LIMIT,
) -> list[Ended]:
    """Run `work(rank, *args)` in `size` processes; how each of them ended, by rank.

    The environment of a rank is that of torchrun: `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`.

    Args:
        prepare: called as `prepare(*args)` in the process that the ranks are forked from, or in each rank if
            torch does not trace in forks. It must start no threads.
        joined: whether the ranks are of one default group from the beginning, or `work` makes it.
        limit: what still runs then is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    folder.mkdir(parents=True, exist_ok=True)
    parent = context.Process(
        target=_fork, args=(size, work, str(folder), args, prepare, joined, limit.total_seconds())
    )
    parent.start()
    parent.join(2 * limit.total_seconds())  # the ranks end at the limit; so must `prepare`
    parent.kill()
    parent.join()
    assert parent.exitcode == 0, (
        f"{prepare} {_words(parent.exitcode)}; it said:\n{_read(folder / 'parent.txt')}"
    )
    ends, taken = pickle.loads((folder / "ends").read_bytes())
    seconds.elsewhere += taken
    return [
        Ended(*end, _result(folder / f"{rank}.pt"), _read(folder / f"{rank}.txt"))
        for rank, end in enumerate(ends)
    ]


def _fork(
    size: int,
    work: Callable[..., Any],
    folder: str,
    args: tuple[Any, ...],
    prepare: Callable[..., Any] | None,
    joined: bool,
    limit: float,
) -> None:
    """The process between the server and the ranks."""
    _write_to(f"{folder}/parent.txt")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if prepare is not None and TRACES_BEFORE_FORKS:
        prepare(*args)
        prepare = None
    gc.freeze()  # ranks share this memory for as long as nobody writes into it
    gc.set_threshold(50_000, 20, 20)  # as in tests/conftest.py
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_main, args=(rank, size, folder, work, args, prepare, joined))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + limit
    running = {rank.sentinel: rank for rank in ranks}
    ended = {}
    while running and time.monotonic() < end and not all(map(_is_stopped, running.values())):
        for sentinel in multiprocessing.connection.wait(list(running), 0.5):
            ended[running.pop(sentinel)] = time.monotonic()  # type: ignore[call-overload]
    for rank in running.values():
        rank.kill()
    for rank in ranks:
        rank.join()
    ends = [(rank.exitcode, ended[rank]) if rank in ended else (None, time.monotonic()) for rank in ranks]
    Path(folder, "ends").write_bytes(pickle.dumps((ends, seconds.seconds())))


def _is_stopped(process: Any) -> bool:
    """By a signal."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _main(
    rank: int,
    size: int,
    folder: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    prepare: Callable[..., Any] | None,
    joined: bool,
) -> None:
    _write_to(f"{folder}/{rank}.txt")
    os.environ["LOCAL_RANK"] = str(rank)
    if joined:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=LIMIT)
    result: Any
    try:
        if prepare is not None:
            prepare(*args)
        result = work(rank, *args)
    except Exception as error:
        traceback.print_exc()
        result = error
        result.__cause__ = None  # may hold what cannot be pickled
    torch.save(result, f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """One below those that the system gives to others, so that nobody gets it before it is used."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port below 30000")


def _write_to(path: str) -> None:
    """Send all that this process says to a file."""
    with open(path, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _result(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else None


def _words(exitcode: int | None) -> str:
    return "hangs" if exitcode is None else f"ended with {exitcode}"
