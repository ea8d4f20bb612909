"""Batches: nested containers of tensors, taken apart into leaves and put together again, and cut into slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_piper.errors import CaptureError
from lightning_piper.ir.values import TensorSpec


@dataclass(frozen=True)
class _Leaf:
    """Place of a tensor in a structure."""

    index: int


@dataclass(frozen=True)
class BatchLayout:
    """A batch without its tensors.

    Attributes:
        skeleton: the batch with every tensor replaced by its place; all else (numbers, strings) is part of the layout.
        specs: the tensors' specs.
        paths: where each tensor stands, for messages, e.g. `['input']` or `[0]`.
    """

    skeleton: Any
    specs: tuple[TensorSpec, ...]
    paths: tuple[str, ...]

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

    def times(self, replicas: int) -> BatchLayout:
        """The layout of the batches of `replicas` replicas together, when each has one like this."""
        shapes = [(x.shape[0] * replicas, *x.shape[1:]) if x.shape else () for x in self.specs]
        specs = [
            TensorSpec.of(torch.empty(shape, dtype=x.dtype, device="meta")) for shape, x in zip(shapes, self.specs, strict=True)
        ]
        return dataclasses.replace(self, specs=tuple(specs))

    def rebuild(self, leaves: list[torch.Tensor]) -> Any:
        return _rebuild(self.skeleton, leaves)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for batches that one captured graph can serve."""
        return (repr(self.skeleton), tuple((spec.shape, spec.dtype) for spec in self.specs))


def flatten(batch: Any, what: str = "batch") -> tuple[list[torch.Tensor], BatchLayout]:
    """Tensors of a batch in a fixed order, and the rest of it. Knows dicts, lists, (named) tuples and dataclasses.

    The tensors are made contiguous, for a captured graph has fixed strides. `what` is the word for it in errors.
    """
    leaves: list[torch.Tensor] = []
    paths: list[str] = []
    try:
        skeleton = _skeleton(batch, "", leaves, paths)
    except RecursionError:
        raise CaptureError(f"the {what} is nested too deeply; give tensors in dicts and lists") from None
    except _Unknown as unknown:
        takes, way = ("takes", "in the collate function") if what == "batch" else ("returns", "there, or in a hook that gets it")
        raise CaptureError(
            f"the {what} holds a {unknown.kind} at {what}{unknown.path}; a captured step {takes} tensors, numbers and strings in "
            f"dicts, lists, tuples and dataclasses: convert it {way}"
        ) from None
    return leaves, BatchLayout(skeleton, tuple(TensorSpec.of(x) for x in leaves), tuple(paths))


class _Unknown(Exception):
    """Something that is neither a tensor, nor a container, nor a constant."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path = kind, path


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _skeleton(item: Any, path: str, leaves: list[torch.Tensor], paths: list[str]) -> Any:
    if isinstance(item, torch.Tensor):
        leaves.append(item.contiguous())
        paths.append(path)
        return _Leaf(len(leaves) - 1)
    if isinstance(item, Mapping):
        # Mappings such as Hugging Face's BatchEncoding are given to the step as plain dicts unless they are dicts themselves.
        entries = {k: _skeleton(v, f"{path}[{k!r}]", leaves, paths) for k, v in item.items()}
        return _of_type(item, entries)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_skeleton(v, f"{path}.{k}", leaves, paths) for k, v in zip(item._fields, item, strict=True)))
    if isinstance(item, list | tuple):
        return type(item)(_skeleton(v, f"{path}[{i}]", leaves, paths) for i, v in enumerate(item))
    if _is_dataclass(item):
        fields = [f.name for f in dataclasses.fields(item)]
        return _replace(item, {k: _skeleton(getattr(item, k), f"{path}.{k}", leaves, paths) for k in fields})
    if item is None or isinstance(item, bool | int | float | complex | str | bytes):
        return item
    raise _Unknown(type(item).__name__, path)


def _rebuild(item: Any, leaves: list[torch.Tensor]) -> Any:
    if isinstance(item, _Leaf):
        return leaves[item.index]
    if isinstance(item, dict):
        return _of_type(item, {k: _rebuild(v, leaves) for k, v in item.items()})
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_rebuild(v, leaves) for v in item))
    if isinstance(item, list | tuple):
        return type(item)(_rebuild(v, leaves) for v in item)
    if _is_dataclass(item):
        return _replace(item, {f.name: _rebuild(getattr(item, f.name), leaves) for f in dataclasses.fields(item)})
    return item


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
