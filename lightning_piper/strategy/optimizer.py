"""An optimizer cut down to the parameters of one process, and its state as one device would have it.

The canonical form of an optimizer's state numbers the parameters through all groups, in the order in which
`configure_optimizers` gave them: what a plain optimizer writes into a checkpoint, and reads from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_piper.errors import PiperError
from lightning_piper.strategy.ownership import Ownership
from lightning_piper.strategy.world import LEAD, World

State = dict[str, Any]


class ShardedOptimizer:
    """Cuts an optimizer when it is made: `group["params"]` loses, in place, the parameters of other processes. All groups
    stay, also empty ones, for schedulers hold them.

    Args:
        optimizer: over the parameters of the whole module.
        ownership: of the module; parameters that the optimizer has besides stay with every process and are the lead's to save.
    """

    def __init__(self, optimizer: Optimizer, ownership: Ownership, world: World) -> None:
        self.optimizer, self._ownership, self._world = optimizer, ownership, world
        names = {id(x): name for name, x in ownership.params.items()}
        self._names: list[list[str | None]] = [[names.get(id(p)) for p in g["params"]] for g in optimizer.param_groups]
        self._labels: list[list[str] | None] = [
            list(g["param_names"]) if "param_names" in g else None for g in optimizer.param_groups
        ]
        self._kept = [[name is None or ownership.owns(name) for name in group] for group in self._names]
        for group, kept in zip(optimizer.param_groups, self._kept, strict=True):
            for p, keep in zip(group["params"], kept, strict=True):
                if not keep:
                    optimizer.state.pop(p, None)
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = [x for x, keep in zip(group[key], kept, strict=True) if keep]

    def full_state(self) -> State:
        """The state in canonical form. Whole on the lead; other processes have their own part. Collective."""
        local = self.optimizer.state_dict()
        state: dict[int, Any] = {}
        number, position = 0, 0
        for names, kept in zip(self._names, self._kept, strict=True):
            for name, keep in zip(names, kept, strict=True):
                if keep and self._speaks_for(name) and position in local["state"]:
                    state[number] = local["state"][position]
                number, position = number + 1, position + keep
        for source in range(1, self._world.size):
            own = _on_host(state) if self._world.rank == source else None
            state.update(self._world.move_object(own, source, LEAD) or {})
        return {"state": dict(sorted(state.items())), "param_groups": self._full_groups(local["param_groups"])}

    def _speaks_for(self, name: str | None) -> bool:
        return self._world.leads if name is None else self._ownership.speaks_for(name)

    def _full_groups(self, local: list[State]) -> list[State]:
        groups, start = [], 0
        for group, names, labels in zip(local, self._names, self._labels, strict=True):
            full = group | {"params": list(range(start, start + len(names)))}
            if labels is not None:
                full["param_names"] = labels
            groups.append(full)
            start += len(names)
        return groups

    def load_full_state(self, full: Mapping[str, Any]) -> None:
        """Load this process's part of a state in canonical form.

        Raises:
            PiperError: the state is of an optimizer with other groups.
        """
        found = [len(group["params"]) for group in full["param_groups"]]
        wanted = [len(names) for names in self._names]
        if found != wanted:
            raise PiperError(
                f"the checkpoint's optimizer has parameter groups of {found} parameters, configure_optimizers gives {wanted}; "
                "resume with the same module and the same groups"
            )
        state: dict[int, Any] = {}
        groups: list[State] = []
        position = 0
        for group, kept in zip(full["param_groups"], self._kept, strict=True):
            start = position
            for number, keep in zip(group["params"], kept, strict=True):
                if keep:
                    if number in full["state"]:
                        state[position] = full["state"][number]
                    position += 1
            own = {**group, "params": list(range(start, position))}
            if "param_names" in group:
                own["param_names"] = [x for x, keep in zip(group["param_names"], kept, strict=True) if keep]
            groups.append(own)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _on_host(value: Any) -> Any:
    """A copy to be sent, without a device that the receiver may not have."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: _on_host(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(v) for v in value)
    return value
