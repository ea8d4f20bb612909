"""Values for modules that were built on the meta device, where tensors have shapes and no data.

Every process computes the initial values of what it holds by itself, in host memory, one submodule after another: the submodule
gets memory, `reset_parameters()` fills it, the caller takes what it wants, and the memory is free again. Random numbers begin anew
for each submodule, from a seed made of the fit's and the submodule's name, so a value depends neither on who computes it nor on
what was computed before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_piper.errors import PiperError

Place = tuple[nn.Module, str]  # a submodule and the attribute under which it has a tensor
Places = Mapping[str, list[Place]]  # by canonical name: the first under which the module lists a tensor; several if it is tied

HOOK = "piper_init_parameters"
UNWRITTEN = 0xFF  # the bytes of fresh memory: not a number in every floating-point dtype, and no bool


@dataclass(frozen=True)
class Known:
    """What a checkpoint brings of the values of a module on the meta device.

    Attributes:
        loaded: canonical name -> value.
        later: names that are read once the module is distributed; they need memory only.
    """

    loaded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    later: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.loaded or name in self.later


def is_on_meta(module: nn.Module) -> bool:
    """Is any parameter or buffer without data?"""
    return any(x.is_meta for x in [*module.parameters(), *module.buffers()])


def places_of(module: nn.Module) -> dict[str, list[Place]]:
    """Where each tensor is."""
    first: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        path, _, attribute = name.rpartition(".")
        places.setdefault(first.setdefault(id(tensor), name), []).append((module.get_submodule(path), attribute))
    return places


def tensor_at(places: list[Place]) -> torch.Tensor:
    part, attribute = places[0]
    tensor = getattr(part, attribute)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def put(places: list[Place], tensor: torch.Tensor) -> None:
    for part, attribute in places:
        setattr(part, attribute, tensor)


def like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`data` as a parameter or buffer like `tensor`."""
    if not isinstance(tensor, nn.Parameter):
        return data
    param = nn.Parameter(data, requires_grad=tensor.requires_grad)
    param.__dict__.update(tensor.__dict__)  # marks that users set, such as "no weight decay"
    return param


def empty_like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Room for a parameter or buffer like this one."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return like(tensor, data)


def without_initial_values(module: nn.Module, known: Known) -> str | None:
    """What is wrong with a module of which tensors on the meta device cannot be given initial values; None if nothing is."""
    if hasattr(module, HOOK):
        return None
    for name, places in places_of(module).items():
        part, attribute = places[0]
        if tensor_at(places).is_meta and name not in known and not callable(getattr(part, "reset_parameters", None)):
            path = name.rpartition(".")[0]
            return (
                f"{attribute!r} of submodule {path!r} ({type(part).__name__}) is on the meta device, and the class has no "
                "reset_parameters() to give it initial values; define this method for the tensors that the submodule has itself, "
                f"or {HOOK}(self, name, part) in the LightningModule, which is called for each such submodule instead"
            )
    return None


def materialize(module: nn.Module, seed: int, known: Known) -> None:
    """Give all of a module values, where it is whole in one process.

    Args:
        module: parts of which may be on the meta device.
        seed: of random initial values.
        known: what need not be computed.
    """
    if not is_on_meta(module) and not known.loaded:
        return
    places = places_of(module)
    found: dict[str, torch.Tensor] = dict(known.loaded)
    missing = {n for n, at in places.items() if tensor_at(at).is_meta and n not in known}
    initialize(module, places, missing, seed, found.__setitem__)
    for name, value in found.items():
        old = tensor_at(places[name])
        put(places[name], like(old, value.to(old.dtype)))


def initialize(
    module: nn.Module, places: Places, names: Collection[str], seed: int, take: Callable[[str, torch.Tensor], None]
) -> None:
    """Compute initial values; the module stays as it is.

    All its tensors are set aside meanwhile. A submodule's are there while it is initialised, and then only those that are first
    its own: it cannot change a tied tensor of another one, nor what has values already, wherever these are.

    Args:
        module: of which the values are; its hook is called, if it has one.
        places: of its tensors.
        names: which ones are wanted.
        seed: of random numbers.
        take: called with the name and value of each.

    Raises:
        PiperError: initialising a submodule fails, or leaves a tensor without values.
    """
    groups: dict[int, list[str]] = {}
    for name, at in places.items():
        groups.setdefault(id(at[0][0]), []).append(name)
    aside = {name: tensor_at(at) for name, at in places.items()}
    try:
        for name, at in places.items():
            put(at, empty_like(aside[name], "meta"))
        for group in groups.values():
            if not set(group).isdisjoint(names):
                _initialize_one(module, places, group, names, seed, take)
    finally:
        for name, at in places.items():
            put(at, aside[name])


def _initialize_one(
    module: nn.Module, places: Places, group: list[str], names: Collection[str], seed: int,
    take: Callable[[str, torch.Tensor], None],
) -> None:  # fmt: skip
    part, path = places[group[0]][0][0], group[0].rpartition(".")[0]
    reset: Any = partial(getattr(module, HOOK), path, part) if hasattr(module, HOOK) else getattr(part, "reset_parameters")  # noqa: B009
    absent = {name: tensor_at(places[name]) for name in group}
    versions = {}
    for name in group:
        fresh = empty_like(absent[name], "cpu")
        fresh.untyped_storage().fill_(UNWRITTEN)  # type: ignore[attr-defined]
        put(places[name], fresh)
        versions[name] = fresh._version
    with isolate_rng(), torch.no_grad():
        torch.manual_seed(_seed_of(seed, path))
        try:
            with torch.device("cpu"):
                reset()
        except Exception as error:
            raise PiperError(f"submodule {path!r} ({type(part).__name__}) cannot be initialised: {error}") from error
    for name in group:
        value = tensor_at(places[name]).detach()
        old = absent[name]
        if (value.shape, value.dtype) != (old.shape, old.dtype) or value.is_meta:
            raise PiperError(f"initialising submodule {path!r} has made another tensor of {name!r}: fill the one that is there")
        if value._version == versions[name] and value.numel() and bool((_bytes(value) == UNWRITTEN).all()):
            raise PiperError(
                f"{name!r} is on the meta device, and initialising submodule {path!r} ({type(part).__name__}) leaves it without "
                f"values; let its reset_parameters(), or {HOOK} of the LightningModule, fill all tensors that the submodule has"
            )
        if name in names:
            take(name, value)
        del value
        put(places[name], old)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _seed_of(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=7).digest())


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool, keep: bool = False) -> dict[str, torch.Tensor]:
    """Load a state dict into a module on the meta device: what has data gets the values.

    Args:
        module: that gets them.
        state: its state dict.
        strict: refuse other names than the module has.
        keep: change nothing, and return all values.

    Returns:
        The values of tensors on the meta device, which stay there, by canonical name.
    """
    places = places_of(module)
    before = {name: tensor_at(at) for name, at in places.items()}
    found: dict[str, torch.Tensor] = {}
    try:
        # Let the module itself assign, for its own hooks may rename entries and change values.
        module.load_state_dict(state, strict=strict, assign=True)
        for name, at in places.items():
            new = [x for part, attribute in at if (x := getattr(part, attribute)) is not before[name]]
            if new and (keep or before[name].is_meta):
                found[name] = new[-1].detach()
            elif new:
                with torch.no_grad():
                    before[name].copy_(new[-1])
    finally:
        for name, at in places.items():
            put(at, before[name])
    return found
