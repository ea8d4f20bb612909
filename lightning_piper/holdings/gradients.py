"""Parameters whose gradients are sharded or on other processes, and the exchange of values between processes
that hold one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.remote_gradient import RemoteGradient
from lightning_piper.holdings.tensor_map import TensorMap
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.values import Kind
from lightning_piper.ops.update import Update
from lightning_piper.processes.world import World


def changed_by(dag: TrainingDAG, kind: Kind) -> dict[str, set[int]]:
    """Return name -> logical devices, for example `{"fc.weight": {0, 1}}`. With `Kind.GRAD`, these are the
    devices that have the gradient of a parameter after a step. With `Kind.BUFFER`, they are the devices that
    have the new values of a buffer. Names that the step does not change are absent."""
    found: dict[str, set[int]] = {}
    for update in dag.of_type(Update):
        value = dag.value(update.inputs[0])
        for name in value.names if value.kind == kind else ():
            found.setdefault(name, set()).update(update.devices)
    return found


def absent(ownership: Ownership, trained: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters in `trained` that are placeholders in this process and require gradients, by
    name."""
    return {
        name: x for name, x in ownership.params.items() if x.is_meta and x.requires_grad and name in trained
    }


class HolderExchange:
    """An exchange for processes that hold a parameter or buffer, but do not use the tensor in a step's DAG.

    Several stages may hold the same tensor. A holder that does not use the tensor in this DAG receives the
    tensor's gradient, or its new values, from a process that uses the tensor.

    Args:
        dag: The DAG of the step.
        ownership: The holders of each tensor, in all steps so far.
    """

    def __init__(self, dag: TrainingDAG, ownership: Ownership, world: World) -> None:
        self._ownership, self._world = ownership, world
        self._grads, self._buffers = (
            _routes(changed_by(dag, kind), ownership.tensor_map, world) for kind in (Kind.GRAD, Kind.BUFFER)
        )

    def exchange(self, grads: dict[str, torch.Tensor]) -> None:
        """Send gradients and buffers to their other holders after a step. Collective.

        Args:
            grads: Parameter name -> this process's gradient. The method inserts the received gradients.
                Received buffers are written in place.
        """
        for name, source, target in self._grads:
            found = self._world.move_object(grads.get(name), source, target)
            if found is not None:
                grads[name] = found.to(self._world.device)
        buffers = self._ownership.owned_buffers if self._buffers else {}
        for name, source, target in self._buffers:
            self._world.move(buffers.get(name), source, target, into=buffers.get(name))


def _routes(
    changed: Mapping[str, set[int]], tensor_map: TensorMap, world: World
) -> list[tuple[str, int, int]]:
    """Return (name, source rank, target rank) of each transfer, in the same order on every process. The
    source is the first process that computes the value and holds the same elements as the target.

    There is such a process: directives give all device groups of a trained tensor the same buckets, or raise
    an error (`directives/rewrites/sharding.py`), and a later layout uses the buckets of the first one.
    """
    found = []
    for name in sorted(changed) if world.size > 1 else ():
        for rank in range(world.size):
            held = tensor_map.held(name, rank)
            if held is not None and rank not in changed[name]:
                sources = [i for i in sorted(changed[name]) if tensor_map.held(name, i) == held]
                assert sources, f"no process computes elements {held} of {name!r}, which rank {rank} holds"
                found.append((name, sources[0], rank))
    return found


def mark(params: Mapping[str, torch.nn.Parameter], local_shards: Mapping[str, torch.Tensor]) -> None:
    """Give parameters placeholder gradients (`RemoteGradient`), unless they already have one.

    Args:
        params: The parameters, by name.
        local_shards: The local shards of some of these parameters, by name. Dropping or zeroing a parameter's
            gradient (`module.zero_grad()`) also applies to its shard.
    """
    for name, param in params.items():
        if not isinstance(param.grad, RemoteGradient):
            param.grad = RemoteGradient.of(param, name, local_shards.get(name))
