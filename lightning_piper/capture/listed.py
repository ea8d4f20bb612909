"""Lists and tuples of a batch that have one entry a sample, beside its tensors: file names, texts, ids.

A graph is captured for a number of samples, not for these ones, so it cannot know what such a list holds. The step gets something
that has its length and can be handed on (`predict_step` may return it) but not be read.

A list of containers of tensors, as many as there are samples, may be a list of samples, or of parts of the batch that have the
samples in their first dimension. A step that gets the whole batch may read it, one that gets a microbatch may not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from lightning_piper.errors import CaptureError


@dataclass(frozen=True, eq=False)
class Listed:
    """Stands in a batch spec for a list with one entry a sample.

    Attributes:
        index: of the lists of the batch.
        path: where it stands.
        content: the list, with every tensor replaced by its place.
        readable: for how many samples the step may read it; None if it may not.
    """

    index: int
    path: str
    content: Any
    readable: Callable[[int], bool] | None = None


def entries(item: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with the end of its path."""
    if isinstance(item, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in item.items())
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        yield from ((f".{key}", value) for key, value in zip(item._fields, item, strict=True))
    elif isinstance(item, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from ((f".{field.name}", getattr(item, field.name)) for field in dataclasses.fields(item))


def tensors_of(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    for _, value in entries(item):
        yield from tensors_of(value)


def may_be_read(item: Any, samples: int) -> Callable[[int], bool] | bool | None:
    """Of a list or tuple with as many entries as samples, for how many samples the step may read it.

    Returns:
        None: never, for it holds no tensors. True: always, for it has no entry a sample.
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


@contextlib.contextmanager
def refusing(step: str, samples: int, where: Callable[[], str]) -> Iterator[Callable[[Listed], PerSample | None]]:
    """What a step gets for lists, when it gets so many samples: None for one that it may read. `where` gives the user's line.

    Raises:
        CaptureError: it has read one, whatever was made of the error there (`torch.tensor` makes another one of it).
    """
    found: list[CaptureError] = []

    def given(listed: Listed) -> PerSample | None:
        readable = listed.readable is not None and listed.readable(samples)
        return None if readable else PerSample(listed, samples, step, where, found)

    try:
        yield given
    finally:
        if found:
            raise found[0]


class PerSample:
    """What the step gets for a list that it may not read: any use but its length is an error."""

    def __init__(self, listed: Listed, samples: int, step: str, where: Callable[[], str], refused: list[CaptureError]) -> None:
        self.__dict__.update(_listed=listed, _samples=samples, _step=step, _where=where, _refused=refused)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        listed, what = self._listed, type(self._listed.content).__name__
        problem = f"{self._where()}: {self._step} reads batch{listed.path}, a {what} "
        if listed.readable is None:
            problem += (
                "with an entry for each sample; it would be captured with the entries of one batch. Make a tensor of it in the "
                "collate function, or, if its entries do not belong to samples, a dict"
            )
        else:
            problem += (
                f"of {len(listed.content)} entries, when it gets {self._samples} samples, not {len(listed.content)}; whether an "
                "entry is a sample or has all samples in its tensors cannot be told. Stack the entries into tensors in the "
                "collate function, or, if they do not belong to samples, make a dict of it"
            )
        self._refused.append(CaptureError(problem))
        raise self._refused[-1]

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `isinstance` says what the list is
        return type(self._listed.content)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __len__(self) -> int:
        return int(self._samples)

    def __repr__(self) -> str:
        return f"<batch{self._listed.path}, one entry a sample>"

    __iter__ = __reversed__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = __array__ = __setattr__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __format__ = _refuse
    __add__ = __radd__ = __iadd__ = __mul__ = __rmul__ = __imul__ = _refuse
