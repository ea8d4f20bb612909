"""`AddedGroups`: parameter groups that a hook has given an optimizer after the first batch (`add_param_group`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_piper.holdings.materialize import places_of, tensor_at
from lightning_piper.holdings.optimizer import ShardedOptimizer


class AddedGroups:
    """Takes them out of an optimizer that has been cut down to what this process holds, for their parameters may be what stands for
    values that are elsewhere; they come back when the module is whole.

    Args:
        optimizer: cut down.
        module: in parts.
    """

    def __init__(self, optimizer: ShardedOptimizer, module: nn.Module) -> None:
        self._optimizer, self._module = optimizer.optimizer, module
        names = {id(tensor_at(at)): name for name, at in places_of(module).items()}
        self._groups: list[tuple[dict[str, Any], list[str | Tensor]]] = []
        for group in self._optimizer.param_groups[len(optimizer.names) :]:
            self._groups.append((group, [names.get(id(p), p) for p in group["params"]]))
        del self._optimizer.param_groups[len(optimizer.names) :]

    def put_back(self) -> None:
        """The module is whole."""
        places = places_of(self._module)
        for group, params in self._groups:
            group["params"] = [tensor_at(places[p]) if isinstance(p, str) else p for p in params]
            self._optimizer.param_groups.append(group)
