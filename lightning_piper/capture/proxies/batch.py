"""Flatten a batch (nested containers of tensors) into tensors and a spec, and rebuild the batch from both."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import torch

from lightning_piper.capture.proxies.arrays import is_array, is_numeric, tensor_of, to_array, to_tensor
from lightning_piper.capture.proxies.container_objects import ContainerObject, RepeatedObject, attributes_of
from lightning_piper.capture.proxies.data_dependent_shapes import (
    DataDependentTensor,
    FunctionResult,
    PerSampleList,
)
from lightning_piper.capture.proxies.deferred_numbers import is_deferred
from lightning_piper.capture.proxies.metric_values import MetricValueProxy
from lightning_piper.capture.proxies.numbers import NumberProxy
from lightning_piper.capture.proxies.opaque_content import Carried, OpaqueObject, is_stand_in, item_of
from lightning_piper.capture.proxies.sample_lists import (
    SampleList,
    entries,
    is_object,
    may_be_read,
    tensors_of,
)
from lightning_piper.common.containers import container_like
from lightning_piper.common.limits import kind_of
from lightning_piper.errors import CaptureError
from lightning_piper.ir.metric_calls import Later
from lightning_piper.ir.regions import Undivided
from lightning_piper.ir.values import TensorSpec


@dataclass(frozen=True)
class _TensorPosition:
    """The position of a tensor in a structure. With the kind "array" or "number", the structure has an array
    or a number there, which was converted to the tensor."""

    index: int
    kind: Literal["tensor", "array", "number"] = "tensor"


@dataclass(frozen=True)
class BatchSpec:
    """The layout of a batch without its values: its containers, and the shape and dtype of each tensor.

    The result of a step has such a spec too. Its entries `FunctionResult`, `Later` and `NumberProxy` are computed
    when the result is rebuilt.

    Attributes:
        skeleton: the batch with an entry of the spec in place of each tensor (`_TensorPosition`), each list
            with one entry per sample (`SampleList`), each object with tensors (`ContainerObject`) and each
            object without tensors (`OpaqueObject`). All other values (numbers, strings) are part of the spec.
        specs: the tensors' specs.
        paths: the path of each tensor in the batch, used in messages, e.g. `['input']` or `[0]`.
        carried: the lists with one entry per sample, and the objects without tensors. Of these, only the
            tensors in the lists are inputs of the graph.
        batches: how many batches with this layout a step gets at once: one for each replica.
    """

    skeleton: Any
    specs: tuple[TensorSpec, ...]
    paths: tuple[str, ...]
    carried: tuple[Carried, ...] = ()
    batches: int = 1

    @cached_property
    def undivided(self) -> Undivided | None:
        """Why the batch cannot be cut by samples.

        None if it can be cut: at least one tensor has a dimension, and all such tensors have the same first
        dimension.
        """
        if len({spec.shape[0] for spec in self.specs if spec.shape}) == 1:
            return None
        if not self.specs:
            return Undivided(self.batches, "it has no tensor")
        shapes = ", ".join(
            f"{path or 'batch'}: {list(spec.shape)}"
            for path, spec in zip(self.paths, self.specs, strict=True)
        )
        return Undivided(self.batches, f"its tensors have no common first dimension: {shapes}")

    @property
    def size(self) -> int:
        """The number of samples: the first dimension, if it is the same in all tensors with a dimension.

        Otherwise, as in Lightning, it is the first dimension of the first tensor that has a dimension, times
        `batches`. A first dimension of 0, and a batch without such a tensor, counts as 1.

        Raises:
            CaptureError: the shared first dimension is 0.
        """
        first = next((spec.shape[0] for spec in self.specs if spec.shape), 1)
        if self.undivided is not None:
            return max(1, first) * self.batches
        if first == 0:
            raise CaptureError(
                "the batch is empty: its tensors have 0 samples in their first dimension. Give at least one sample"
                " [PIPER-C009]"
            )
        return first

    def times(self, replicas: int) -> BatchSpec:
        """Return the spec of the batches of all replicas together, if each replica has a batch of this spec.

        The first dimension of each tensor is multiplied by `replicas`. A batch that cannot be cut keeps its
        tensors' specs, and only `batches` changes.
        """
        if self.undivided is not None:
            return dataclasses.replace(self, batches=replicas)
        shapes = [(x.shape[0] * replicas, *x.shape[1:]) if x.shape else () for x in self.specs]
        specs = [TensorSpec.contiguous(shape, x.dtype) for shape, x in zip(shapes, self.specs, strict=True)]
        return dataclasses.replace(self, specs=tuple(specs), batches=replicas)

    def rebuild(
        self,
        leaves: Sequence[torch.Tensor],
        carried: Callable[[Any], Any] = lambda item: None,
        array: Callable[[torch.Tensor], Any] = to_array,
    ) -> Any:
        """Return a batch with this layout that holds these tensors.

        Args:
            carried: returns the replacement of a list or object in `carried`, or None to keep the original.
                It also returns the value of a metric object's result.
            array: converts a tensor to an array.
        """
        return _Rebuilder(leaves, carried, array).item(self.skeleton)

    @property
    def computed(self) -> list[Later]:
        """The results of metric objects that the structure holds."""
        return [item for item in self.entries.values() if isinstance(item, Later)]

    @property
    def entries(self) -> dict[str, Any]:
        """Path -> entry of the skeleton, for all entries that are not containers."""
        return dict(_walk(self.skeleton, ""))

    def contents(self, leaves: Sequence[torch.Tensor]) -> list[Any]:
        """Return the lists and objects of `carried`. These tensors are put into the lists."""
        return [_Rebuilder(leaves, lambda item: None).item(item) for item in self.carried]

    @cached_property
    def structure(self) -> Hashable:
        """A key that is equal for batches that differ only in their tensors and in the contents of
        `carried`."""
        return _structure(self.skeleton)

    def leaves_of(self, batch: Any) -> list[torch.Tensor] | None:
        """Return the tensors of another batch, if this spec certainly also describes that batch.

        Return None if the spec does not describe the batch, or if only `flatten` can decide. This is the fast
        path for flat lists, tuples and dicts that hold only plain tensors.
        """
        if not self._is_flat or type(batch) is not type(self.skeleton) or len(batch) != len(self.specs):
            return None
        given = batch
        if type(batch) is dict:
            if list(batch) != list(self.skeleton):
                return None
            given = batch.values()
        for x, spec in zip(given, self.specs, strict=True):
            if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
                return None
            if (
                x.shape != spec.shape
                or x.dtype != spec.dtype
                or not x.is_contiguous()
                or x.stride() != spec.stride
            ):
                return None
        return list(given)

    @cached_property
    def _is_flat(self) -> bool:
        """Whether the batch is a list, tuple or dict that holds only plain tensors."""
        if type(self.skeleton) not in (list, tuple, dict):
            return False
        items = self.skeleton.values() if type(self.skeleton) is dict else self.skeleton
        return list(items) == [_TensorPosition(i) for i in range(len(self.specs))]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for batches that one captured graph can serve.

        Its `repr` is the same in all processes.
        """
        return (self.structure, tuple((spec.shape, spec.dtype) for spec in self.specs))

    def described(self) -> dict[str, str]:
        """Return path -> short text for each tensor, constant, list and object of the batch. Messages use it to
        show what differs between two batches."""
        return {path: _short(item, self.specs) for path, item in self.entries.items()}


