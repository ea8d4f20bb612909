"""The state of a module and its optimizer in the form of sharded checkpoints: as ranges of tensors.

Such a checkpoint has Lightning's content, with a *reference* in place of each tensor that is saved in ranges:
a dict with the tensor's key. So the content loads without trusting any classes, and a hook that moves entries
moves references.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from lightning_piper.checkpoint.late_copies import memory_of
from lightning_piper.checkpoint.sharded_checkpoint import OpenedCheckpoint, fill, read_whole
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import (
    empty_like,
    is_on_meta,
    load_state,
    places_of,
    put,
    tensor_at,
)
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_map import TensorMap
from lightning_piper.ir.values import TensorSpec, flattened, view_as
from lightning_piper.processes.world import World

REFERENCE = "lightning_piper.tensor"  # the only key of a reference, whose value is the tensor's key
OPTIMIZER = "optimizer_states.0"  # Key of the state of the optimizer, of which there is only one.


def reference(key: str) -> dict[str, str]:
    return {REFERENCE: key}


def key_of(value: Any) -> str | None:
    """Return the key of a reference, or None for any other value."""
    key = value[REFERENCE] if isinstance(value, dict) and value.keys() == {REFERENCE} else None
    return key if isinstance(key, str) else None


def referenced(content: Any) -> set[str]:
    """Return the keys of all references in dicts, lists and tuples."""
    key = key_of(content)
    if key is not None:
        return {key}
    parts: Iterable[Any] = (
        content.values()
        if isinstance(content, dict)
        else content
        if isinstance(content, list | tuple)
        else ()
    )
    return {key for part in parts for key in referenced(part)}


def resolved(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the content with tensors instead of references. If the content is itself a reference, return its
    tensor. Otherwise, return the same object: dicts and lists are changed in place, and references in tuples
    stay.

    Args:
        content: Nested dicts, lists and other values.
        tensors: Key of a reference -> tensor. It must have all keys.
    """
    key = key_of(content)
    if key is not None:
        return tensors[key]
    if isinstance(content, dict):
        for name, value in content.items():
            content[name] = resolved(value, tensors)
    elif isinstance(content, list):
        content[:] = [resolved(value, tensors) for value in content]
    return content


# Saving


def module_state(module: nn.Module, canonical: Mapping[str, str]) -> dict[str, Any]:
    """Return the module's state dict, with references in place of its parameters and buffers.

    Args:
        module: The module; it may be distributed.
        canonical: Name of a parameter or buffer -> its canonical name.

    Raises:
        PiperError: The state dict has another tensor on the meta device, and Piper cannot know which
            process holds its values.
    """
    found: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if name in canonical:
            found[name] = reference(f"state_dict.{canonical[name]}")
        elif isinstance(value, torch.Tensor) and value.is_meta:
            raise PiperError(
                f"the module's state_dict() has {name!r}, which is not the name of a parameter or buffer, so Piper does "
                "not know which process has its values. Use PiperStrategy(checkpoint='consolidated') [PIPER-K005]"
            )
        else:
            found[name] = value
    return found


