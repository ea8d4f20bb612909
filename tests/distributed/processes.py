"""Starts real processes, joined by gloo over the loopback interface."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=120)  # nothing here takes that long; a test that hangs ends


def launch(size: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Run `work(rank, *args)` in `size` processes of one default group; their results by rank.

    A result that is an exception is returned like any other. `work` must be a function of a module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "lightning", "lightning_piper"])
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_main, args=(rank, size, str(folder), work, args)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT.total_seconds())
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {size} processes hang"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _main(rank: int, size: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=LIMIT)
    result: Any
    try:
        result = work(rank, *args)
    except Exception as error:
        traceback.print_exc()
        result = error
        result.__cause__ = None  # may hold what cannot be pickled
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