def flatten(batch: Any, what: str = "batch") -> tuple[list[torch.Tensor], BatchSpec]:
    """Return the tensors of a batch in a fixed order, and the spec of everything else.

    Tensors are found in dicts, lists, tuples, dataclasses, and attributes of objects. They are made
    contiguous, because a captured graph has fixed strides. Numeric numpy arrays are converted to tensors.

    Args:
        batch: the structure, which is not changed.
        what: the name of the structure in errors. Only a "batch" may hold objects without tensors.

    Raises:
        CaptureError: the structure holds a value that a captured step does not support, or is nested too
            deeply.
    """
    try:
        flattening = _Flattener(batch, given=what == "batch")
        skeleton = flattening.skeleton(batch, "")
    except RecursionError:
        raise CaptureError(
            f"the {what} is nested too deeply, or contains itself. Give tensors in a few levels of dicts and lists"
            " [PIPER-C009]"
        ) from None
    except _UnsupportedObject as unknown:
        of_call = what.startswith("call")  # the path in the arguments of a call is not what the user wrote
        way = next((way for begin, way in _WAYS.items() if what.startswith(begin)), "in the step")
        place = f"batch{unknown.path}" if what == "batch" else "" if of_call else unknown.path
        raise CaptureError(
            f"the {what} holds {unknown.kind}{f' at {place}' if place else ''}. A captured step supports dense tensors "
            f"of torch's own classes, numbers and strings in dicts, lists, tuples and dataclasses. Convert it {way} [PIPER-C009]"
        ) from None
    leaves = flattening.leaves
    return leaves, BatchSpec(
        skeleton, tuple(TensorSpec.of(x) for x in leaves), tuple(flattening.paths), tuple(flattening.carried)
    )


