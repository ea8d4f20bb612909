"""Values for modules that were built on the meta device, where tensors have shapes but no data.

Every process computes the initial values of the tensors that it holds, in host memory, one submodule after
another. The submodule receives memory, `reset_parameters()` fills it, the caller takes the values it needs,
and the memory is freed. Each submodule has its own random seed, made of the fit's seed and the submodule's
name. So a value does not depend on the process that computes it or on earlier computations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_piper.errors import PiperError
from lightning_piper.ir.values import TensorSpec

Place = tuple[nn.Module, str]  # (submodule, name of its attribute that has a tensor)
# Canonical name (the first that the module lists) -> places. A tied tensor has several places.
Places = Mapping[str, list[Place]]

HOOK = "piper_init_parameters"
UNWRITTEN = 0xFF  # the bytes of fresh memory: a NaN in every floating-point dtype, and not a valid bool
PRETRAINED = "_piper_pretrained"  # attribute of a model whose values are in files: its `Pretrained`
# Attribute of a tensor whose values are in a file: its `FileMark`. Attribute of a submodule with such
# tensors: its `StoredTensors`.
STORED = "_piper_stored"


class StoredValue(Protocol):
    """A tensor whose values are in a file. A process can read any range of its elements."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def whole(self) -> torch.Tensor:
        """Read all elements."""

    def read(self, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """Read the elements `start:stop` in the order of a spec."""


@dataclass(frozen=True)
class Pretrained:
    """The mark of a model from `piper.from_pretrained`, whose tensors are on the meta device until the first
    batch. It says how tensors that no file has get their initial values.

    Attributes:
        initialize: Name of the method of the model that fills one of its own submodules.
    """

    initialize: str


class FileMark(NamedTuple):
    """The values of a tensor on the meta device, and the version that the tensor had when it was marked.

    If the tensor has another version now, it was changed in place, which has no effect on the meta device.
    Piper then raises an error instead of silently losing the change. The version -1 marks a tensor that was
    changed before it was copied or through `data`.
    """

    value: StoredValue
    version: int


class StoredParameter(nn.Parameter):
    """A parameter on the meta device whose values are in a file. Writes through its `data` count as changes."""

    @property
    def data(self) -> torch.Tensor:
        # Unlike `data` of other parameters, this tensor shares the version counter, which counts writes.
        return self.detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        # `Module.to` assigns a tensor with the same memory or of another dtype, which is not a change. Any
        # other tensor of this shape and dtype has other values. `Known.with_stored` finds a tensor of another
        # shape.
        alike = (tensor.shape, tensor.dtype) == (self.shape, self.dtype)
        if alike and tensor.untyped_storage() is not self.untyped_storage() and STORED in self.__dict__:
            self.__dict__[STORED] = self.__dict__[STORED]._replace(version=-1)
        nn.Parameter.data.__set__(self, tensor)  # type: ignore[attr-defined]


class StoredTensors:
    """The tensors of one submodule whose values are in files, by their names in the submodule.

    The submodule has this object as an attribute, so it may move into a different model. If the submodule is
    copied (`copy.deepcopy`) or pickled, this object marks the tensors of the copy. Without it, a copied
    parameter would not have the mark of the original parameter.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def __getstate__(self) -> dict[str, tuple[torch.Tensor, StoredValue, bool]]:
        marks = {name: tensor.__dict__[STORED] for name, tensor in self.tensors.items()}
        return {
            name: (tensor, marks[name].value, tensor._version == marks[name].version)
            for name, tensor in self.tensors.items()
        }

    def __setstate__(self, state: Mapping[str, tuple[torch.Tensor, StoredValue, bool]]) -> None:
        self.tensors = {name: tensor for name, (tensor, _, _) in state.items()}
        for tensor, value, unchanged in state.values():
            tensor.__dict__[STORED] = FileMark(value, tensor._version if unchanged else -1)


def mark_stored(model: nn.Module, stored: Mapping[str, StoredValue]) -> None:
    """Mark the tensors of a model whose values are in files. Marked tensors that have values are replaced by
    tensors on the meta device.

    Such tensors have values if the constructor made them on a device of its own, for example with
    `torch.Tensor(size)`, although the default device was the meta device.

    Args:
        model: The model, built on the meta device. Its parameters become `StoredParameter`s.
        stored: Name in the model -> tensor in a file. A tied tensor needs only one of its names.
    """
    ids = {id(tensor) for name, tensor in named_tensors(model) if name in stored}
    for places in places_of(model).values():
        tensor = tensor_at(places)
        if id(tensor) in ids and not tensor.is_meta:
            put(places, empty_like(tensor, "meta"))
    tensors = dict(named_tensors(model))
    for name, value in stored.items():
        if type(tensors[name]) is nn.Parameter:
            tensors[name].__class__ = StoredParameter
        tensors[name].__dict__[STORED] = FileMark(value, tensors[name]._version)
    for part in model.modules():
        own = {name: x for name, x in own_tensors(part).items() if STORED in x.__dict__}
        if own:
            part.__dict__[STORED] = StoredTensors(own)


def own_tensors(part: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that belong directly to a submodule, not to its own submodules."""
    return {name: x for name, x in (part._parameters | part._buffers).items() if x is not None}


@dataclass(frozen=True)
class Known:
    """The values that a checkpoint or pretrained files have for a module on the meta device. `name in known`
    says whether a tensor gets its values from there, so that it needs no initial values.

    Attributes:
        loaded: Canonical name -> value.
        later: Names of tensors that are read after the module is distributed; until then they only need
            memory.
        stored: Canonical name -> tensor in a file, of which each process reads its own part.
    """

    loaded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    later: frozenset[str] = frozenset()
    stored: Mapping[str, StoredValue] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.loaded or name in self.later or name in self.stored

    def with_stored(self, module: nn.Module) -> Known:
        """Return the values of `self`, and as `stored` the files' values of the module's tensors on the meta
        device that `piper.from_pretrained` found in files. Tensors with values in `self` keep these values.
        `self.stored` must be empty.

        Raises:
            PiperError: Since `piper.from_pretrained`, the user has changed a tensor, or its shape, or
                replaced a parameter by one on the meta device.
        """
        stored: dict[int, StoredValue] = {}  # id of a tensor of the module -> its values
        # First the tensors that `from_pretrained` has marked and that are still in the module.
        for name, tensor in named_tensors(module):
            mark: FileMark | None = tensor.__dict__.get(STORED)
            if mark is None or not tensor.is_meta:
                continue
            if tensor._version != mark.version:
                raise _changed(name, "was changed in place, which has no effect on the meta device")
            stored[id(tensor)] = _fitting(name, tensor, mark.value)
        # Then the tensors that have replaced a marked tensor in its submodule.
        for path, part in module.named_modules():
            own = own_tensors(part)
            for attribute, original in vars(part)[STORED].tensors.items() if STORED in vars(part) else ():
                now, name = own.get(attribute), f"{path}.{attribute}" if path else attribute
                if now is None or not now.is_meta or id(now) in stored:
                    continue
                if isinstance(now, nn.Parameter):
                    raise _changed(name, "was replaced by a parameter on the meta device")
                # `module.to(dtype)` replaces buffers
                stored[id(now)] = _fitting(name, now, original.__dict__[STORED].value)
        found = {
            name: stored[id(tensor_at(at))]
            for name, at in (places_of(module) if stored else {}).items()
            if id(tensor_at(at)) in stored and name not in self
        }
        return Known(self.loaded, self.later, found)


def _fitting(name: str, tensor: torch.Tensor, value: StoredValue) -> StoredValue:
    """Return `value`. Raise a PiperError if its shape is not the tensor's shape."""
    if value.shape != tensor.shape:
        raise _changed(name, f"has the shape {list(tensor.shape)}, but {list(value.shape)} in its file")
    return value


def _changed(name: str, how: str) -> PiperError:
    return PiperError(
        f"PiperStrategy: {name!r} comes from piper.from_pretrained and {how}. Its values are read at the first "
        "batch. So make this change in transformers, save the model with save_pretrained, and give that folder to "
        "piper.from_pretrained [PIPER-K009]"
    )


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) for all parameters and then all buffers. A tensor with several names occurs once
    for each name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def is_on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer has no data."""
    return any(x.is_meta for x in [*module.parameters(), *module.buffers()])


def places_of(module: nn.Module) -> dict[str, list[Place]]:
    """Return canonical name -> places, for each parameter and buffer of the module."""
    first: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        path, _, attribute = name.rpartition(".")
        places.setdefault(first.setdefault(id(tensor), name), []).append(
            (module.get_submodule(path), attribute)
        )
    return places


def tensor_at(places: list[Place]) -> torch.Tensor:
    part, attribute = places[0]
    tensor = getattr(part, attribute)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def put(places: list[Place], tensor: torch.Tensor) -> None:
    for part, attribute in places:
        setattr(part, attribute, tensor)


def _attributes(tensor: torch.Tensor) -> dict[str, object]:
    return {name: value for name, value in tensor.__dict__.items() if name != STORED}


def like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data` as a parameter or buffer like `tensor`, with the attributes that were set on `tensor`,
    except the mark of stored values. A parameter is a new object that shares memory with `data`. A buffer is
    `data` itself."""
    if not isinstance(tensor, nn.Parameter):
        data.__dict__.update(_attributes(tensor))  # such as the mark of `nn.Buffer`
        return data
    param = nn.Parameter(data, requires_grad=tensor.requires_grad)
    param.__dict__.update(_attributes(tensor))  # attributes set by users, such as "no weight decay"
    return param


