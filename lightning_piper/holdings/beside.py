"""The tensors of a module that every process keeps whole, and trains in parts: each optimizer of a step that runs as it is updates
this process's shards, which lie in the memory of the whole parameters."""

from __future__ import annotations

import torch
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.holdings.materialize import like
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.ir.values import flattened
from lightning_piper.processes.world import World
from lightning_piper.runtime import local_shards_of


class Beside(Ownership):
    """See `Ownership`. What changes a shard changes the module, and the other way round; only of foreign parts the module here has
    old values after a shard's owner has changed it, until a plan has gathered them.

    Args:
        module: whole, with the same values on every process.
        compiled: what shards parameters; it keeps room for the whole of each bucket.
        world: the processes.
    """

    def __init__(self, module: nn.Module, compiled: Compiled, world: World) -> None:
        self._divided: dict[str, nn.Parameter] = {}
        super().__init__(module, compiled, world)
        plan = compiled.plans[world.rank]
        assert all(plan.shards.values()), "the whole of a bucket is kept between steps"
        flats = {bucket: bucket.empty(world.device) for bucket in plan.shards}
        self.shards[world.rank] = flats
        self.lay()
        for name, view in local_shards_of(plan, flats).items():
            if not self.tensor_map.holds_whole(name, world.rank):
                self._local_shards[name] = like(self._get(name), view)  # type: ignore[assignment]
        self.whole = True

    def _get(self, name: str) -> torch.Tensor:
        """The parameter that had this name, which the optimizer has, also where a hook has given it another one (pruning)."""
        if name not in self._divided:
            found = super()._get(name)
            if not isinstance(found, nn.Parameter):
                return found
            self._divided[name] = found
        return self._divided[name]

    @torch.no_grad()
    def lay(self) -> None:
        """Let parameters lie in the memory of the shards: also again, for users' code may have given them other memory."""
        for bucket, flat in self.shards[self._world.rank].items():
            for name, view in zip(bucket.names, bucket.views(flat), strict=True):
                param = self._get(name)
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param)
                    param.data = view

    def take_gradients(self) -> None:
        """Give each local shard its part of the whole parameter's gradient."""
        for name, shard in self._local_shards.items():
            grad, (start, stop) = self._get(name).grad, self._range(name)
            shard.grad = None if grad is None else flattened(grad, self.tensor_map.specs[name])[start:stop]

    def changed(self) -> None:
        """Shards were updated and gathered: parameters have other values, which autograd must know where it has saved them."""
        for shard in self._local_shards.values():
            shard.grad = None
        for bucket in self.shards[self._world.rank]:
            for name in bucket.names:
                torch.autograd.graph.increment_version(self._get(name))

    def _range(self, name: str) -> tuple[int, int]:
        held = self.tensor_map.held(name, self._world.rank)
        assert held is not None
        return held

    def restore(self) -> None:
        """Parameters lie in memory of their own again."""
        for bucket in self.shards[self._world.rank]:
            for name in bucket.names:
                param = self._get(name)
                param.data = param.data.clone()