# Beginning of `what` in `flatten` -> where to convert a value that a captured step does not support.
_WAYS = {
    "batch": "in the collate function",
    "call": "before the call",
    "result": "before it is returned",
    "state": "before the step stores it",
}


class _UnsupportedObject(Exception):
    """Raised for a value that a captured step does not support.

    Attributes:
        kind: describes the value, with its article.
        path: its path in the structure.
    """

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path = kind, path


_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type,
    type(Ellipsis),
)


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


class _Flattener:
    """A traversal that collects the tensors of one batch and builds its skeleton.

    Args:
        batch: the whole batch.
        given: whether this is a batch rather than a result of a step.
    """

    def __init__(self, batch: Any, given: bool) -> None:
        sizes = {x.shape[0] for x in tensors_of(batch) if not x.is_nested and x.ndim} if given else set()
        # the number of samples, None if it is not known
        self._samples = (sizes.pop() or None) if len(sizes) == 1 else None
        self._given = given
        self._opened: dict[int, int] = {}  # id of an object with tensors that was visited -> its index
        self.leaves: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.carried: list[Carried] = []

    def skeleton(self, item: Any, path: str) -> Any:
        """Return the spec's entry for `item`, and collect the tensors inside of it.

        The order of the tests matters: a placeholder is tested before the kind of value for which it stands,
        because `isinstance` treats it as such a value. A list with one entry for each sample becomes a
        `SampleList` (see `may_be_read`).

        Args:
            path: the path of the item in the batch.
        """
        if is_stand_in(item):
            return item_of(item)
        if type(item) is MetricValueProxy:
            return item.computed
        if isinstance(item, slice):
            return FunctionResult(
                slice, [self.skeleton(value, path) for value in (item.start, item.stop, item.step)], {}
            )
        if type(item) is PerSampleList:
            return FunctionResult(item.function, [self.skeleton(value, path) for value in item.tensors], {})
        if type(item) is DataDependentTensor:
            kwargs = {name: self.skeleton(value, path) for name, value in item.kwargs.items()}
            return FunctionResult(item.function, [self.skeleton(value, path) for value in item.args], kwargs)
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided or item.is_nested:
                raise _UnsupportedObject(
                    "a nested tensor"
                    if item.is_nested
                    else f"a {str(item.layout).removeprefix('torch.')} tensor",
                    path,
                )
            if self._given and type(item).__module__.partition(".")[0] not in ("torch", "lightning_piper"):
                # The graph would lose the attributes of the subclass, and `isinstance` in the step would be
                # False.
                raise _UnsupportedObject(f"{kind_of(item)}, a subclass of torch.Tensor,", path)
            return self._leaf(item.contiguous(), path)
        if is_deferred(item):
            return self._leaf(item.tensor, path, "number")
        if is_array(item):
            return self._leaf(tensor_of(item).contiguous(), path, "array")
        if is_numeric(item) and (self._samples is None or item.shape[:1] in ((), (self._samples,))):
            return self._leaf(to_tensor(item), path, "array")
        if self._samples is None:
            return self._whole(path, item)
        readable = may_be_read(item, self._samples)
        if readable is None:
            return self._carry(SampleList, path, item, None)
        content = self._content(item, path)
        return content if isinstance(readable, bool) else self._carry(SampleList, path, content, readable)

    def _leaf(
        self, tensor: torch.Tensor, path: str, kind: Literal["tensor", "array", "number"] = "tensor"
    ) -> _TensorPosition:
        self.leaves.append(tensor)
        self.paths.append(path)
        return _TensorPosition(len(self.leaves) - 1, kind)

    def _whole(self, path: str, item: Any) -> Any:
        """Return the entry for `item` in a structure whose number of samples is unknown.

        In a batch, a list without tensors becomes an `OpaqueObject`, because the list may have one entry for
        each sample, such as texts for the nodes of graphs.
        """
        listed = self._given and type(item) is list and item and next(tensors_of(item), None) is None
        return self._carry(OpaqueObject, path, item) if listed else self._content(item, path)

    def _carry(self, kind: Callable[..., Carried], path: str, *what: Any) -> Carried:
        self.carried.append(kind(len(self.carried), path, *what))
        return self.carried[-1]

    def _content(self, item: Any, path: str) -> Any:
        """Return the skeleton's entry for an item that is neither a tensor nor an array. The callers handle
        lists with one element for each sample."""
        if is_object(item) and (id(item) in self._opened or next(tensors_of(item), None) is not None):
            _check_copies(item, path)
            return self._open(item, path)
        if isinstance(item, weakref.ref) and (index := self._opened.get(id(item()))) is not None:
            return RepeatedObject(index, weak=True)
        if isinstance(item, Mapping):
            for key in item:
                _check_key(key, path)
        elif not isinstance(item, list | tuple) and not _is_dataclass(item):
            if isinstance(item, _CONSTANTS):
                return item
            if not self._given:
                raise _UnsupportedObject(kind_of(item), path)
            return self._carry(OpaqueObject, path, item)
        _check_copies(item, path)
        values = [self.skeleton(value, path + end) for end, value in entries(item)]
        try:
            return _with(item, values)
        except _NotCopyable as error:
            raise _UnsupportedObject(f"{error}, which cannot be copied with other contents,", path) from error

    def _open(self, item: Any, path: str) -> ContainerObject | RepeatedObject:
        """Return the entry for an object that holds tensors. At the object's first occurrence, this is a
        `ContainerObject` with the entries of its attributes, later a `RepeatedObject`."""
        if id(item) in self._opened:
            return RepeatedObject(self._opened[id(item)], weak=False)
        index = self._opened[id(item)] = len(self._opened)
        found = ContainerObject(index, type(item))
        for name, value in (attributes_of(item) or {}).items():
            found.attributes[name] = self.skeleton(value, f"{path}.{name}")
        return found


