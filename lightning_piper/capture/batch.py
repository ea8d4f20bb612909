"""Batches: nested containers of tensors, taken apart into leaves and put together again, and cut into slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from lightning_piper.capture.listed import Listed, PerSample, entries, may_be_read, tensors_of
from lightning_piper.errors import CaptureError
from lightning_piper.ir.values import TensorSpec


@dataclass(frozen=True)
class _Leaf:
    """Place of a tensor in a structure."""

    index: int


@dataclass(frozen=True)
class BatchSpec:
    """What a batch is made of, without the values: its containers, and the shape and dtype of each tensor.

    Attributes:
        skeleton: the batch with every tensor replaced by its place, and every list with one entry a sample by a `Listed`; all else
            (numbers, strings) is part of the spec.
        specs: the tensors' specs.
        paths: where each tensor stands, for messages, e.g. `['input']` or `[0]`.
        lists: those with one entry a sample.
    """

    skeleton: Any
    specs: tuple[TensorSpec, ...]
    paths: tuple[str, ...]
    lists: tuple[Listed, ...] = ()

    @property
    def size(self) -> int:
        """Samples: the first dimension that all tensors with a dimension share."""
        sizes = {spec.shape[0] for spec in self.specs if spec.shape}
        if len(sizes) != 1:
            found = ", ".join(f"{path or 'batch'}: {list(spec.shape)}" for path, spec in zip(self.paths, self.specs, strict=True))
            raise CaptureError(
                "the batch has no common first dimension to count samples by; every tensor in it must have one "
                f"(tensors without dimensions are passed whole). Found {found or 'no tensor at all'}"
            )
        size = sizes.pop()
        if size == 0:
            raise CaptureError("the batch is empty: its tensors have 0 samples in their first dimension; give at least one")
        return size

    def times(self, replicas: int) -> BatchSpec:
        """The spec of the batches of `replicas` replicas together, when each has one like this."""
        shapes = [(x.shape[0] * replicas, *x.shape[1:]) if x.shape else () for x in self.specs]
        specs = [
            TensorSpec.of(torch.empty(shape, dtype=x.dtype, device="meta")) for shape, x in zip(shapes, self.specs, strict=True)
        ]
        return dataclasses.replace(self, specs=tuple(specs))

    def rebuild(self, leaves: Sequence[torch.Tensor], listed: Callable[[Listed], Any] = lambda listed: None) -> Any:
        """A batch of these tensors; lists with one entry a sample are what `listed` says, or as they were if it gives None."""
        return _rebuild(self.skeleton, leaves, listed)

    def contents(self, leaves: Sequence[torch.Tensor]) -> list[Any]:
        """The lists with one entry a sample."""
        return [_rebuild(listed.content, leaves, lambda listed: None) for listed in self.lists]

    @cached_property
    def structure(self) -> Hashable:
        """Equal for batches that differ in their tensors and in what is in lists with one entry a sample alone."""
        return _structure(self.skeleton)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for batches that one captured graph can serve. Its `repr` is the same in all processes."""
        return (self.structure, tuple((spec.shape, spec.dtype) for spec in self.specs))

    def described(self) -> dict[str, str]:
        """What `key` depends on, as texts by path."""
        return {path: _short(item, self.specs) for path, item in _walk(self.skeleton, "")}


def flatten(batch: Any, what: str = "batch") -> tuple[list[torch.Tensor], BatchSpec]:
    """Tensors of a batch in a fixed order, and the rest of it. Knows dicts, lists, (named) tuples and dataclasses.

    The tensors are made contiguous, for a captured graph has fixed strides. `what` is the word for it in errors.
    """
    flattening = _Flattening(batch if what == "batch" else ())
    try:
        skeleton = flattening.skeleton(batch, "")
    except RecursionError:
        raise CaptureError(f"the {what} is nested too deeply; give tensors in dicts and lists") from None
    except _Unknown as unknown:
        takes, way = ("takes", "in the collate function") if what == "batch" else ("returns", "there, or in a hook that gets it")
        raise CaptureError(
            f"the {what} holds a {unknown.kind} at {what}{unknown.path}; a captured step {takes} tensors, numbers and strings in "
            f"dicts, lists, tuples and dataclasses: convert it {way}"
        ) from None
    leaves = flattening.leaves
    return leaves, BatchSpec(skeleton, tuple(TensorSpec.of(x) for x in leaves), tuple(flattening.paths), tuple(flattening.lists))


