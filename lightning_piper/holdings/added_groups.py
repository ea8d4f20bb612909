"""`AddedGroups`: parameter groups that a hook has added to an optimizer after the first batch
(`add_param_group`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_piper.holdings.materialization import places_of, tensor_at
from lightning_piper.holdings.optimizer import ShardedOptimizer


class AddedGroups:
    """The groups that a hook has added to an optimizer. The constructor removes these groups from the
    optimizer, and `put_back` adds them again.

    The parameters of these groups may be placeholders for values on other processes.

    Args:
        optimizer: The sharded optimizer.
        module: The module while it is distributed.
    """

    def __init__(self, optimizer: ShardedOptimizer, module: nn.Module) -> None:
        self._optimizer, self._module = optimizer.optimizer, module
        names = {id(tensor_at(at)): name for name, at in places_of(module).items()}
        # (group, its parameters: the name of a parameter of the module, otherwise the tensor)
        self._groups: list[tuple[dict[str, Any], list[str | Tensor]]] = []
        for group in self._optimizer.param_groups[len(optimizer.names) :]:
            self._groups.append((group, [names.get(id(p), p) for p in group["params"]]))
        del self._optimizer.param_groups[len(optimizer.names) :]

    def put_back(self) -> None:
        """Add the groups to the optimizer again, when the module is whole."""
        places = places_of(self._module)
        for group, params in self._groups:
            group["params"] = [tensor_at(places[p]) if isinstance(p, str) else p for p in params]
            self._optimizer.param_groups.append(group)