def empty_like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a new uninitialized parameter or buffer like `tensor`, with its shape, strides and dtype, on
    `device`."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return like(tensor, data)


def without_initial_values(module: nn.Module, known: Known) -> str | None:
    """Return the error text if a tensor on the meta device cannot get an initial value; None if all of them
    can, or if the module has the method `HOOK`, which then must fill all submodules. Tensors in `known` need
    no initial value."""
    if hasattr(module, HOOK):
        return None
    pretrained, adapters = _initializers(module), _adapter_initializers(module)
    for name, places in places_of(module).items():
        (part, _), *_ = places
        tensor = tensor_at(places)
        if tensor.is_meta and name not in known and id(part) in adapters:
            lost = "Piper does not know its initial value" if adapters[id(part)] is None else ""
            # A write into a tensor on the meta device has no effect, such as the load of a file.
            lost = "it was changed there, where it has no values" if tensor._version > 0 else lost
            if lost:
                return (
                    f"{name!r} is in a PEFT adapter on the meta device, and {lost}. Build the base model with "
                    "from_pretrained of transformers [PIPER-S009]"
                )
        if (
            tensor_at(places).is_meta
            and name not in known
            and id(part) not in pretrained
            and not callable(getattr(part, "reset_parameters", None))
        ):
            kind = type(part).__name__
            return (
                f"{name!r} is on the meta device, and {kind} has no method reset_parameters() to give it an initial "
                f"value. Define {kind}.reset_parameters(), which fills the submodule's own tensors in place "
                "[PIPER-S009]"
            )
    return None


