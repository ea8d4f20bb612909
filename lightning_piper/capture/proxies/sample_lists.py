"""Lists and tuples in a batch with one entry per sample, in addition to the batch's tensors: file names,
texts, ids.

A graph is captured for a number of samples, not for particular samples. So the step gets a placeholder with
the list's length. The step can pass the placeholder on (`predict_step` may return the placeholder). If the
step gets the whole list, a read adds a guard. If the step gets the samples of a microbatch or of all
replicas, a read raises an error.

A list of containers of tensors whose length is the number of samples is ambiguous. Its entries may be
samples, or parts of the batch with the samples in their first dimension. A step that gets the whole batch may
read such a list. A step that gets a microbatch may not.
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
        content: the list. If it has tensors, each tensor is replaced by its position among the batch's
            tensors.
        readable: Returns whether a step with the given number of samples gets the list itself. None for a
            list without tensors.
    """

    index: int
    path: str
    content: Any
    readable: Callable[[int], bool] | None = None


def entries(item: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the entries of a container, each with the last part of its path, such as `['x']`, `[0]` or
    `.x`. Yield nothing for a value that is not a mapping, list, tuple or dataclass."""
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
    """Iterate over all tensors in a value, which may be a tensor, a container or an object with attributes.

    Args:
        seen: the ids of the objects that the recursion has visited.
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
    """Return whether a value is an object that can be rebuilt from its attributes, and not a dict, list, tuple
    or dataclass. Other mappings, such as the encodings of a tokenizer, count as objects.
    """
    return (
        not isinstance(item, dict | list | tuple)
        and not dataclasses.is_dataclass(item)
        and attributes_of(item) is not None
    )


def may_be_read(item: Any, samples: int) -> Callable[[int], bool] | bool | None:
    """Decide whether a step may read a value in a batch of `samples` samples.

    Returns:
        True if any step may read the value: it does not have one entry per sample, or its entries certainly
            are not samples. None if it has one entry per sample and no tensors, so that a step must not read
            it directly. Otherwise a function that decides from the number of samples that the step gets.
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
    # The step gets `given` samples. If `given` is greater than `samples`, it counts the samples of all
    # replicas, and each replica gets its own list.
    whole = all(x.ndim for x in tensors)
    return lambda given: given >= samples if whole else given == samples


def _form(item: Any) -> Any:
    """Return a key for the structure of a list's entry. If the entries are samples, all have the same key."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.ndim
    return type(item), tuple((path, _form(value)) for path, value in entries(item))
