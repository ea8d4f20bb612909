"""Starts a benchmark's ranks on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def is_rank() -> bool:
    return "RANK" in os.environ


def launch(ranks: int, *args: str, timeout: float = 900) -> None:
    """Run this script again as `ranks` processes, with the arguments `args`, over loopback and with one
    thread each. Wait until all have ended, and exit if one of them failed. After `timeout` seconds for a
    process, kill all and raise an error.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, sys.argv[0], *args]
    running = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(r)}) for r in range(ranks)]
    try:
        codes = [process.wait(timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        sys.exit(f"{' '.join(command)}: ranks ended with {codes}")


def join() -> tuple[int, int]:
    """Enter the process group, over gloo and with one thread. Returns (rank, world size). Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    return dist.get_rank(), dist.get_world_size()
