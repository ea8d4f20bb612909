"""Batches: how Piper takes them apart and puts them together again, and which batches raise an error."""

from __future__ import annotations

import contextvars
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_piper as piper
from lightning_piper.capture import capture, flatten
from lightning_piper.compiler import compile
from lightning_piper.errors import CaptureError
from tests.groups import marked
from tests.models import MLP

A, B = torch.arange(6.0).reshape(3, 2), torch.arange(3)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Sample:
    x: Any
    y: Any
    kind: str = "train"


@pytest.mark.parametrize(
    ("batch", "paths"),
    [
        (A, ("",)),
        ((A, B), ("[0]", "[1]")),
        ([A, [B]], ("[0]", "[1][0]")),
        ({"x": A, "more": {"y": B}}, ("['x']", "['more']['y']")),
        (OrderedDict(y=B, x=A), ("['y']", "['x']")),
        (Pair(A, (B, 1)), (".x", ".y[0]")),
        (Sample(A, {"y": B}), (".x", ".y['y']")),
        ((A, 3, "text", None, True, 1.5, b"raw"), ("[0]",)),
    ],
)
def test_a_batch_is_put_together_as_it_was(batch: Any, paths: tuple[str, ...]) -> None:
    leaves, batch_spec = flatten(batch)
    assert batch_spec.paths == paths and batch_spec.size == 3
    again = batch_spec.rebuild(leaves)
    assert type(again) is type(batch)
    assert repr(again) == repr(batch)
    doubled = batch_spec.rebuild([2 * x for x in leaves])
    assert repr(doubled) != repr(batch)
    assert all(torch.equal(a, 2 * b) for a, b in zip(flatten(doubled)[0], leaves, strict=True))


class Tagged(dict[str, Any]):
    tag = "none"


class Numbered(list[Any]):
    number = 0

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Fixed(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError("only tensors")
        super().__setitem__(key, value)


class Marked(Tensor):
    """A tensor with an attribute besides its numbers."""


def test_classes_and_attributes_of_containers_stay() -> None:
    tagged, numbered, encoded = Tagged(x=A), Numbered(3), UserDict(x=A)
    tagged.tag, encoded.encodings = "it", "them"  # type: ignore[attr-defined]
    numbered.append(A)
    for batch in (
        tagged,
        numbered,
        encoded,
        MappingProxyType({"x": A}),
        defaultdict(list, x=A),
        OrderedDict(x=A),
    ):
        found = flatten(batch)[1].rebuild([2 * A])
        assert (
            type(found) is type(batch)
            and getattr(found, "__dict__", {}).keys() == getattr(batch, "__dict__", {}).keys()
        )
        (value,) = found.values() if isinstance(found, Mapping) else found
        (before,) = batch.values() if isinstance(batch, Mapping) else batch
        assert torch.equal(value, 2 * A) and before is A  # type: ignore[arg-type]
    assert flatten(tagged)[1].rebuild([A]).tag == "it" and flatten(numbered)[1].rebuild([A]).number == 3


def test_specs_are_equal_where_one_graph_serves_both() -> None:
    key = flatten({"x": A, "mode": 1})[1].key
    assert flatten({"x": A + 1, "mode": 1})[1].key == key
    for other in (
        {"x": A, "mode": 2},
        {"x": A.double(), "mode": 1},
        {"x": A[:2], "mode": 1},
        {"z": A, "mode": 1},
        [A, 1],
    ):
        assert flatten(other)[1].key != key


@dataclass
class Hidden:
    scale: Any = field(repr=False)


@dataclass
class Addressed:
    scale: Any

    def __repr__(self) -> str:
        return f"<{id(self)}>"


class Color(Enum):
    RED = 1
    BLUE = 2


NAN = float("nan")
DIFFERENT = [(Hidden(1.0), Hidden(2.0)), (1, True), (1, 1.0), (0.0, -0.0), ("a", b"a"), ("1", 1),
    ((1,), [1]), (None, "None"),
             (1.0, np.float64(1.0)), ({1: 0}, {True: 0}), ({Color.RED: 0}, {Color.BLUE: 0}),
             ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
             (Pair(1, 2), (1, 2)), ("x" * 200 + "a", "x" * 200 + "b"), (NAN, 0.0)]  # fmt: skip
SAME = [
    (Addressed(1.0), Addressed(1.0)),
    (NAN, float("nan")),
    ({(1, "a"): NAN}, {(1, "a"): -NAN}),
    (Hidden([1]), Hidden([1])),
]


@pytest.mark.parametrize(
    ("one", "other", "same"), [*((*pair, False) for pair in DIFFERENT), *((*pair, True) for pair in SAME)]
)
def test_specs_are_compared_by_what_is_in_them_not_by_how_it_prints(one: Any, other: Any, same: bool) -> None:
    keys = [flatten({"x": A, "more": more})[1].key for more in (one, other)]
    assert (keys[0] == keys[1]) == same and len(set(keys)) == 2 - same
    assert (repr(keys[0]) == repr(keys[1])) == same  # what processes compare


SPLIT = [piper.Place(filter={}, devices=[0]), piper.Split(filter={}, dim_name="MB", num_microbatches=2)]
REPLICAS = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])]


