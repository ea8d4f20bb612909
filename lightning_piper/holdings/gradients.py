"""Which parameters of the module have gradients that are on other processes, or here in pieces; and what holders of a tensor get
from others, in a layout of the step in which they do not use it themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from lightning_piper.holdings.elsewhere import Elsewhere
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_map import TensorMap
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.values import Kind
from lightning_piper.ops.update import Update
from lightning_piper.processes.world import World


def changed_by(dag: TrainingDAG, kind: Kind) -> dict[str, set[int]]:
    """The parameters that get gradients in a step, or the buffers that get values, and the devices that have these."""
    found: dict[str, set[int]] = {}
    for update in dag.of_type(Update):
        value = dag.value(update.inputs[0])
        for name in value.names if value.kind == kind else ():
            found.setdefault(name, set()).update(update.devices)
    return found


def absent(ownership: Ownership, trained: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """Of the module's parameters that get gradients, those that do not get them whole in this process."""
    return {name: x for name, x in ownership.params.items() if x.is_meta and x.requires_grad and name in trained}


class Handing:
    """Stages that share a parameter or a buffer each hold it. In a layout of the step in which some of them do not use it, they get
    its gradients, or its new values, from one that does.

    Args:
        dag: of the layout.
        ownership: who holds what, in all layouts so far.
    """

    def __init__(self, dag: TrainingDAG, ownership: Ownership, world: World) -> None:
        self._ownership, self._world = ownership, world
        self._grads, self._buffers = (
            _routes(changed_by(dag, kind), ownership.tensor_map, world) for kind in (Kind.GRAD, Kind.BUFFER)
        )

    def hand_on(self, grads: dict[str, torch.Tensor]) -> None:
        """After a step. `grads`: of this process; gets those that others have made for it. Collective."""
        for name, source, target in self._grads:
            found = self._world.move_object(grads.get(name), source, target)
            if found is not None:
                grads[name] = found.to(self._world.device)
        buffers = self._ownership.owned_buffers if self._buffers else {}
        for name, source, target in self._buffers:
            self._world.move(buffers.get(name), source, target, into=buffers.get(name))


def _routes(changed: Mapping[str, set[int]], tensor_map: TensorMap, world: World) -> list[tuple[str, int, int]]:
    """Name, source and target of what is handed on: from the first process that has these elements."""
    found = []
    for name in sorted(changed) if world.size > 1 else ():
        for rank in range(world.size):
            held = tensor_map.held(name, rank)
            if held is not None and rank not in changed[name]:
                found.append(
                    (name, next(source for source in sorted(changed[name]) if tensor_map.held(name, source) == held), rank)
                )
    return found


def mark(params: Mapping[str, torch.nn.Parameter], local_shards: Mapping[str, torch.Tensor]) -> None:
    """Give these parameters gradients that are elsewhere, before the next ones come.

    Args:
        local_shards: of some, with gradients of their own, which go or become zero with the parameter's (`module.zero_grad()`).
    """
    for name, param in params.items():
        if not isinstance(param.grad, Elsewhere):
            param.grad = Elsewhere.of(param, name, local_shards.get(name))
