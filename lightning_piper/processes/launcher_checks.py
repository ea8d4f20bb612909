"""Checks before a run: whether Lightning's launcher can start the script again for each further device, and
whether the processes can reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

import torch.distributed as dist

from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError

# `sys.argv[0]` of a program without a file -> the source of the program, as an error names it.
NO_FILES = {"-c": "`python -c`", "-": "the standard input", "": "the standard input"}


def check_one_process(devices: int, nodes: int) -> None:
    """Check that the Trainer has one process, as `transport="local"` requires.

    Raises:
        PiperError: The Trainer has more devices or machines.
    """
    if devices * nodes != 1:
        raise PiperError(
            "PiperStrategy: transport='local' and 'simulated' run all logical devices in one process, but "
            f"the Trainer has devices={devices} and num_nodes={nodes}. Use "
            "Trainer(devices=1, num_nodes=1) [PIPER-S003]"
        )


def check_size(processes: int) -> None:
    """Check that a later Trainer of a script does not wait for processes that the script does not have, or has lost.

    Args:
        processes: Number of processes of the Trainer.

    Raises:
        PiperError: The Trainer has more processes than an earlier call has connected.
    """
    if dist.is_initialized() and processes > (connected := dist.get_world_size()):
        raise PiperError(
            f"PiperStrategy: the Trainer needs {counted(processes, 'process')}, but earlier calls of this script have "
            f"connected {connected}. Give all Trainers the same devices and num_nodes. After a fit with spares has "
            f"lost processes, use a Trainer with {counted(connected, 'device')}, or start the script again [PIPER-S003]"
        )


def check_script() -> None:
    """Check that Lightning's launcher can start this program again, from its file or by its module name.

    Raises:
        PiperError: The program has neither a file nor a module name.
    """
    name = sys.argv[0] if sys.argv else ""
    if hasattr(sys, "ps1"):
        found = "a notebook or an interactive session"
    elif (spec := getattr(sys.modules["__main__"], "__spec__", None)) is not None:
        if spec.name != "__main__":  # started as `python -m name`
            return
        found = f"the archive or folder {name!r}"
    elif name in NO_FILES:
        found = NO_FILES[name]
    elif "hydra" in sys.modules or os.path.isfile(script := os.path.abspath(name)):
        # Lightning's launcher can start a program again after hydra has changed the folder
        return
    else:
        found = f"{script!r}, which does not exist (has the current folder or sys.argv[0] been changed?)"
    raise PiperError(
        "PiperStrategy(transport='process') runs the script once for each device, but this program comes "
        f"from {found}. Use transport='local' with devices=1 here, or run a script: python train.py, or "
        "python -m package.train [PIPER-S003]"
    )


def check_address(main: str) -> None:
    """Check that other machines can reach this process at the address that gloo reports to them.

    gloo (torch 2.13) uses the interface in GLOO_SOCKET_IFNAME. Without this variable, gloo uses the first
    address of this host's name that belongs to this machine, and loopback if there is no such address. With
    the variable, or if rank 0's address is loopback, there is nothing to check.

    Args:
        main: Address of rank 0.

    Raises:
        PiperError: Other machines would connect to themselves until the timeout.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or _is_loopback(main):
        return
    name = socket.gethostname()
    found = next(filter(_is_own, _addresses(name)), None)
    if found is None or ipaddress.ip_address(found).is_loopback:
        why = "does not resolve to an address of this machine" if found is None else f"resolves to {found}"
        raise PiperError(
            f"PiperStrategy: this machine's name {name!r} {why}, so processes on other machines cannot reach "
            "this one. Set GLOO_SOCKET_IFNAME on each machine to the network interface that connects them "
            "(GLOO_SOCKET_IFNAME=eth0), or make the name resolve to the machine's address (/etc/hosts)"
            " [PIPER-L002]"
        )


def _addresses(name: str) -> list[str]:
    try:
        return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _is_loopback(name: str) -> bool:
    return any(ipaddress.ip_address(address).is_loopback for address in _addresses(name))


def _is_own(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
