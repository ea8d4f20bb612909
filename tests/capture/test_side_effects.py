"""Steps without a backward pass that store lists and dicts in each other, or read them, are refused. Similar steps
that only add to them are captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_piper.capture import capture
from lightning_piper.capture.python_state.state_locations import Guards
from lightning_piper.errors import CaptureError
from tests.forward import Steps, examples


class Keeps(Steps):
    """A validation step that calls `change(self, a value of the batch)`."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.out: Any = {"a": [], "b": []}
        self.losses: list[Any] = []
        self.others: list[Any] = []
        self.last: Any = None

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(self, self(batch[0]).mean())


def store_item(m: Any, x: Tensor) -> None:
    m.out["a"].append(x)
    m.out["a"] = m.out["b"]


def store_item_elsewhere(m: Any, x: Tensor) -> None:
    m.losses.append(x)
    m.out["a"] = m.losses


def store_in_update(m: Any, x: Tensor) -> None:
    m.losses.append(x)
    m.out.update(a=m.losses)


def store_attribute(m: Any, x: Tensor) -> None:
    m.losses.append(x)
    m.last = m.losses


def share_equal(m: Any, x: Tensor) -> None:
    m.losses = m.others


def share_equal_items(m: Any, x: Tensor) -> None:
    m.out["a"] = m.out["b"]


def append_list(m: Any, x: Tensor) -> None:
    m.losses.append(x)
    m.others.append({"all": [m.losses]})


def return_list(m: Any, x: Tensor) -> Any:
    m.losses.append(x)
    return {"all": m.losses}


def copy_list(m: Any, x: Tensor) -> None:
    m.losses.append(x)
    m.others.append(copy.copy(m.losses))


def text_of_list(m: Any, x: Tensor) -> None:
    m.losses.append(x)
    m.last = repr(m.losses)


def keep_object(m: Any, x: Tensor) -> None:
    m.last = Held(x)


class Held:
    def __init__(self, value: Tensor) -> None:
        self.value = value


READS = [store_item, store_item_elsewhere, store_in_update, append_list, return_list, copy_list]
CHANGES = [store_attribute, share_equal, keep_object]


@pytest.mark.parametrize("change", READS, ids=lambda f: f.__name__)
def test_a_list_that_is_used_otherwise_is_refused(change: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"the step may only add to self\.\S+ \(append"):
        capture(Keeps(change), examples(), name="validation_step").at(8)


def test_a_text_of_a_list_that_the_step_fills_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"m\.last = repr\(m\.losses\).*makes a text of the value of a tensor"
    ):
        capture(Keeps(text_of_list), examples(), name="validation_step").at(8)


@pytest.mark.parametrize("change", [*CHANGES, share_equal_items], ids=lambda f: f.__name__)
def test_an_attribute_that_becomes_another_object_is_refused(change: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"changes self\.|the step may only add to self\.out"):
        capture(Keeps(change), examples(), name="validation_step").at(8)


def add_in_place(m: Any, x: Tensor) -> None:
    m.out["a"] += [x]
    m.losses += [x]


def replace_item(m: Any, x: Tensor) -> None:
    m.out["a"] = [x]
    m.losses.append(x)


def add_to_lists(m: Any, x: Tensor) -> None:
    for kept in (m.out["a"], m.losses):
        if isinstance(kept, list):
            kept.append(x)


@pytest.mark.parametrize("change", [add_in_place, replace_item, add_to_lists], ids=lambda f: f.__name__)
def test_additions_are_kept(change: Callable[[Any, Tensor], Any]) -> None:
    module = Keeps(change)
    code = capture(module, examples(), name="validation_step").at(8)
    assert module.out == {"a": [], "b": []} and module.losses == []
    code.rebuild.and_keep([torch.tensor(1.0), torch.tensor(2.0)])  # type: ignore[union-attr]
    assert module.out == {"a": [1.0], "b": []} and module.losses == [2.0]


def test_without_the_search_for_aliases_a_shared_list_is_not_seen() -> None:
    module = Keeps(share_equal_items)
    with mock.patch.object(Guards, "aliased", lambda self: ()):
        capture(module, examples(), name="validation_step").at(8)
    assert module.out["a"] is not module.out["b"]