class _Unknown(Exception):
    """Something that is neither a tensor, nor a container, nor a constant."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path = kind, path


_CONSTANTS = (bool, int, float, complex, str, bytes)


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


class _Flattening:
    """Takes a batch apart; lists with one entry a sample are those with as many entries as its tensors have samples."""

    def __init__(self, batch: Any) -> None:
        sizes = {x.shape[0] for x in tensors_of(batch) if x.ndim}
        self._samples = (sizes.pop() or None) if len(sizes) == 1 else None
        self.leaves: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.lists: list[Listed] = []

    def skeleton(self, item: Any, path: str) -> Any:
        if type(item) is PerSample:
            return item._listed
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided or item.is_nested:
                raise _Unknown("nested tensor" if item.is_nested else f"{str(item.layout).removeprefix('torch.')} tensor", path)
            self.leaves.append(item.contiguous())
            self.paths.append(path)
            return _Leaf(len(self.leaves) - 1)
        readable = True if self._samples is None else may_be_read(item, self._samples)
        if readable is None:
            return self._listed(path, item, None)
        content = self._content(item, path)
        return content if isinstance(readable, bool) else self._listed(path, content, readable)

    def _listed(self, path: str, content: Any, readable: Any) -> Listed:
        self.lists.append(Listed(len(self.lists), path, content, readable))
        return self.lists[-1]

    def _content(self, item: Any, path: str) -> Any:
        if isinstance(item, Mapping):
            for key in item:
                _check_key(key, path)
        elif not isinstance(item, list | tuple) and not _is_dataclass(item):
            if item is None or isinstance(item, _CONSTANTS):
                return item
            raise _Unknown(type(item).__name__, path)
        return _with(item, [self.skeleton(value, path + end) for end, value in entries(item)])


def _check_key(key: Any, path: str) -> None:
    for part in key if isinstance(key, tuple) else (key,):
        if part is not None and not isinstance(part, (*_CONSTANTS, Enum)):
            raise _Unknown(f"key of type {type(part).__name__}", path)


def _rebuild(item: Any, leaves: Sequence[torch.Tensor], listed: Callable[[Listed], Any]) -> Any:
    if isinstance(item, _Leaf):
        return leaves[item.index]
    if isinstance(item, Listed):
        found = listed(item)
        if found is None and item.readable is None:
            samples = next(x.shape[0] for x in leaves if x.ndim)
            return item.content * (samples // len(item.content))  # of all replicas together
        return _rebuild(item.content, leaves, listed) if found is None else found
    if isinstance(item, Mapping | list | tuple) or _is_dataclass(item):
        return _with(item, [_rebuild(value, leaves, listed) for _, value in entries(item)])
    return item


def _structure(item: Any) -> Hashable:
    """A hashable form that depends on no `repr` or `==` of a user's class: 1, 1.0 and True differ, a nan is itself."""
    if isinstance(item, _Leaf):
        return item
    if isinstance(item, Listed):
        return (Listed, type(item.content), None if item.readable is None else _structure(item.content))
    for base in _CONSTANTS:
        if isinstance(item, base):
            return (type(item), base.__repr__(item))
    keys = tuple(map(_structure_of_key, item)) if isinstance(item, Mapping) else ()
    return (type(item), keys, tuple(_structure(value) for _, value in entries(item)))


def _structure_of_key(key: Any) -> Hashable:
    if isinstance(key, Enum):
        return (type(key), key.name)
    return tuple(map(_structure_of_key, key)) if isinstance(key, tuple) else _structure(key)


def _walk(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All that is no container, and empty containers."""
    inside = [] if isinstance(item, _Leaf | Listed) else list(entries(item))
    if not inside:
        yield path, item
    for end, value in inside:
        yield from _walk(value, path + end)


def _short(item: Any, specs: Sequence[TensorSpec]) -> str:
    if isinstance(item, _Leaf):
        return str(specs[item.index])
    if isinstance(item, Listed):
        return f"{type(item.content).__name__} with an entry for each sample"
    text = repr(item)
    return text if len(text) <= 60 else text[:57] + "..."


def _with(like: Any, values: Sequence[Any]) -> Any:
    """A container like this one that holds `values`."""
    if isinstance(like, Mapping):
        # Mappings such as Hugging Face's BatchEncoding are given to the step as plain dicts unless they are dicts themselves.
        return _of_type(like, dict(zip(like, values, strict=True)))
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*values)
    if isinstance(like, list | tuple):
        return _sequence(like, values)
    return _replace(like, dict(zip((f.name for f in dataclasses.fields(like)), values, strict=True)))


def _sequence(like: list[Any] | tuple[Any, ...], values: Iterable[Any]) -> Any:
    """As the same kind of list where that kind is made from its entries, else as a plain list or tuple."""
    plain = list if isinstance(like, list) else tuple
    try:
        return type(like)(values)
    except TypeError:
        return plain(values)


def _of_type(like: Mapping[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """`entries` as the same kind of dict where that kind is made from a dict (OrderedDict), else as a plain dict."""
    if type(like) is dict or not isinstance(like, dict):
        return entries
    try:
        return type(like)(entries)
    except TypeError:
        return entries


def _replace(item: Any, fields: dict[str, Any]) -> Any:
    # Not `dataclasses.replace`: it would run the user's __init__ and __post_init__ on placeholders.
    copy = object.__new__(type(item))
    for name, value in fields.items():
        object.__setattr__(copy, name, value)
    return copy
