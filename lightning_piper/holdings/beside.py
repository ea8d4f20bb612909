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
        self._views = {name: x for bucket in flats for name, x in zip(bucket.names, bucket.views(flats[bucket]), strict=True)}
        self._elsewhere: set[str] = set()
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(self._get(name))
                self._get(name).data = view
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
        """Take over the values of parameters to which users' code has given other memory (`param.data = ...`). They stay there, for
        something else may lie there, too: what ModelPruning rewinds to, say."""
        self._elsewhere.clear()
        for name, view in self._views.items():
            if self._get(name).data_ptr() != view.data_ptr():
                view.copy_(self._get(name))
                self._elsewhere.add(name)

    def take_gradients(self) -> None:
        """Give each local shard its part of the whole parameter's gradient."""
        for name, shard in self._local_shards.items():
            grad, (start, stop) = self._get(name).grad, self._range(name)
            dense = grad.to_dense() if grad is not None and grad.is_sparse else grad
            shard.grad = None if dense is None else flattened(dense, self.tensor_map.specs[name])[start:stop]

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has made its step: of parameters that this process has whole, with these themselves."""
        for name in self._elsewhere - self._local_shards.keys():
            self._views[name].copy_(self._get(name))

    def changed(self) -> None:
        """Shards were updated and gathered: parameters have other values, which autograd must know where it has saved them."""
        for shard in self._local_shards.values():
            shard.grad = None
        for name in self._views:
            param = self._get(name)
            if name in self._elsewhere:
                param.data.copy_(self._views[name])
            torch.autograd.graph.increment_version(param)

    def _range(self, name: str) -> tuple[int, int]:
        held = self.tensor_map.held(name, self._world.rank)
        assert held is not None
        return held

    def restore(self) -> None:
        """Parameters lie in memory of their own again."""
        for name, view in self._views.items():
            if self._get(name).data_ptr() == view.data_ptr():
                self._get(name).data = view.clone()
