"""The distribution of a module's tensors over the processes of a run, and the way back to the whole module.

A process keeps the tensors that its device's chunks use. Of a sharded parameter, the process keeps its local
shard: a one-dimensional parameter that is a view of the flat tensor from which the executor gathers. In the
module, every tensor that is not whole on this process becomes a placeholder: a tensor of the same shape on
the `meta` device. So summaries, `configure_optimizers` and later captures see the whole module.

One process with all devices has every tensor once (`SharedTensors`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from lightning_piper.capture import has_gradient_hooks
from lightning_piper.common.tensor_versions import Version, changed_tensors, tensor_versions
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import PARTS
from lightning_piper.holdings.materialization import (
    Known,
    empty_like,
    initialize,
    like,
    places_of,
    put,
    tensor_at,
)
from lightning_piper.holdings.placeholders import stand_in
from lightning_piper.holdings.tensor_map import LocalShard, SharedTensors, TensorMap
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.values import flattened, view_as
from lightning_piper.processes.world import RANK_ZERO, World, fill, on_host
from lightning_piper.runtime import local_shards_of


class Ownership:
    """The distribution of one module's tensors.

    The constructor maps the tensors by the training program `compiled`. `distribute` moves the values and
    changes the module, and `end` or `restore` gives every process the whole module again.

    Attributes:
        tensor_map: Which process holds which elements.
        shards: Logical device of this process -> bucket -> the flat tensor that the device keeps of the
            bucket.
        whole: Whether the module is whole in every process: there is one process, or `restore` was called, or
            `whole_everywhere` is active. Otherwise False, even if the program shards nothing.
        places: Canonical name of a tensor -> each submodule that has it, with the attribute's name there.
        ended: Whether the run has ended without a failure.
        copies: Copies of the module that are distributed like the module until it is whole again.
    """

    def __init__(self, module: nn.Module, compiled: Compiled, world: World) -> None:
        self._module, self._world, self._compiled = module, world, compiled
        self.places = places_of(module)
        self.tensor_map = TensorMap(compiled, world.size)
        self.shards: dict[int, dict[Bucket, torch.Tensor]] = {}
        self.whole = world.size == 1
        self.ended = False
        self.copies: list[Ownership] = []
        # whether the module stays distributed after the run: it was built without data, so a process may not
        # have enough memory for the whole
        self._stays = False
        self._device = world.device
        self._local_shards: dict[str, nn.Parameter] = {}
        # parameter that this process holds whole -> its memory in this process's shards
        self._whole_in_shards: dict[str, torch.Tensor] = {}
        # name of a tensor that is not whole on this process -> its local shard, or an empty tensor
        self._pieces: dict[str, torch.Tensor] = {}
        # name -> the module's original tensor, without data until `restore`
        self._before: dict[str, torch.Tensor] = {}
        # (name, placeholder, version of the placeholder) of each sharded parameter
        self._versions: list[Version] = []
        self._shared = SharedTensors(self.places, compiled, world.device)

    def __deepcopy__(self, memo: object) -> None:
        """Return None, because a copy of the module is not distributed."""

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Canonical name -> the parameter that the module has now. Usually, parameters that are not whole on
        this process are placeholders on the meta device."""
        return {n: x for n in self.tensor_map.holder_groups if isinstance(x := self._get(n), nn.Parameter)}

    def is_canonical(self, name: str) -> bool:
        """Return whether this process is the canonical holder of elements of a tensor. If so, these elements
        count only on this process."""
        return self._world.rank in self.tensor_map.canonical_holders(name)

    @property
    def owned_params(self) -> dict[str, nn.Parameter]:
        """Canonical name -> the parameter that this process trains: its local shard, or the whole parameter.
        If the process has neither, the parameter is absent."""
        found = {n: x for n, x in self.params.items() if self.tensor_map.holds_whole(n, self._world.rank)}
        return {
            n: x
            for n in self.tensor_map.holder_groups
            if (x := self._local_shards.get(n, found.get(n))) is not None
        }

    @property
    def owned_buffers(self) -> dict[str, torch.Tensor]:
        """Canonical name -> the buffer in the module. Buffers that this process does not hold are absent."""
        rank = self._world.rank
        found = {
            n: self._get(n) for n in self.tensor_map.holder_groups if self.tensor_map.holds_whole(n, rank)
        }
        return {n: x for n, x in found.items() if not isinstance(x, nn.Parameter)}

    def local_shards(self, replicas: bool = False) -> list[LocalShard]:
        """Return the elements of parameters and buffers whose canonical holder is this process. Over all
        processes, each element occurs once. The tensors share memory with the module's tensors and the
        local shards, if the memory order allows a view.

        Args:
            replicas: Also return the elements of parameters that this process holds as a member of the
                canonical group, although another process is their canonical holder.
        """
        found = []
        for name, spec in self.tensor_map.specs.items():
            held = self.tensor_map.canonical_range(name, self._world.rank)
            if held is not None and (
                self.is_canonical(name) or (replicas and name in self._compiled.step.params)
            ):
                found.append(LocalShard(name, spec.shape, spec.dtype, *held, self._part(name, *held)))
        return found

    def distribute(self, seed: int, known: Known, before: Ownership | None = None) -> None:
        """Give every tensor its value on the processes that hold it, move it to its device, and drop all
        other tensors. Collective.

        A tensor gets its known value. Without a known value, it gets rank 0's value, or an initial value if
        it is on the meta device there. Only rank 0's values travel: every process reads or computes known and
        initial values itself.

        One process ignores the arguments. Its tensors, which must have values, move to the device
        (`SharedTensors.lay`).

        Args:
            seed: Seed of initial values.
            known: Values from a checkpoint.
            before: The current distribution of the module, if no process may have enough memory for the
                whole. Each tensor then passes through rank 0's host memory, one after another.

        Raises:
            PiperError: A gradient hook is registered on a sharded parameter; initial values cannot be
                computed; or a tensor is on the meta device on rank 0, but not on another rank. In one process,
                a parameter is in two buckets.
        """
        if self._world.size == 1:
            self.shards = self._shared.lay(self.tensor_map.holder_groups)
            return
        self._make_local_shards()
        absent, self._stays = self._absent(known) if before is None else (set(), True)
        made = self._make_values(absent, seed, known)
        for name, holder_groups in self.tensor_map.holder_groups.items():
            if before is not None:
                before.bring(name, RANK_ZERO)
            tensor = self._get(name)
            whole = self.tensor_map.holds_whole(name, self._world.rank)
            # A whole tensor on the meta device gets memory here, which rank 0's values or a later read fill.
            if name in made or (whole and tensor.is_meta):
                tensor = made[name] if name in made else empty_like(tensor, self._device)
                self._set(name, tensor)
            # Rank 0 sends its values to each process that holds the tensor or a shard of it.
            for group in () if name in absent else holder_groups:
                for rank, (start, stop) in group.ranges.items():
                    if group.bucket is None:
                        self._world.move(tensor, RANK_ZERO, rank, into=tensor)
                        continue
                    part = (
                        flattened(tensor.detach(), self.tensor_map.specs[name])[start:stop]
                        if self._world.is_rank_zero
                        else None
                    )
                    self._move(part, RANK_ZERO, rank, into=self._local_shards.get(name))
            if name in self._whole_in_shards:
                fill(self._whole_in_shards[name], tensor.detach())
                tensor.data = self._whole_in_shards[name]
            elif whole:
                tensor.data = tensor.data.to(self._device)
            else:
                self._replace_by_placeholder(name, comes_back=before is None)
        self._note_versions()
        self._module.__dict__[PARTS] = self

    def _replace_by_placeholder(self, name: str, comes_back: bool = True) -> None:
        """Drop the data of a tensor that is not whole on this process, and put a placeholder into the module.

        Args:
            name: Canonical name of the tensor.
            comes_back: Whether to keep the original tensor object, without its data, so that `restore` can
                put it back.
        """
        tensor = self._get(name)
        nothing = like(tensor, torch.empty(0, dtype=tensor.dtype, device=self._device))
        self._pieces[name] = self._local_shards.get(name, nothing)
        self._set(
            name, stand_in(empty_like(tensor, "meta"), name, self.tensor_map.is_sharded(name), self._device)
        )
        if not tensor.is_meta and comes_back:
            self._before[name] = tensor
            tensor.data = tensor.data.new_empty(0)

    def restrict(self, compiled: Compiled) -> bool:
        """Leave each tensor that a training program is the first to change only to the devices that use it.

        Until now, every process holds these tensors. The other devices drop them, and get them back at the
        end like all other tensors. All processes call this method with the same program. Return whether any
        device, in any process, drops a tensor.
        """
        params = self.params

        def changes(name: str, device: int) -> bool:
            return params[name].requires_grad if name in params else name in compiled.written_on(device)

        restricted = self.tensor_map.restrict(compiled, changes)
        for own in (self, *self.copies):
            own.tensor_map.holder_groups = self.tensor_map.holder_groups
            for name in restricted:
                if not own.tensor_map.holds_whole(name, self._world.rank):
                    own._replace_by_placeholder(name)
        return bool(restricted)

    def _absent(self, known: Known) -> tuple[set[str], bool]:
        """Return the names of the tensors that have no values on rank 0, or that are in `known`. Also return
        whether any tensor has no values on rank 0. Collective.

        Raises:
            PiperError: A tensor without values on rank 0 has values on another rank, and is not in `known`.
        """
        on_meta = [name for name in self.tensor_map.holder_groups if self._get(name).is_meta]
        at_rank_zero, *others = self._world.gather(on_meta)
        for rank, found in enumerate(others, start=1):
            for name in sorted(set(at_rank_zero) - set(found)):
                if name not in known:
                    raise PiperError(
                        f"{name!r} is on the meta device on rank {RANK_ZERO}, but has values on rank {rank}. "
                        "Build the module in the same way in every process, independently of the rank"
                        " [PIPER-L003]"
                    )
        return {*at_rank_zero, *(name for name in self.tensor_map.holder_groups if name in known)}, bool(
            at_rank_zero
        )

    def _make_values(self, absent: Collection[str], seed: int, known: Known) -> dict[str, torch.Tensor]:
        """Compute or read the values of the tensors in `absent`: known values, otherwise initial values. Fill
        this process's shards with the values, and return the tensors that it holds whole (name -> tensor).

        Tensors in `known.later` get no values here.
        """
        rank, made = self._world.rank, {}

        @torch.no_grad()
        def take(name: str, value: torch.Tensor) -> None:
            """Keep this process's part of a whole value. Without a part, do nothing."""
            spec = self.tensor_map.specs[name]
            if self.tensor_map.holds_whole(name, rank):
                room = empty_like(self._get(name), self._device)
                fill(room, value)
                made[name] = room
            elif name in self._local_shards:
                held = self.tensor_map.held(name, rank)
                assert held is not None
                self._local_shards[name].copy_(flattened(value, spec)[slice(*held)])

        held = [
            name
            for name in self.tensor_map.holder_groups
            if name in absent and self.tensor_map.held(name, rank) is not None
        ]
        initialize(self._module, self.places, {name for name in held if name not in known}, seed, take)
        for name in held:
            if name in known.loaded:
                take(name, known.loaded[name])
            elif name in known.stored and self.tensor_map.holds_whole(name, rank):
                take(name, known.stored[name].whole())
            elif name in known.stored and name in self._local_shards:
                part = self.tensor_map.held(name, rank)
                assert part is not None
                shard = known.stored[name].read(self.tensor_map.specs[name], *part)
                with torch.no_grad():
                    self._local_shards[name].copy_(shard)
        return made

    def refresh(self) -> None:
        """Before a step, update the copies of parts that the devices of one process have."""
        self._shared.refresh()

    def _make_local_shards(self) -> None:
        """Allocate this process's shards. The local shards in them are parameters like the whole parameters. Raise a
        PiperError if a sharded parameter has a gradient hook."""
        for name in self.tensor_map.holder_groups:
            if self.tensor_map.is_sharded(name) and has_gradient_hooks(self._get(name)):
                self._refuse_hook(name)
        plan = self._compiled.plans[self._world.rank]
        own = self.shards[self._world.rank] = {}
        for bucket, kept in plan.shards.items():
            flat = bucket.empty(self._device)
            own[bucket] = flat if kept else flat.chunk(bucket.members)[bucket.member(plan.group_rank)].clone()
        for name, view in local_shards_of(plan, own).items():
            if self.tensor_map.holds_whole(name, self._world.rank):
                self._whole_in_shards[name] = view_as(view, self.tensor_map.specs[name])
            else:
                self._local_shards[name] = like(self._get(name), view)  # type: ignore[assignment]

    @property
    def can_be_whole(self) -> bool:
        """Whether every process may have the whole module. False if the module was built without data."""
        return not self._stays

    @contextlib.contextmanager
    def pieces(self) -> Iterator[None]:
        """Replace the placeholders in the module by this process's local shards inside of this context, for
        example because an elementwise update of the module must change the local shards.

        Sharded parameters become local shards of one dimension. Tensors that this process does not hold
        become empty. Tensors that this process holds whole stay.
        """
        before = {name: self._get(name) for name in self._pieces}
        for name, piece in self._pieces.items():
            self._set(name, piece)
        try:
            yield
        finally:
            for name, tensor in before.items():
                self._set(name, tensor)

    def end(self) -> None:
        """End the distribution at the end of a run. Every process gets the whole module again, unless the
        module was built without data. Collective."""
        for copy in self.copies:
            copy.end()
        self.copies.clear()
        self.ended = True
        if not self._stays:
            self.restore()

    def restore(self) -> None:
        """Give every process the whole module again, in the same parameter objects, because optimizers may
        refer to them. Collective. The received values are in host memory. Gradients are dropped, unless every
        process had all tensors whole. In one process, parameters in buckets get memory of their own."""
        if not self.whole:
            if not self.tensor_map.is_replicated:
                for held in self.owned_params.values():
                    held.grad = None  # frees memory for the received tensors
            self._receive(range(self._world.size))
        self._put_back()

    def abandon(self) -> None:
        """Give this process its parameter objects again after the loss of a process. Not collective. Tensors that
        are not whole here get no values."""
        for name in self._pieces:
            self._set(name, empty_like(self._get(name), self._device if name in self._before else "meta"))
        self._put_back()

    def _put_back(self) -> None:
        """Put the original tensor objects back into the module, with the values that the module has now."""
        self._module.__dict__.pop(PARTS, None)
        if not self.whole:
            keeps = self.tensor_map.is_replicated  # If every process has all tensors whole, gradients stay.
            for name, tensor in self._before.items():
                found = self._get(name)
                tensor.data, tensor.grad = found.data, found.grad if keeps else None
                tensor.requires_grad_(found.requires_grad)
                self._set(name, tensor)
            self._before.clear()
            self._pieces.clear()
            for name in self._whole_in_shards:
                # `distribute` has made the parameter a view of this process's shard.
                self._get(name).data = self._get(name).data.clone()
            self.whole = True
        elif self._world.size == 1:
            # One process never drops a tensor, but its sharded parameters are views of flat tensors.
            self._shared.separate(self.shards)

    def held_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return, as a one-dimensional copy, the elements of `whole`, a whole parameter, that belong to this process's
        local shard of it. If the process has no shard of it, return `whole` itself."""
        held = self.tensor_map.held(name, self._world.rank)
        if held is None or self.tensor_map.holds_whole(name, self._world.rank):
            return whole
        return flattened(whole, self.tensor_map.specs[name])[slice(*held)].clone()

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Return canonical name -> whole gradient in host memory, for all parameters that have a gradient, on
        every process. Collective."""
        grads = {name: x.grad for name, x in self.owned_params.items() if x.grad is not None}
        return self.assembled(grads, everywhere=True)

    def assembled(
        self, held: Mapping[str, torch.Tensor], everywhere: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return canonical name -> whole value in host memory, on rank 0 or everywhere, otherwise {}. `held` has
        values of the forms in which this process holds these parameters and buffers. Collective."""
        specs, shards = self.tensor_map.specs, self._local_shards
        own = {name: x for name, x in held.items() if self.is_canonical(name)}
        flat = {n: on_host(x if n in shards else flattened(x, specs[n])) for n, x in own.items()}
        parts = self._world.gather(flat) if everywhere else self._world.to_rank_zero(flat)
        return {} if parts is None else self.tensor_map.joined(parts)

    @contextlib.contextmanager
    def whole_on_rank_zero(self) -> Iterator[None]:
        """Give rank 0 the whole module inside of this context. Tensors that it does not hold come into host
        memory. Collective."""
        with self._brought([] if self.whole else [RANK_ZERO]):
            yield

    @contextlib.contextmanager
    def whole_on(self, name: str, rank: int) -> Iterator[torch.Tensor | None]:
        """Give a process one whole tensor inside of this context. Collective.

        A tensor that the process does not hold whole comes into host memory. Yields the tensor on this
        process, and None on the other processes.
        """
        before = None if self.whole else self.bring(name, rank)
        try:
            yield self._get(name).detach() if self._world.rank == rank else None
        finally:
            if before is not None:
                self._set(name, before)

    @contextlib.contextmanager
    def whole_everywhere(self) -> Iterator[None]:
        """Inside of this context, every process has the whole module on its device, and `whole` is True.
        Collective. Call this only while `whole` is False."""
        with self._brought(range(self._world.size)) as names:
            for name in names:
                self._get(name).data = self._get(name).data.to(self._device)
            self.whole = True
            try:
                yield
            finally:
                self.whole = False

    @contextlib.contextmanager
    def _brought(self, targets: Sequence[int]) -> Iterator[Collection[str]]:
        """Give the processes `targets` every tensor inside of this context. Collective. Yields the names of
        the tensors that this process has received: none if it is not a target."""
        self.check_unwritten()
        dropped = self._receive(targets)
        try:
            yield dropped.keys()
        finally:
            for name, tensor in dropped.items():
                self._set(name, tensor)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy the values of whole parameters, by any of their names, into this process's local shards.
        Buffers, and parameters without a local shard on this process, are ignored."""
        canonical = self._compiled.step.canonical
        with torch.no_grad():
            for name, value in values.items():
                shard = self._local_shards.get(canonical.get(name, name))
                if shard is not None:
                    name = canonical.get(name, name)
                    held = self.tensor_map.held(name, self._world.rank)
                    assert held is not None
                    shard.copy_(flattened(value, self.tensor_map.specs[name])[slice(*held)])
        self._note_versions()

    def _note_versions(self) -> None:
        """Record the versions of the placeholders of sharded parameters. `check_unwritten` compares them."""
        found = {name: x for name, x in self.params.items() if x.is_meta and self.tensor_map.is_sharded(name)}
        self._versions = tensor_versions(found)

    def check_unwritten(self) -> None:
        """Check that placeholders of sharded parameters were not changed, because their local shards would
        not follow.

        Raises:
            PiperError: A user's hook, or other code between the steps, has changed a placeholder in place or
                registered a gradient hook on it.
        """
        for name, tensor, _ in self._versions:
            if has_gradient_hooks(tensor):
                self._refuse_hook(name)
        if changed := changed_tensors(self._versions):
            raise PiperError(
                f"PiperStrategy: parameter {changed[0]!r} was changed in place, but the parameter is sharded, "
                "so the change would be lost. Change the shards of this process instead: the parameters in "
                "trainer.optimizers[0].param_groups [PIPER-S007]"
            )

    def _refuse_hook(self, name: str) -> None:
        raise PiperError(
            f"PiperStrategy: parameter {name!r} has a gradient hook, which would get only a shard of the gradient, "
            "because the parameter is sharded. Remove the hook [PIPER-S007]"
        )

    def _receive(self, targets: Sequence[int]) -> dict[str, torch.Tensor]:
        """Send to each target every tensor that it does not hold whole. Collective. The tensors come into
        host memory, because a device may have memory only for its own tensors and shards.

        Returns:
            Name -> the tensor that the module in this process had before, for each tensor that it received.
        """
        brought = {
            (name, target): self.bring(name, target) for name in self.tensor_map.specs for target in targets
        }
        return {name: before for (name, _), before in brought.items() if before is not None}

    def bring(self, name: str, target: int) -> torch.Tensor | None:
        """Send a whole tensor to the process `target`, into host memory, unless that process holds it whole.
        In the target's module, the whole tensor replaces the placeholder. Collective.

        Returns:
            On the target, the tensor that its module had before. None on the other processes, and on every
            process if the target holds the tensor whole.
        """
        if self.tensor_map.holds_whole(name, target):
            return None
        spec, receives = self.tensor_map.specs[name], self._world.rank == target
        flat = torch.empty(spec.numel, dtype=spec.dtype) if receives else None
        for source, (start, stop) in self.tensor_map.canonical_holders(name).items():
            part = self._part(name, start, stop) if self._world.rank == source else None
            self._move(part, source, target, into=None if flat is None else flat[start:stop])
        if flat is None:
            return None
        before = self._get(name)
        self._set(name, like(before, self.tensor_map.whole(name, flat)))
        return before

    def _part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements `start:stop`, which this process holds, in one dimension. They are its local
        shard of the tensor if it has one, otherwise these elements of the whole tensor."""
        shard = self._local_shards.get(name)
        if shard is not None:
            return shard.detach()
        return flattened(self._get(name).detach(), self.tensor_map.specs[name])[start:stop]

    def _move(self, part: torch.Tensor | None, source: int, target: int, into: torch.Tensor | None) -> None:
        if source == target == self._world.rank:
            assert part is not None and into is not None
            with torch.no_grad():
                into.copy_(part)
            return
        self._world.move(part, source, target, into=into)

    def _get(self, name: str) -> torch.Tensor:
        return tensor_at(self.places[name])

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        put(self.places[name], tensor)