def _check_copies(item: Any, path: str) -> None:
    if hasattr(type(item), "__del__"):
        raise _UnsupportedObject(f"{kind_of(item)}, whose __del__ would also run for copies,", path)


def _check_key(key: Any, path: str) -> None:
    for part in key if isinstance(key, tuple) else (key,):
        if not isinstance(part, (*_CONSTANTS, Enum)):
            raise _UnsupportedObject(f"a key of type {type(part).__name__}", path)


class _Rebuilder:
    """A builder of one batch from its skeleton. Its arguments are explained at `BatchSpec.rebuild`."""

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        carried: Callable[[Any], Any],
        array: Callable[[torch.Tensor], Any] = to_array,
    ) -> None:
        self._leaves, self._carried, self._array = leaves, carried, array
        self._objects: dict[int, Any] = {}

    def item(self, item: Any) -> Any:
        """Return the value for an entry of the skeleton."""
        if isinstance(item, _TensorPosition):
            leaf = self._leaves[item.index]
            return (
                leaf.item() if item.kind == "number" else self._array(leaf) if item.kind == "array" else leaf
            )
        if isinstance(item, SampleList | OpaqueObject):
            return self._carry(item)
        if isinstance(item, Later):
            return self._carried(item)
        if type(item) is NumberProxy:
            return item.get()
        if isinstance(item, FunctionResult):
            kwargs = {name: self.item(value) for name, value in item.kwargs.items()}
            return item.function(*map(self.item, item.args), **kwargs)
        if isinstance(item, ContainerObject):
            made = self._objects[item.index] = item.empty()
            return item.fill(made, {name: self.item(value) for name, value in item.attributes.items()})
        if isinstance(item, RepeatedObject):
            return weakref.ref(self._objects[item.index]) if item.weak else self._objects[item.index]
        if isinstance(item, Mapping | list | tuple) or _is_dataclass(item):
            return _with(item, [self.item(value) for _, value in entries(item)])
        return item

    def _carry(self, item: Carried) -> Any:
        """Return the value for a list with an entry for each sample, or for an opaque object."""
        found = self._carried(item)
        if found is not None:
            return found
        if isinstance(item, OpaqueObject):
            return item.content
        if item.readable is None:
            samples = next(x.shape[0] for x in self._leaves if x.ndim)
            # the batches of all replicas have this list, so repeat its entries
            return item.content * (samples // len(item.content))
        return self.item(item.content)


def _structure(item: Any) -> Hashable:
    """Return a hashable key of a skeleton's entry, without the user's `repr` or `==`.

    For this key, 1, 1.0 and True differ, and nan equals nan.
    """
    if isinstance(item, _TensorPosition | RepeatedObject):
        return item
    if isinstance(item, FunctionResult):
        return (
            item.function,
            tuple(map(_structure, item.args)),
            tuple((k, _structure(x)) for k, x in item.kwargs.items()),
        )
    if isinstance(item, SampleList):
        return (SampleList, type(item.content), None if item.readable is None else _structure(item.content))
    if isinstance(item, OpaqueObject):
        return (OpaqueObject, type(item.content))
    if isinstance(item, ContainerObject):
        return (item.kind, tuple(item.attributes), tuple(map(_structure, item.attributes.values())))
    if isinstance(item, torch.device):
        return (torch.device, item.type)  # the index differs between processes
    for base in _CONSTANTS:
        if isinstance(item, base):
            return (type(item), base.__repr__(item))  # type: ignore[call-arg]
    keys = tuple(map(_structure_of_key, item)) if isinstance(item, Mapping) else ()
    return (type(item), keys, tuple(_structure(value) for _, value in entries(item)))


def _structure_of_key(key: Any) -> Hashable:
    if isinstance(key, Enum):
        return (type(key), key.name)
    return tuple(map(_structure_of_key, key)) if isinstance(key, tuple) else _structure(key)


def _walk(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Iterate over all leaves and empty containers of a skeleton, each with its path."""
    if isinstance(item, ContainerObject):
        inside = [(f".{name}", value) for name, value in item.attributes.items()]
    else:
        inside = (
            []
            if isinstance(item, _TensorPosition | SampleList | OpaqueObject | RepeatedObject | Later)
            else list(entries(item))
        )
    if not inside:
        yield path, item
    for end, value in inside:
        yield from _walk(value, path + end)


def _short(item: Any, specs: Sequence[TensorSpec]) -> str:
    """Return a short text of an item of the batch for messages."""
    if isinstance(item, _TensorPosition):
        return str(specs[item.index])
    if isinstance(item, SampleList):
        return f"{type(item.content).__name__} with an entry for each sample"
    if isinstance(item, OpaqueObject):
        return f"object of type {type(item.content).__name__}"
    text = repr(item)
    return text if len(text) <= 60 else text[:57] + "..."


def _with(like: Any, values: Sequence[Any]) -> Any:
    """Return a container like `like` that holds `values`.

    Raises:
        _NotCopyable: the container's class does not allow other contents.
    """
    if _is_dataclass(like) and not isinstance(like, Mapping):
        return _replace(like, dict(zip((f.name for f in dataclasses.fields(like)), values, strict=True)))
    try:
        return container_like(like, values)
    except Exception as error:  # raised by the user's class
        raise _NotCopyable(kind_of(like)) from error


class _NotCopyable(Exception):
    """Raised for a container class that cannot be copied with other contents."""


def _replace(item: Any, fields: dict[str, Any]) -> Any:
    # `dataclasses.replace` would run the user's __init__ and __post_init__ on placeholders.
    made = object.__new__(type(item))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