def _initializers(module: nn.Module) -> dict[int, Callable[[], None]]:
    """Return id of a submodule -> a function that gives initial values to the submodule's own tensors. The
    result has the models from `piper.from_pretrained` and all their submodules.

    A model may have models as submodules, such as a vision tower. Each model fills its own submodules, as in
    transformers: the function is the `Pretrained.initialize` method of the nearest model.
    """
    found: dict[int, Callable[[], None]] = {}

    def visit(part: nn.Module, initialize: str, fill: Callable[[nn.Module], None]) -> None:
        fill = getattr(part, initialize, fill)
        found[id(part)] = partial(fill, part)
        for child in part.children():
            visit(child, initialize, fill)

    for model in module.modules():
        pretrained: Pretrained | None = model.__dict__.get(PRETRAINED)
        if pretrained is not None:
            visit(model, pretrained.initialize, getattr(model, pretrained.initialize))
    return found | {part: fill for part, fill in _adapter_initializers(module).items() if fill is not None}


def _adapter_initializers(module: nn.Module) -> dict[int, Callable[[], None] | None]:
    """Return id of a submodule of a PEFT adapter -> a function that gives the submodule's own tensors the
    initial values of PEFT. None instead of a function if these values depend on other tensors, or if this
    package does not know how PEFT makes them.

    PEFT makes the values when it wraps a model, and then moves the adapters to the device of the model. On the
    meta device, they are lost. The models inside of adapters, and copies of their submodules, have no entry.
    """
    found: dict[int, Callable[[], None] | None] = {}

    def visit(part: nn.Module, layer: Any, settings: Mapping[str, Any]) -> None:
        """Add the submodules of `part`, which is inside of the adapter `layer`, or of no adapter (None)."""
        settings = getattr(part, "peft_config", settings)
        if PRETRAINED in vars(part) or type(part).__name__ == "ModulesToSaveWrapper":
            layer = None
        elif type(part).__module__.partition(".")[0] == "peft":
            layer = part
        if layer is not None and own_tensors(part):
            found[id(part)] = _adapter_initializer(part, layer, settings)
        for name, child in part.named_children():
            visit(child, None if name == "base_layer" else layer, settings)

    visit(module, None, {})
    return found


def _adapter_initializer(
    part: nn.Module, layer: Any, settings: Mapping[str, Any]
) -> Callable[[], None] | None:
    """Return the function in `_adapter_initializers` for a submodule of the adapter `layer`."""
    for name, config in settings.items():
        matrices = [getattr(layer, kind, {}) for kind in ("lora_A", "lora_B")]
        if any(name in each and each[name] is part for each in matrices):
            how = config.init_lora_weights
            if how is False:
                return part.reset_parameters  # type: ignore[return-value]
            if how is True or how == "gaussian":
                return partial(layer.reset_lora_parameters, name, how)
    return None


