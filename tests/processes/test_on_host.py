"""Containers of every class keep their class when their tensors are copied to host memory."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from lightning_piper.processes.world import on_host
from lightning_piper.session.eager.partial_capture import _joined


class Pair(NamedTuple):
    rows: Any
    note: Any


class Attributes(dict[str, Any]):
    """A dict with an attribute, as tokenizers and configurations have."""

    name = "of the class"


def attributes(**contents: Any) -> Attributes:
    made = Attributes(**contents)
    made.name = "of the instance"
    return made


VALUES = {
    "named tuple": Pair,
    "ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "user dict": lambda a, b: UserDict(a=a, b=b),
    "dict with attributes": lambda a, b: attributes(a=a, b=b),
    "dict": lambda a, b: {"a": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
}


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, list | tuple) else value["a"]


@pytest.mark.parametrize("kind", VALUES)
def test_containers_keep_their_class(kind: str) -> None:
    x = torch.ones(2, requires_grad=True)
    value = VALUES[kind](x, "text")
    found = on_host({"inside": [value]})["inside"][0]
    assert type(found) is type(value) and len(found) == len(value) == 2
    assert not first(found).requires_grad and first(found).equal(x)
    assert first(value) is x  # the user's own container has not changed
    assert getattr(found, "name", None) == getattr(value, "name", None)
    assert getattr(found, "default_factory", None) == getattr(value, "default_factory", None)


@pytest.mark.parametrize("kind", VALUES)
def test_results_of_microbatches_keep_their_class(kind: str) -> None:
    parts = [VALUES[kind](torch.full((2,), float(i)), "text") for i in range(2)]
    if kind == "list":  # two entries for two samples would be an entry for each sample
        parts = [[*part, 3] for part in parts]
    found = _joined(parts, [2, 2])
    assert type(found) is type(parts[0]) and first(found).tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "value, plain",
    [
        (defaultdict(lambda: 0, a=1), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (NamedTuple("Local", [("a", int)])(1), (1,)),  # type: ignore[misc]
    ],
)
def test_a_class_that_cannot_be_sent_becomes_plain(value: Any, plain: Any) -> None:
    found = on_host(value)
    assert type(found) is type(plain) and found == plain


def test_other_objects_are_unchanged() -> None:
    """A control: a set is not a container that is copied, and keeps its tensors."""
    value = {torch.ones(1, requires_grad=True)}
    assert on_host([value])[0] is value
