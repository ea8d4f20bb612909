"""What a module distributed over processes must not do meanwhile, and whether the processes fit the program."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.strategy.world import World

Suspended = list[tuple[nn.Module, str, Any]]  # what to set again: owner, attribute, value


def suspend(module: pl.LightningModule, world: World) -> Suspended:
    """Switch off, until `resume`, what assumes that every process has the whole module or data of its own.

    Summaries and graph logging would run the module on its `example_input_array`; metrics would add up what all processes
    have seen, where those of one replica see the same batches.
    """
    if world.size == 1:
        return []
    # Lightning recommends it to everybody who logs while torch.distributed runs; here it would change nothing.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
    found: list[tuple[nn.Module, str, Any]] = [(module, "example_input_array", module.example_input_array)]
    module.example_input_array = None
    for part in module.modules():
        if isinstance(part, Metric) and world.count == 1:
            found.append((part, "distributed_available_fn", part.distributed_available_fn))
            part.distributed_available_fn = _never
        elif isinstance(part, Metric) and part.dist_sync_fn is None:
            found.append((part, "dist_sync_fn", None))
            part.dist_sync_fn = partial(_gather_replicas, world.speakers)
    return found


def resume(suspended: Suspended) -> None:
    """Set again what `suspend` has changed."""
    for owner, name, value in suspended:
        setattr(owner, name, value)


def _never() -> bool:
    return False


def _gather_replicas(speakers: tuple[int, ...], value: torch.Tensor, group: Any | None = None) -> list[torch.Tensor]:
    """A metric's state in each replica."""
    found = gather_all_tensors(value, group)
    return [found[rank] for rank in speakers]


def check_devices(first: Compiled, world: World) -> None:
    """There is a process for each logical device, and each draws the data of its replica.

    Raises:
        PiperError: it is not so.
    """
    devices = len(first.plans)
    if devices != world.size:
        raise PiperError(
            f"the directives place the step on {devices} logical device(s), the Trainer runs {world.size} process(es); give "
            f"Trainer(devices={devices}), or all devices in one process with PiperStrategy(transport='local') and devices=1"
        )
    working = {device for chunk in first.dag.of_type(Chunk) for device in chunk.devices}
    if any(first.plans[device].replica != world.replicas[device] for device in working):
        raise PiperError(
            "a directive makes replicas that its replica_groups() does not name, so the processes' data cannot be told apart; give "
            "the directive's class this method"
        )
