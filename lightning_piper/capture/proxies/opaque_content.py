"""Contents of a batch that are not inputs of a graph: objects without tensors, and lists with one entry per
sample.

The step gets a placeholder (`ContentProxy`) for each of them. The step may pass a placeholder on, return it
and put it into containers. `isinstance` treats the placeholder as the object. Each read (an attribute, an
item, a call, a comparison, text) adds a guard on the content. If another batch has other content, Piper
captures the step again. A read raises an error if the content cannot be compared, or belongs to other samples
than the step gets.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn, Protocol

import numpy as np

from lightning_piper.capture.proxies.proxy_classes import Proxy
from lightning_piper.capture.proxies.sample_lists import SampleList
from lightning_piper.common.units import counted
from lightning_piper.errors import CaptureError

# Classes whose values are equal if their classes and their `repr` are equal.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic, PurePath, range, slice,
    datetime.date,
          datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID)  # fmt: skip


@dataclass(frozen=True, eq=False)
class OpaqueObject:
    """The entry of a batch spec for an object that holds no tensors.

    Attributes:
        index: its position in `BatchSpec.carried`.
        path: its path in the batch.
        content: the object.
    """

    index: int
    path: str
    content: Any


Carried = SampleList | OpaqueObject  # an entry of `BatchSpec.carried`


class ContentRecorder(Protocol):
    """A recorder of the carried contents that a step reads."""

    def carried(self, item: Carried) -> Carried:
        """Return the entry of the current batch at the position of `item`."""
        ...

    def note(self, item: Carried) -> None:
        """Record that the step read the content of `item`."""
        ...


def form_of_content(value: Any) -> Any:
    """Return a key that is equal for contents that mean the same to a step.

    Return None if the content cannot be compared.
    """
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if type(value) is np.ndarray and value.dtype != object:
        return (np.ndarray, value.dtype.str, value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes()))
    if type(value) in (list, tuple, dict):
        entries = [x for pair in value.items() for x in pair] if type(value) is dict else list(value)
        forms = tuple(map(form_of_content, entries))
        return None if None in forms else (type(value), forms)
    if type(value) in (set, frozenset):
        found = frozenset(map(form_of_content, value))
        return None if None in found else (type(value), found)
    return None


@contextlib.contextmanager
def carrying(
    step: str, samples: int, where: Callable[[], str], reads: ContentRecorder | None
) -> Iterator[Callable[[Carried], Any]]:
    """Yield a function that returns the object which the step gets for an entry of `BatchSpec.carried`.

    The step gets a `ContentProxy` if reads must be guarded or must raise an error. Otherwise the function
    returns the content of an object, or None for a list, which the step may read directly.

    Args:
        step: the name of the step.
        samples: the number of samples that the step gets.
        where: returns the current line of the user's code.
        reads: records the reads. None if the step runs uncaptured once.

    Raises:
        CaptureError: the step has read or changed a content although it must not. Raised at the end even if
            the step's code has caught the error or replaced it, as `torch.tensor` does.
    """
    found: list[CaptureError] = []
    once = (
        "A captured step would do this only once, while Piper captures it. Do it in a hook, such as "
        "on_train_batch_start"
    )
    # index of an entry that was read -> the entry, and the key of its content at its first read
    seen: dict[int, tuple[Carried, Any]] = {}

    def refuse(problem: str) -> NoReturn:
        found.append(CaptureError(f"{where()}: {step} {problem} [PIPER-C009]"))
        raise found[-1]

    def read(item: Carried) -> Any:
        if (problem := _problem(item, samples)) is not None:
            refuse(f"reads batch{item.path}, {problem}")
        if reads is not None:
            reads.note(item)
            seen.setdefault(item.index, (item, form_of_content(item.content)))
        return item.content

    def change(item: Carried) -> NoReturn:
        refuse(f"changes batch{item.path}. {once}")

    def given(item: Carried) -> Any:
        item = item if reads is None else reads.carried(item)
        if isinstance(item, SampleList):
            readable = item.readable is not None and item.readable(samples)
            as_it_is = reads is None and item.readable is None and samples == len(item.content)
            return None if readable or as_it_is else stand_in_for(item, samples, read, change)
        return item.content if reads is None else stand_in_for(item, None, read, change)

    try:
        yield given
        for item, before in seen.values():
            if form_of_content(item.content) != before:
                raise CaptureError(f"{step} changes batch{item.path}. {once} [PIPER-C009]")
    finally:
        if found:
            raise found[0]


def _problem(item: Carried, samples: int) -> str | None:
    """Return the reason why the step must not read the content. Return None if the step may read it."""
    what = type(item.content).__name__
    if isinstance(item, OpaqueObject):
        if form_of_content(item.content) is not None:
            return None
        return (
            f"an object of type {what}. A captured step may pass it on but not read it, because the next "
            "batch has a different object. In the collate function, convert what the step needs to tensors, "
            "numbers or strings"
        )
    if item.readable is not None:
        return (
            f"a {what} of {len(item.content)} {'entry' if len(item.content) == 1 else 'entries'}, but runs on "
            f"{counted(samples, 'sample')}. Piper cannot tell whether an entry is one sample, or has all samples in "
            "its tensors. Stack the entries into tensors in "
            "the collate function or, if they do not belong to samples, make them a dict"
        )
    if samples != len(item.content):
        return (
            f"a {what} with an entry for each of {len(item.content)} samples, but runs on {counted(samples, 'sample')}. "
            "All microbatches and replicas would see the same entries. Make it a tensor in the collate "
            "function or, if its entries do not belong to samples, a dict"
        )
    if form_of_content(item.content) is None:
        return (
            f"a {what} with an entry for each sample, and not all entries are plain values such as numbers "
            "and strings. The captured step would use the entries of this batch for later batches. Make it a "
            "tensor in the collate function"
        )
    return None


class ContentProxy(Proxy):
    """A placeholder for a content of the batch that is not an input of the graph.

    `_class_for` adds the special methods of the content's class.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `isinstance` sees the content's class
        return type(self._item.content)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not hasattr(type(self._item.content), name):
            raise AttributeError(name)
        return getattr(content_of(self), name)

    def _refuse_change(self, *args: Any) -> None:
        self._change(self._item)

    __setattr__ = __delattr__ = _refuse_change

    def __repr__(self) -> str:
        return f"<batch{self._item.path}, {type(self._item.content).__name__}>"

    def __copy__(self) -> ContentProxy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ContentProxy:
        return self

    def __bool__(self) -> bool:
        return bool(content_of(self) if self._length is None else self._length)

    def __str__(self) -> str:
        return str(content_of(self))

    def __format__(self, spec: str) -> str:
        return format(content_of(self), spec)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return function(*map(known, args), **{name: known(x) for name, x in (kwargs or {}).items()})


