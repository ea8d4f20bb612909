"""Lists and tuples of a batch that have one entry a sample, beside its tensors: file names, texts, ids.

A graph is captured for a number of samples, not for these ones. The step gets something that has the list's length and can be
handed on (`predict_step` may return it). Reading it is a guard where the step gets the whole list, and refused where it gets the
samples of a microbatch, or of all replicas (`carried`).

A list of containers of tensors, as many as there are samples, may be a list of samples, or of parts of the batch that have the
samples in their first dimension. A step that gets the whole batch may read it, one that gets a microbatch may not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_piper.capture.opened import attributes_of, entries_of


@dataclass(frozen=True, eq=False)
class Listed:
    """Stands in a batch spec for a list with one entry a sample.

    Attributes:
        index: of what the batch carries.
        path: where it stands.
        content: the list, with every tensor replaced by its place.
        readable: for how many samples the step gets it as it is; None if it has no tensors.
    """

    index: int
    path: str
    content: Any
    readable: Callable[[int], bool] | None = None


def entries(item: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with the end of its path."""
    if isinstance(item, dict):
        yield from ((f"[{key!r}]", value) for key, value in item.items())
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        yield from ((f".{key}", value) for key, value in zip(item._fields, item, strict=True))
    elif isinstance(item, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from ((f".{field.name}", getattr(item, field.name)) for field in dataclasses.fields(item))
    elif isinstance(item, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in item.items())


def tensors_of(item: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors in it, in containers and objects. `seen`: what the recursion has been in."""
    if isinstance(item, torch.Tensor):
        yield item
        return
    seen = set() if seen is None else seen
    if id(item) in seen:
        return
    seen.add(id(item))
    for _, value in entries_of(item) if is_object(item) else entries(item):
        yield from tensors_of(value, seen)


def is_object(item: Any) -> bool:
    """Is it none of the containers that are made of their entries, but of attributes?"""
    return not isinstance(item, dict | list | tuple) and not dataclasses.is_dataclass(item) and attributes_of(item) is not None


def may_be_read(item: Any, samples: int) -> Callable[[int], bool] | bool | None:
    """Of a list or tuple with as many entries as samples, for how many samples the step gets it as it is.

    Returns:
        None: for none, for it holds no tensors. True: always, for it has no entry a sample.
    """
    if not isinstance(item, list | tuple) or hasattr(item, "_fields") or isinstance(item, torch.Size) or len(item) != samples:
        return True
    tensors = list(tensors_of(item))
    if not tensors:
        return None
    if len({_form(entry) for entry in item}) > 1 or all(isinstance(entry, torch.Tensor) and entry.ndim for entry in item):
        return True
    # More samples than entries are those of all replicas together, of which each gets its own list.
    whole = all(x.ndim for x in tensors)
    return lambda given: given >= samples if whole else given == samples


def _form(item: Any) -> Any:
    """Equal for entries of which each could be one sample."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.ndim
    return type(item), tuple((path, _form(value)) for path, value in entries(item))