def materialize(module: nn.Module, seed: int, known: Known) -> None:
    """Give values to the tensors on the meta device of a module that one process trains, and values from
    `known` to all tensors that it has. New tensors replace the old ones in the module.

    Args:
        module: The module; some of its tensors may be on the meta device.
        seed: Seed of random initial values.
        known: Values that need not be computed. Tensors in `known.later` stay on the meta device.

    Raises:
        PiperError: Initializing a submodule fails, or leaves a tensor without values.
    """
    if not is_on_meta(module) and not known.loaded:
        return
    places = places_of(module)
    found: dict[str, torch.Tensor] = dict(known.loaded)
    missing = {n for n, at in places.items() if tensor_at(at).is_meta and n not in known}
    initialize(module, places, missing, seed, found.__setitem__)
    for name in [*found, *known.stored]:
        old = tensor_at(places[name])
        value = found[name] if name in found else known.stored[name].whole()
        put(places[name], like(old, value.to(old.dtype)))


def initialize(
    module: nn.Module,
    places: Places,
    names: Collection[str],
    seed: int,
    take: Callable[[str, torch.Tensor], None],
) -> None:
    """Compute initial values without changing the module.

    Meanwhile, tensors on the meta device replace all tensors of the module. While a submodule is initialized,
    it has real memory only for tensors that no earlier submodule lists. So it cannot change a tied tensor of
    another submodule, or a tensor that already has values.

    Args:
        module: The module; its hook is called, if it has one.
        places: The places of its tensors.
        names: Names of the tensors to initialize.
        seed: Seed of random numbers.
        take: Called with the name and value of each tensor.

    Raises:
        PiperError: Initializing a submodule fails, or leaves a tensor without values.
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
    module: nn.Module,
    places: Places,
    group: list[str],
    names: Collection[str],
    seed: int,
    take: Callable[[str, torch.Tensor], None],
) -> None:
    """Compute the initial values of one submodule, and pass the tensors that are in `names` to `take`.
    `group` has the canonical names of the submodule's tensors. Afterwards, the module has its old tensors
    again.

    Raises:
        PiperError: Initializing fails, replaces a tensor, or leaves a tensor without values.
    """
    part, path = places[group[0]][0][0], group[0].rpartition(".")[0]
    what = f"{type(part).__name__}.reset_parameters()"  # the code that an error asks to correct
    reset: Any = part.reset_parameters if hasattr(part, "reset_parameters") else None
    if hasattr(module, HOOK):
        what, reset = f"{HOOK} of the LightningModule", partial(getattr(module, HOOK), path, part)
    elif (fill := _initializers(module).get(id(part))) is not None:
        what, reset = "the model's own initialization", fill
    absent = {name: tensor_at(places[name]) for name in group}
    versions = {}
    # Only this submodule's tensors have memory while `reset` runs.
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
            raise PiperError(
                f"submodule {path!r} ({type(part).__name__}) cannot be initialized: {error}. Correct {what}"
                " [PIPER-S009]"
            ) from error
    for name in group:
        value = tensor_at(places[name]).detach()
        old = absent[name]
        if (value.shape, value.dtype) != (old.shape, old.dtype) or value.is_meta:
            raise PiperError(
                f"initializing submodule {path!r} has replaced the tensor {name!r} by a tensor of another shape or "
                "dtype, or on the meta device. Fill the existing tensor in place [PIPER-S009]"
            )
        unwritten = name in names and value._version == versions[name] and value.numel() > 0
        if unwritten and bool((_bytes(value) == UNWRITTEN).all()):
            raise PiperError(
                f"{name!r} is on the meta device, and initializing submodule {path!r} "
                f"({type(part).__name__}) leaves it without values. Fill all tensors of the submodule in {what}"
                " [PIPER-S009]"
            )
        if name in names:
            take(name, value)
        del value
        put(places[name], old)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _seed_of(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=7).digest())


def load_state(
    module: nn.Module, state: Mapping[str, Any], strict: bool, keep: bool = False
) -> dict[str, torch.Tensor]:
    """Load a state dict into a module that has tensors on the meta device. Tensors with data receive their
    values in place. Tensors on the meta device stay in the module, and their values are returned.

    Args:
        module: The module.
        state: The state dict.
        strict: Whether to raise an error if the names differ from the module's.
        keep: Change no tensor, and return the values of all tensors.

    Returns:
        Canonical name -> value. The result has the tensors on the meta device that the state dict has. With
        `keep`, it has all tensors that the state dict has. A value shares memory with the state dict's tensor.

    Raises:
        RuntimeError: torch's error, if names differ and `strict` is set, or if shapes differ.
    """
    places = places_of(module)
    before = {name: tensor_at(at) for name, at in places.items()}
    found: dict[str, torch.Tensor] = {}
    try:
        # The module itself assigns, because its own hooks may rename entries and change values.
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
