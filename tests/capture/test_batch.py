"""Batches: what they are taken apart into, put together again from, and what they may not be."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_piper.capture import capture, flatten
from lightning_piper.errors import CaptureError
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
    leaves, layout = flatten(batch)
    assert layout.paths == paths and layout.size == 3
    again = layout.rebuild(leaves)
    assert type(again) is type(batch)
    assert repr(again) == repr(batch)
    doubled = layout.rebuild([2 * x for x in leaves])
    assert repr(doubled) != repr(batch)
    assert all(torch.equal(a, 2 * b) for a, b in zip(flatten(doubled)[0], leaves, strict=True))


def test_other_mappings_become_plain_dicts() -> None:
    assert type(flatten(UserDict(x=A))[1].rebuild([A])) is dict
    assert type(flatten(defaultdict(list, x=A))[1].rebuild([A])) is dict


def test_layouts_are_equal_where_one_graph_serves_both() -> None:
    key = flatten({"x": A, "mode": 1})[1].key
    assert flatten({"x": A + 1, "mode": 1})[1].key == key
    for other in ({"x": A, "mode": 2}, {"x": A.double(), "mode": 1}, {"x": A[:2], "mode": 1}, {"z": A, "mode": 1}, [A, 1]):
        assert flatten(other)[1].key != key


def test_leaves_are_contiguous() -> None:
    leaves, layout = flatten(A.t())
    assert leaves[0].is_contiguous() and torch.equal(leaves[0], A.t()) and layout.specs[0].stride == (3, 1)
    assert flatten(A)[0][0] is A


def test_a_tensor_without_dimensions_is_passed_whole() -> None:
    assert flatten((A, torch.tensor(2.0)))[1].size == 3


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((A, B[:2]), r"no common first dimension .* Found \[0\]: \[3, 2\], \[1\]: \[2\]"),
        ({"ids": A, "positions": torch.zeros(1, 2)}, r"Found \['ids'\]: \[3, 2\], \['positions'\]: \[1, 2\]"),
        (torch.tensor(1.0), r"Found batch: \[\]"),
        ({"mode": 1}, "Found no tensor at all"),
        ((A[:0], B[:0]), "the batch is empty: its tensors have 0 samples"),
        ({"x": A, "image": np.zeros(3)}, r"holds a ndarray at batch\['image'\]; .* convert it in the collate function"),
        ((A, {1, 2}), r"holds a set at batch\[1\]"),
        ((x for x in (A, B)), "holds a generator at batch; a captured step takes tensors"),
    ],
)
def test_what_a_batch_may_not_be(batch: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(MLP(), batch)