def optimizer_state(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return the optimizer's state in canonical form, with references to its tensors. Collective."""
    return optimizer.outline(lambda name, key: reference(f"{OPTIMIZER}.{name}.{key}"))


def own_optimizer_state(optimizer: ShardedOptimizer, tensor_map: TensorMap) -> dict[str, Any]:
    """Return the state of this process's parameters in canonical form, with references to its tensors. The groups have
    all parameters."""
    state: dict[int, dict[str, Any]] = {}
    for number, name, p in optimizer.held():
        if p in (states := optimizer.optimizer.state):
            sharable = name is not None and tensor_map.specs[name].shape
            state[number] = {
                key: reference(f"{OPTIMIZER}.{name}.{key}")
                if sharable and optimizer.keys.is_cut(key, value, p.shape)
                else value
                for key, value in states[p].items()
            }
    return {"state": state, "param_groups": optimizer.full_groups()}


def add_optimizer_states(content: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Add to the results of `own_optimizer_state` in a checkpoint the states of parameters that only another process had.

    Args:
        content: The content of the checkpoint.
        more: The content of the other process.
    """
    for own, other in zip(content["optimizer_states"], more["optimizer_states"], strict=True):
        if "state" in own:
            own["state"] = {**other["state"], **own["state"]}


def written_by(rank: int, parameters: Collection[str], tensor_map: TensorMap) -> set[str]:
    """Return the names of the tensors that a process writes, each with the elements that it holds. The processes that
    hold the same elements of parameters divide the parameters by their size."""
    written: dict[int, int] = {}
    found = set()
    for name in sorted(tensor_map.specs, key=lambda name: -tensor_map.specs[name].numel):
        holders: dict[tuple[int, int], list[int]] = {}
        for holder, elements in tensor_map.holder_groups[name][0].ranges.items():
            holders.setdefault(elements, []).append(holder)
        for (start, stop), ranks in holders.items():
            writer = min(ranks, key=lambda each: written.get(each, 0)) if name in parameters else ranks[0]
            written[writer] = written.get(writer, 0) + stop - start
            found |= {name} if writer == rank else set()
    return found


class HeldTensors:
    """The tensors of a fit that this process holds: parameters, buffers, and the optimizer's states. Call `look` before
    you use `ranges` or `steady_memory`.

    Args:
        rank: The rank of this process.
        ownership: The distribution of the module.
        optimizer: The optimizer.
    """

    def __init__(self, rank: int, ownership: Ownership, optimizer: ShardedOptimizer) -> None:
        self._rank, self._ownership, self._optimizer = rank, ownership, optimizer
        self._seen: list[torch.Tensor] = []
        self._where: list[tuple[str, int, torch.Size]] = []  # name, address and shape of each of them
        # A distribution, and the value of `written` for it.
        self._written: tuple[object, set[str]] = None, set()
        self._ranges: list[TensorRange] | None = None
        self._updated = set[int]()  # addresses of the memory of parameters and states

    def look(self) -> None:
        """Find out whether a tensor is new, or lies in other memory than before."""
        params, states = self._ownership.owned_params, self._optimizer.optimizer.state
        named = [*params.items(), *self._ownership.owned_buffers.items()]
        named += [(key, x) for p, state in states.items() for key, x in (("", p), *state.items())]
        held = [(name, x) for name, x in named if isinstance(x, torch.Tensor)]
        seen = [x for _, x in held]
        where = [(name, x.data_ptr(), x.shape) for name, x in held if x.layout == torch.strided]
        if len(seen) != len(self._seen) or where != self._where or not all(map(is_, seen, self._seen)):
            self._seen, self._where, self._ranges = seen, where, None
            self._updated = memory_of(chain(params.values(), *(state.values() for state in states.values())))

    @property
    def written(self) -> set[str]:
        """The names of the tensors in `ranges`; see `written_by`."""
        tensor_map = self._ownership.tensor_map
        if self._written[0] is not tensor_map.holder_groups:
            names = written_by(self._rank, self._ownership.params.keys(), tensor_map)
            self._written, self._ranges = (tensor_map.holder_groups, names), None
        return self._written[1]

    @property
    def steady_memory(self) -> set[int]:
        """The addresses of the parameters and of the optimizer's states that only an update or a hook changes."""
        return self._updated - memory_of(self._ownership.owned_buffers.values())

    @property
    def ranges(self) -> list[TensorRange]:
        """The ranges that this process copies into memory."""
        names = self.written
        if self._ranges is None:
            found = own_ranges(self._ownership, self._optimizer, names)
            memory = {x.untyped_storage().data_ptr() for x in self._seen if x.layout == torch.strided}
            # To have one dimension, the elements of some tensors must be copied.
            if any(x.tensor.untyped_storage().data_ptr() not in memory for x in found):
                return found
            self._ranges = found
        return self._ranges


def own_ranges(
    ownership: Ownership, optimizer: ShardedOptimizer, names: Collection[str]
) -> list[TensorRange]:
    """Return the ranges of these tensors that this process holds, and the ranges of their states."""
    specs = ownership.tensor_map.specs
    return ranges_of(ownership, "state_dict", names) + [
        TensorRange(
            f"{OPTIMIZER}.{p.name}.{p.key}",
            p.shape,
            p.start,
            p.stop,
            p.tensor,
            specs[p.name].dim_order,
            specs[p.name].runs,
        )
        for p in optimizer.local_shards(replicas=True)
        if p.name in names
    ]


def tensor_ranges_of(
    module: nn.Module, ownership: Ownership, optimizer: ShardedOptimizer, keys: set[str], running: bool
) -> list[TensorRange]:
    """Return the ranges that this process holds of the tensors of a module and its optimizer.

    Args:
        module: The module.
        ownership: The distribution of the module.
        optimizer: The optimizer.
        keys: Keys of references. Only tensors with these keys are saved in ranges.
        running: Whether a fit is running, so that the module is distributed as `ownership` says. If not, and
            every process has the whole module, the ranges are the whole tensors that the module has now.
    """
    tensor_map = ownership.tensor_map
    # (key, canonical name, start, stop, values) of ranges that `ranges_of` does not return
    found: list[tuple[str, str, int, int, torch.Tensor]] = []
    in_parts = running or not ownership.whole
    if not in_parts:  # The fit is over: every process has the whole module, and may have changed it.
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        specs = {name: spec for name, spec in tensor_map.specs.items() if name in tensors}
        found = [
            (f"state_dict.{name}", name, 0, spec.numel, flattened(tensors[name].detach(), spec))
            for name, spec in specs.items()
        ]
    found += [
        (f"{OPTIMIZER}.{p.name}.{p.key}", p.name, p.start, p.stop, p.tensor)
        for p in optimizer.local_shards(replicas=True)
    ]
    tensor_ranges = ranges_of(ownership, "state_dict") if in_parts else []
    tensor_ranges += [
        TensorRange(key, spec.shape, start, stop, tensor, spec.dim_order, spec.runs)
        for key, name, start, stop, tensor in found
        for spec in [tensor_map.specs[name]]
    ]
    return [part for part in tensor_ranges if part.key in keys]


def ranges_of(ownership: Ownership, prefix: str, names: Collection[str] | None = None) -> list[TensorRange]:
    """Return the ranges of a distributed module's tensors that this process holds.

    The key of a range is the prefix, a dot, and the tensor's canonical name.

    Args:
        ownership: The distribution of the module.
        prefix: The beginning of the keys.
        names: Canonical names of tensors; None for all tensors.
    """
    specs = ownership.tensor_map.specs
    return [
        TensorRange(
            f"{prefix}.{p.name}",
            p.shape,
            p.start,
            p.stop,
            p.tensor,
            specs[p.name].dim_order,
            specs[p.name].runs,
        )
        for p in ownership.local_shards(replicas=True)
        if names is None or p.name in names
    ]


# Loading


class Loading:
    """A sharded checkpoint that is being loaded, in the order in which Lightning loads it.

    The methods `module`, `distributed`, `whole` and `optimizer` are collective.

    Args:
        opened: The checkpoint.
        world: The processes of the run.
        beside: Names of tensors that the checkpoint has although the module's state dict does not have them.

    Attributes:
        content: Lightning's content, with references.
    """

    def __init__(self, opened: OpenedCheckpoint, world: World, beside: Sequence[str] = ()) -> None:
        self._world, self._opened, self._beside = world, opened, beside
        self.content = opened.common
        # the module whose ranges are still to be read, and name of a tensor -> its key
        self._waiting: tuple[nn.Module, dict[str, str]] | None = None

    def read(self, content: dict[str, Any], entries: Iterable[str]) -> None:
        """Replace references by whole tensors in some entries of `content`, in place. Each process reads
        alone.

        Callbacks and hooks need this, because they do not understand references.
        """
        keys = {entry: referenced(content.get(entry)) for entry in entries}
        tensors = read_whole(self._opened, sorted(set().union(*keys.values())))
        content.update({entry: resolved(content[entry], tensors) for entry, found in keys.items() if found})

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with whole tensors in place of references. Each process reads alone."""
        found: dict[str, Any] = resolved(dict(state), read_whole(self._opened, sorted(referenced(state))))
        return found

    @property
    def waiting(self) -> frozenset[str]:
        """Names of the parameters and buffers that are still to be read."""
        return frozenset() if self._waiting is None else frozenset(self._waiting[1])

    def module(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool, parts: Ownership | None
    ) -> dict[str, torch.Tensor]:
        """Load the module's values. If several processes load outside of a fit, `distributed` or `whole`
        later reads the values that the checkpoint has in ranges.

        Args:
            module: The module that receives the values.
            state: The saved state dict, with references.
            strict: Require the names in the checkpoint to be the module's names.
            parts: How the module is distributed over processes during a fit. None outside of a fit.

        Returns:
            Name -> value of the tensors that the checkpoint does not have in ranges and that are not loaded
            yet.

        Raises:
            PiperError: With `strict`, the names in the checkpoint are not the module's names; or a shape
                differs.
        """
        names = module.state_dict().keys()
        missing, unexpected = [n for n in names if n not in state], [n for n in state if n not in names]
        if strict and (missing or unexpected):
            differing = [f"the checkpoint does not have {missing}"] * bool(missing) + [
                f"the module does not have {unexpected}"
            ] * bool(unexpected)
            raise PiperError(
                f"the checkpoint belongs to a different module than this {type(module).__name__}: "
                f"{', and '.join(differing)}. Resume with the same module [PIPER-K003]"
            )
        plain = {name: value for name, value in state.items() if key_of(value) is None}
        kept: dict[str, torch.Tensor] = {}
        if plain and is_on_meta(module):
            kept = load_state(module, plain, strict=False, keep=parts is None)
        elif plain:
            module.load_state_dict(plain, strict=False)
        keys = {name: key for name in names if (key := key_of(state.get(name))) is not None}
        keys |= {name: f"state_dict.{name}" for name in self._beside}
        if parts is None and self._world.size > 1:
            self._waiting = module, keys
        else:
            self._fill_module(module, keys, parts)
        return kept

    def distributed(self, parts: Ownership) -> None:
        """Read the values that `module` has not read, after the module was distributed. Each process reads
        only its own ranges."""
        if self._waiting is not None:
            (module, keys), self._waiting = self._waiting, None
            self._fill_module(module, keys, parts)

    def whole(self) -> None:
        """Read the values that `module` has not read, whole on every process. The module is not
        distributed."""
        if self._waiting is not None:
            (module, keys), self._waiting = self._waiting, None
            self._fill_module(module, keys, None)

    def _fill_module(self, module: nn.Module, keys: Mapping[str, str], parts: Ownership | None) -> None:
        """Read the values of the tensors in `keys` (name -> key in the checkpoint): of the whole module if
        `parts` is None, otherwise of this process's part."""
        wanted: list[tuple[torch.Tensor, TensorSpec, TensorRange]] = []

        def want(name: str, tensor: torch.Tensor, spec: TensorSpec, start: int, stop: int) -> None:
            """Note that the elements `start:stop` are to be read into `tensor`, if `keys` has its name."""
            if name in keys:
                values = tensor.detach()
                flat = values if values.shape == (stop - start,) else flattened(values, spec)
                wanted.append(
                    (
                        values,
                        spec,
                        TensorRange(keys[name], spec.shape, start, stop, flat, spec.dim_order, spec.runs),
                    )
                )

        if parts is None:
            for name, places in places_of(module).items():
                if name in keys and tensor_at(places).is_meta:
                    put(places, empty_like(tensor_at(places), "cpu"))
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                spec = TensorSpec.of(tensor)
                want(name, tensor, spec, 0, spec.numel)
        else:
            tensor_map = parts.tensor_map
            for name, tensor in {**parts.owned_params, **parts.owned_buffers}.items():
                held = tensor_map.held(name, self._world.rank)
                assert held is not None
                want(name, tensor, tensor_map.specs[name], *held)
        fill(self._opened, [part for *_, part in wanted], self._world)
        for values, spec, part in wanted:
            if part.tensor.data_ptr() != values.data_ptr():  # `flattened` had to copy
                values.copy_(view_as(part.tensor, spec))

    def optimizer(self, saved: Mapping[str, Any], optimizer: ShardedOptimizer, tensor_map: TensorMap) -> None:
        """Load the optimizer's state: read this process's ranges, and take all other values from `saved`.

        Args:
            saved: The state in canonical form, with references.
            optimizer: The optimizer with only the parameters of this process.
            tensor_map: Which process holds which elements.
        """
        rank = self._world.rank
        tensor_ranges: list[TensorRange] = []
        states: dict[int, dict[str, Any]] = {}
        for number, name, _ in optimizer.held():
            if number not in saved["state"]:
                continue
            states[number] = optimizer.cut(
                name, {k: v for k, v in saved["state"][number].items() if key_of(v) is None}
            )
            for kind, value in saved["state"][number].items():
                key = key_of(value)
                if key is None or name is None:
                    continue
                spec, held = tensor_map.specs[name], tensor_map.held(name, rank)
                assert held is not None
                flat = torch.empty(held[1] - held[0], dtype=self._opened.dtype_of(key))
                tensor_ranges.append(TensorRange(key, spec.shape, *held, flat, spec.dim_order, spec.runs))
                states[number][kind] = view_as(flat, spec) if tensor_map.holds_whole(name, rank) else flat
        fill(self._opened, tensor_ranges, self._world)
        optimizer.load_parts(saved["param_groups"], states)
