"""The output of each script in this folder, and a way to run one function on two processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def report(package: str, right: Any, printed: Any) -> None:
    """Print the right result, the result of the installed package, and whether they differ."""
    print(f"right: {text(right)}")
    print(f"{package} {version(package)}: {text(printed)}")
    print("wrong" if text(right) != text(printed) else "mended upstream", flush=True)


def text(value: Any) -> str:
    """Return numbers with four digits, and other values as they print."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    return f"{value + 0.0:.4g}" if isinstance(value, float) else str(value)


def on_two_processes(work: Callable[[int], None]) -> None:
    """Run `work(rank)` in two processes, joined by gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_joined, (work, port), 2, start_method="fork")


def _joined(rank: int, work: Callable[[int], None], port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    work(rank)
    dist.destroy_process_group()
