"""Lists and tuples in a batch with one entry per sample, besides the batch's tensors: file names, texts, ids.

A graph is captured for a number of samples, not for particular ones. The step gets a placeholder that has the
list's length and can be passed on (`predict_step` may return it). A read adds a guard if the step gets the
whole list. It raises an error if the step gets the samples of a microbatch or of all replicas.

A list of containers of tensors whose length is the number of samples is ambiguous. It may be a list of
samples, or of parts of the batch with the samples in their first dimension. A step that gets the whole batch
may read it; a step that gets a microbatch may not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_piper.capture.proxies.container_objects import attributes_of, entries_of


@dataclass(frozen=True, eq=False)
class SampleList:
    """The entry of a batch spec for a list with one entry per sample.

    Attributes:
        index: its position in `BatchSpec.carried`.
        path: its path in the batch.
        content: the list, with every tensor replaced by its index.
        readable: whether a step with so many samples gets the list itself; None for a list without tensors.
    """

    index: int
    path: str
    content: Any
    readable: Callable[[int], bool] | None = None


def entries(item: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a container, each with the last part of its path."""
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
    """All tensors in a value, in containers and objects.

    `seen` holds the ids of the objects that the recursion has visited.
    """
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
    """Return whether a value is an object with attributes, rather than a container of entries."""
    return (
        not isinstance(item, dict | list | tuple)
        and not dataclasses.is_dataclass(item)
        and attributes_of(item) is not None
    )


def may_be_read(item: Any, samples: int) -> Callable[[int], bool] | bool | None:
    """Return whether a step may read a value in a batch of `samples` samples.

    Returns:
        True if the value does not have one entry per sample, so that any step may read it. None if it has one
        entry a sample and no tensors, so that no step may read it directly. Otherwise a function of the
        number of samples that the step gets.
    """
    if (
        not isinstance(item, list | tuple)
        or hasattr(item, "_fields")
        or isinstance(item, torch.Size)
        or len(item) != samples
    ):
        return True
    tensors = list(tensors_of(item))
    if not tensors:
        return None
    if len({_form(entry) for entry in item}) > 1 or all(
        isinstance(entry, torch.Tensor) and entry.ndim for entry in item
    ):
        return True
    # If `given` exceeds `samples`, it counts the samples of all replicas, and each replica gets its own list.
    whole = all(x.ndim for x in tensors)
    return lambda given: given >= samples if whole else given == samples


def _form(item: Any) -> Any:
    """Return a key that is equal for entries that could each be one sample."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.ndim
    return type(item), tuple((path, _form(value)) for path, value in entries(item))
