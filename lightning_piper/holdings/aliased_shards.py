"""The tensors of a module that is whole on every process, while its optimizer state is divided.

Each optimizer of an uncaptured step updates this process's shards, which are views of the memory of the whole
parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.holdings.materialization import like
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.ir.values import flattened
from lightning_piper.processes.world import World
from lightning_piper.runtime import local_shards_of


class AliasedShards(Ownership):
    """An `Ownership` whose shards share memory with the whole parameters.

    A change of a shard changes the module, and a change of the module changes the shard. When another process
    updates its shard, the same elements in this process are out of date until a plan gathers all shards.

    Around each step of the optimizer, call `lay` and `take_gradients` before it, and `updated` after it. Then
    run the plan that gathers the shards, and call `changed`.

    Args:
        module: The whole module, with the same values on every process. The constructor moves its parameters
            into the buckets.
        compiled: The program that shards parameters. Its plan keeps all elements of each bucket between
            steps.
        world: The processes of the run.
    """

    def __init__(self, module: nn.Module, compiled: Compiled, world: World) -> None:
        # name -> the parameter that the module had under this name when `_get` was first called
        self._divided: dict[str, nn.Parameter] = {}
        super().__init__(module, compiled, world)
        plan = compiled.plans[world.rank]
        assert all(plan.shards.values()), "the whole of a bucket is kept between steps"
        flats = {bucket: bucket.empty(world.device) for bucket in plan.shards}
        self.shards[world.rank] = flats
        # name of a parameter -> its memory in a bucket
        self._views = {
            name: x
            for bucket in flats
            for name, x in zip(bucket.names, bucket.views(flats[bucket]), strict=True)
        }
        self._elsewhere: set[str] = set()  # names of parameters that are in other memory in this step
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(self._get(name))
                self._get(name).data = view
        for name, view in local_shards_of(plan, flats).items():
            if not self.tensor_map.holds_whole(name, world.rank):
                self._local_shards[name] = like(self._get(name), view)  # type: ignore[assignment]
        self.whole = True

    def _get(self, name: str) -> torch.Tensor:
        """Return the parameter that this method returned at its first call for the name, or the buffer that
        has this name now. The optimizer updates the first parameter, even if a hook has replaced it in the
        module (pruning)."""
        if name not in self._divided:
            found = super()._get(name)
            if not isinstance(found, nn.Parameter):
                return found
            self._divided[name] = found
        return self._divided[name]

    @torch.no_grad()
    def lay(self) -> None:
        """Copy into the buckets the values of parameters that users' code has moved to other memory
        (`param.data = ...`).

        The parameters stay in that memory, because other code may rely on it, such as the tensors that
        ModelPruning rewinds to.
        """
        self._elsewhere.clear()
        for name, view in self._views.items():
            if self._get(name).data_ptr() != view.data_ptr():
                view.copy_(self._get(name))
                self._elsewhere.add(name)

    def take_gradients(self) -> None:
        """Set the `grad` of each local shard to its elements of the whole parameter's gradient, which becomes
        dense if it is sparse; to None if the parameter has no gradient."""
        for name, shard in self._local_shards.items():
            grad, (start, stop) = self._get(name).grad, self._range(name)
            dense = grad.to_dense() if grad is not None and grad.is_sparse else grad
            shard.grad = None if dense is None else flattened(dense, self.tensor_map.specs[name])[start:stop]

    @torch.no_grad()
    def updated(self) -> None:
        """After the optimizer's step, copy into the buckets the values of parameters that are in other memory
        and have no local shard here. If this process's optimizer updated such a parameter, it updated the
        whole parameter."""
        for name in self._elsewhere - self._local_shards.keys():
            self._views[name].copy_(self._get(name))

    def changed(self) -> None:
        """After the gather, drop the shards' gradients, and copy the new values to parameters in other
        memory.

        Also count a change of each parameter, because autograd must raise its error if a later backward pass
        reads a parameter that it saved before.
        """
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

    def _put_back(self) -> None:
        """Move each parameter that is in a bucket into new memory."""
        for name, view in self._views.items():
            if self._get(name).data_ptr() == view.data_ptr():
                self._get(name).data = view.clone()