def is_stand_in(value: Any) -> bool:
    return issubclass(type(value), ContentProxy)


def item_of(stand_in: Any) -> Carried:
    """Return the entry of the batch spec for which a placeholder stands."""
    found: Carried = vars(stand_in)["_item"]
    return found


def known(value: Any) -> Any:
    """Return the content if the value is a placeholder, which counts as a read. Return any other value
    unchanged."""
    return content_of(value) if is_stand_in(value) else value


def content_of(stand_in: Any) -> Any:
    """Return the content for which a placeholder stands, which counts as a read."""
    return stand_in._read(stand_in._item)


def stand_in_for(
    item: Carried, length: int | None, read: Callable[[Carried], Any], change: Callable[[Carried], NoReturn]
) -> ContentProxy:
    """Return a placeholder for an entry of `BatchSpec.carried`.

    Args:
        item: the entry of the batch spec.
        length: the length of a list, which needs no guard. None for an object.
        read: returns the content, or raises an error.
        change: raises the error for a write.
    """
    made = object.__new__(_class_for(type(item.content)))
    vars(made).update(_item=item, _length=length, _read=read, _change=change)
    return made


_CLASSES: dict[type, type[ContentProxy]] = {}  # class of a content -> class of its placeholders


def _class_for(kind: type) -> type[ContentProxy]:
    """Return a `ContentProxy` class with the special methods of `kind`, so that `isinstance` recognizes the
    same protocols (`Iterable`, `Callable`)."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    members: dict[str, Any] = {}
    for name in (*_OPERATORS, *_OTHERS):
        if _has(kind, f"__{name}__"):
            members[f"__{name}__"] = _forwarding(f"__{name}__")
    members |= {
        f"__{name}__": ContentProxy._refuse_change
        for name in ("setitem", "delitem")
        if _has(kind, f"__{name}__")
    }
    if not _has(kind, "__hash__"):
        members["__hash__"] = None
    if _has(kind, "__len__"):
        members["__len__"] = lambda self: len(content_of(self)) if self._length is None else int(self._length)
    return _CLASSES.setdefault(kind, type(kind.__name__, (ContentProxy,), members))


def _has(kind: type, name: str) -> bool:
    """Return whether the class or a base defines the attribute `name` with a value other than None.
    Attributes of its metaclass do not count."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) is not None


def _forwarding(name: str) -> Callable[..., Any]:
    def call(self: ContentProxy, *args: Any, **kwargs: Any) -> Any:
        return getattr(content_of(self), name)(
            *map(known, args), **{key: known(x) for key, x in kwargs.items()}
        )

    return call


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift", "matmul",
               "divmod")  # fmt: skip
_OPERATORS = (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "eq", "ne", "lt", "le", "gt", "ge", "hash")
_OTHERS = ("iter", "reversed", "next", "getitem", "contains", "call", "index", "int", "float", "complex",
    "neg", "pos", "abs",
           "invert", "round", "enter", "exit", "fspath", "bytes", "array", "trunc", "floor",
           "ceil")  # fmt: skip