class Named(MLP):
    """A module whose batches have an object with an entry for each sample, which `use` may read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)
        return loss * self.use(batch["more"])

    def use(self, more: Any) -> Any:
        return len(more)


def named(more: Any, samples: int = 4) -> dict[str, Any]:
    return {"x": torch.ones(samples, 4), "y": torch.ones(samples, 2), "more": more}


LISTS = [["a", "b", "c", "d"], (1, 2, 3, 4), [[], ["a"], None, 2.0], [Path("a"), object(), {1}, np.zeros(2)],
         [{"id": i} for i in range(4)]]  # fmt: skip


@pytest.mark.parametrize("more", LISTS)
def test_a_list_with_one_entry_a_sample_is_not_part_of_the_spec(more: Any) -> None:
    leaves, batch_spec = flatten(named(more))
    assert batch_spec.rebuild(leaves)["more"] is more or batch_spec.rebuild(leaves)["more"] == more
    other = named(type(more)(["other"] * 4))
    assert batch_spec.key == flatten(other)[1].key
    assert batch_spec.key != flatten(named("other"))[1].key
    assert batch_spec.times(2).rebuild([torch.cat([x, x]) for x in leaves])["more"] == more * 2
    assert batch_spec.times(2).size == 8
    for program in (SPLIT, REPLICAS):
        compile(Named(), named(more), program)


def swallowing(work: Any) -> float:
    try:
        return float(work())
    except Exception:
        return 1.0


READS: dict[str, Any] = {
    "first": lambda more: float(more[0]),
    "loop": lambda more: sum(float(x) for x in more),
    "zip": lambda more: sum(float(x) for x, _ in zip(more, range(9), strict=False)),
    "tensor": lambda more: torch.tensor(more).sum(),
    "equal": lambda more: 1.0 if more == [1, 2, 3, 4] else 2.0,
    "in": lambda more: 1.0 if 3 in more else 2.0,
    "method": lambda more: float(more.count(3)),
    "add": lambda more: len(more + [1]),
    "set": lambda more: len({*more}),
    "text": lambda more: len(str(more)),
    "format": lambda more: len(f"{more}"),
    "swallowed": lambda more: swallowing(lambda: more[0]),
    "unpacked": lambda more: (lambda a, b, c, d: a)(*more),
}


@pytest.mark.parametrize("name", marked(READS, [*READS][::3]))
def test_a_list_with_one_entry_a_sample_cannot_be_read_in_microbatches_and_replicas(name: str) -> None:
    """What it would give is that of the whole batch that was captured."""
    module = Named()
    module.use = READS[name]  # type: ignore[method-assign]
    for program in (SPLIT, REPLICAS):
        with pytest.raises(
            CaptureError,
            match=r"test_batch.py:\d+ .*: training_step reads batch\['more'\], a list with an entry",
        ):
            compile(module, named([1, 2, 3, 4]), program)


class Unseen(list[Any]):
    """A list that a step fills without a guard, because the step has only a weak reference to it (`put`)."""

    def __init__(self) -> None:
        super().__init__()
        kept = contextvars.ContextVar[Any]("kept")
        kept.set(self)
        self.put = kept.get

    def taken(self) -> list[Any]:
        """Return the entries, and remove them."""
        entries = [*self]
        self.clear()
        return entries


def test_what_a_step_may_do_with_a_list_with_one_entry_a_sample() -> None:
    seen = Unseen()
    put = seen.put
    module = Named()
    module.use = lambda more: (
        put().append((len(more), isinstance(more, list), isinstance(more, dict), more is None)) or len(more)
    )  # type: ignore[method-assign, func-returns-value]
    compile(module, named(["a", "b", "c", "d"]), SPLIT)
    assert {*seen.taken()} == {(4, True, False, False), (2, True, False, False)}


def test_a_list_of_another_length_is_a_constant() -> None:
    module = Named()
    module.use = lambda more: float(more[2])  # type: ignore[method-assign]
    compile(module, named([1, 2, 3]), SPLIT)
    assert flatten(named([1, 2, 3]))[1].key != flatten(named([1, 2, 4]))[1].key
    assert flatten(named(torch.Size([1, 2, 3, 4])))[1].key != flatten(named(torch.Size([1, 2, 3, 5])))[1].key


PARTS = torch.arange(4.0)
AMBIGUOUS = [
    [{"boxes": torch.ones(4, 4), "id": "a"} for _ in range(4)],
    ((PARTS, PARTS),) * 4,
    list(PARTS.unbind()),
]


@pytest.mark.parametrize("more", AMBIGUOUS)
def test_a_list_that_may_be_samples_or_parts_is_read_whole_only(more: Any) -> None:
    module = Named()
    module.use = lambda more: sum(x.sum() for x in flatten(more)[0])  # type: ignore[method-assign]
    compile(module, named(more), [piper.Place(filter={}, devices=[0])])
    with pytest.raises(
        CaptureError,
        match=r"reads batch\['more'\], a (list|tuple) of 4 entries, but runs on 2 samples\. Piper cannot tell",
    ):
        compile(module, named(more), SPLIT)
    module.use = len  # type: ignore[method-assign]
    compile(module, named(more), SPLIT)


@pytest.mark.parametrize(
    "more",
    [
        [torch.ones(4, 3) for _ in range(4)],
        [{"a": PARTS}] * 3,
        [PARTS, {"a": PARTS}, PARTS, PARTS],
        dict.fromkeys("abcd", PARTS),
        Pair(PARTS, PARTS),
        [(PARTS, PARTS.long())] * 2,
    ],
)
def test_tensors_in_containers_are_cut_along_their_first_dimension(more: Any) -> None:
    sizes = Unseen()
    put = sizes.put
    module = Named()
    module.use = lambda more: put().append({len(x) for x in flatten(more)[0]}) or 1.0  # type: ignore[method-assign, func-returns-value]
    compile(module, named(more), SPLIT)
    found = sizes.taken()
    assert {4} in found and {2} in found


def test_leaves_are_contiguous() -> None:
    leaves, batch_spec = flatten(A.t())
    assert (
        leaves[0].is_contiguous() and torch.equal(leaves[0], A.t()) and batch_spec.specs[0].stride == (3, 1)
    )
    assert flatten(A)[0][0] is A


def test_a_tensor_without_dimensions_is_passed_whole() -> None:
    assert flatten((A, torch.tensor(2.0)))[1].size == 3


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((A[:0], B[:0]), "the batch is empty: its tensors have 0 samples"),
        ({"x": A, "more": A.to_sparse()}, r"holds a sparse_coo tensor at batch\['more'\]"),
        (
            {"x": A, "more": torch.nested.nested_tensor([A[0], A[0]])},
            r"holds a nested tensor at batch\['more'\]",
        ),
        (
            {"x": A, "more": A.as_subclass(Marked)},
            r"holds a Marked, a subclass of torch.Tensor, at batch\['more'\]",
        ),
        (
            {"x": A, "more": Fixed(x=A)},
            r"holds a Fixed, which cannot be copied with other contents, at batch\['more'\]",
        ),
        ({"x": A, "more": {object(): 1}}, r"holds a key of type object at batch\['more'\]"),
    ],
)
def test_what_a_batch_may_not_be(batch: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(MLP(), batch)
