"""Find the changes that a step makes to its batch. A captured step makes these changes only while Piper
traces the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_piper.capture.proxies.container_objects import entries_of
from lightning_piper.capture.proxies.sample_lists import entries
from lightning_piper.capture.torch_private import _torch


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the Python attributes that the user has given a tensor, without names that begin with `_`."""
    return {
        k: x for k, x in vars(tensor).items() if not k.startswith("_") and k not in _torch.FAKE_ATTRIBUTES
    }


def contents(batch: Any) -> dict[str, Any]:
    """Return path -> value for all entries of a batch's containers, attributes of its objects, and attributes
    of its tensors. If an object occurs several times, only the contents at its first path are included."""
    return dict(_contents(batch, "", set()))


def _contents(item: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of everything inside of an item, at any depth, except inside of Piper's own
    objects."""
    if id(item) in seen or type(item).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return  # reading inside of a placeholder would count as a read by the step
    seen.add(id(item))
    if isinstance(item, torch.Tensor):
        inside = [(f".{name}", x) for name, x in own_attributes(item).items()]
    else:
        inside = list(entries(item)) or list(entries_of(item))
    for end, value in inside:
        yield path + end, value
        yield from _contents(value, path + end, seen)


@dataclass(frozen=True)
class BatchChanges:
    """The changes that one run of a step has made to its batch.

    Attributes:
        written: The paths of tensors that the step writes in place.
        entries: The paths of entries and attributes that the step sets or removes.
    """

    written: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    @staticmethod
    def between(written: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> BatchChanges:
        """Return the changes between two `contents` of a batch.

        Args:
            written: The paths of tensors that were written in place in between.
            before, after: The contents before and after the step.
        """
        missing = object()
        paths = [
            path for path in {**before, **after} if before.get(path, missing) is not after.get(path, missing)
        ]
        return BatchChanges(tuple(written), tuple(paths))

    def __str__(self) -> str:
        """Return the changed parts of the batch as messages show them. Return "" if nothing has changed."""
        return ", ".join(f"batch{path}" for path in dict.fromkeys([*self.written, *self.entries]))
