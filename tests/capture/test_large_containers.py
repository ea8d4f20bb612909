"""A guard on a large dict, list or set compares the objects in it, not their forms, and still sees every change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_piper.capture import capture
from lightning_piper.capture.python_state import state_locations
from lightning_piper.capture.torch_private import _torch

BATCH = torch.ones(2, 3, dtype=torch.float64)
KINDS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {f"word {i}": i for i in range(1000, 1100)},
    "list": lambda: list(range(1000, 1100)),
    "set": lambda: set(range(1000, 1100)),
}


class Vocabulary:
    def __init__(self, words: Any) -> None:
        self.words = words


class Module(L.LightningModule):
    """A module whose step uses the length of `words`."""

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.layer, self.words = nn.Linear(3, 2).double(), words
        self.more = Vocabulary(words)
        self.config = SimpleNamespace(names={"words": (words, 1.5)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = self.config.names["words"][0]
        return self.layer(batch).mean() / len(self.words) / len(self.more.words) / len(kept)


def reads_of(words: Any) -> Any:
    step = capture(Module(words), BATCH)
    step.at(2)
    assert step.reads.hold()
    return step.reads


own_form = state_locations.form_of


def no_forms(value: Any, *args: Any) -> Any:
    assert not isinstance(value, dict | list | set) or len(value) < 100, (
        "the form of a large container was made again"
    )
    return own_form(value, *args)


@pytest.mark.parametrize("follows", [True, False], ids=["counters", "no counters"])
@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_containers_are_compared_without_their_forms(kind, follows, monkeypatch):
    monkeypatch.setattr(_torch, "dict_version_follows_attributes", lambda: follows)
    reads = reads_of(KINDS[kind]())
    monkeypatch.setattr(state_locations, "form_of", no_forms)
    assert reads.hold() and reads.hold()


def test_a_change_of_a_container_in_another_one_is_seen():
    words = {"a": [1], "b": [2, ("c", {3})]}
    reads = reads_of(words)
    words["b"][1][1].add(4)
    assert not reads.hold()
    words["b"][1][1].discard(4)
    assert reads.hold()
    words["a"][0] = True
    assert not reads.hold()


def test_a_list_that_contains_itself():
    words: list[Any] = [1]
    words.append(words)
    reads = reads_of(words)
    assert reads.hold()
    words[0] = 2
    assert not reads.hold()


def test_the_same_objects_in_other_containers_are_a_change():
    words = [[1], 2]
    reads = reads_of(words)
    words[:] = [[1, 2]]
    assert not reads.hold()


@pytest.mark.parametrize("follows", [True, False], ids=["counters", "no counters"])
@pytest.mark.parametrize("change", [
    lambda words: words.update({"word 1000": -1}),
    lambda words: words.update({"word 1001": True}),  # 1 before
    lambda words: words.update({"new": 1}),
    lambda words: words.pop("word 1005"),
    lambda words: words.update({"word 1000": words.pop("word 1000")}),  # another order
    lambda words: words.update({"word 1002": [2]}),
])  # fmt: skip
def test_a_change_of_a_dict_is_seen(change, follows, monkeypatch):
    monkeypatch.setattr(_torch, "dict_version_follows_attributes", lambda: follows)
    words = KINDS["dict"]()
    words["word 1001"] = 1
    reads = reads_of(words)
    change(words)
    assert not reads.hold()


@pytest.mark.parametrize("change", [
    lambda words: words.__setitem__(3, -1),
    lambda words: words.__setitem__(0, 1000.0),  # an int before
    lambda words: words.append(1),
    lambda words: words.reverse(),
])  # fmt: skip
def test_a_change_of_a_list_is_seen(change):
    words = KINDS["list"]()
    reads = reads_of(words)
    change(words)
    assert not reads.hold()


@pytest.mark.parametrize("change", [lambda words: words.discard(1000), lambda words: words.add(-5)])
def test_a_change_of_a_set_is_seen(change):
    words = KINDS["set"]()
    reads = reads_of(words)
    change(words)
    assert not reads.hold()


def test_equal_objects_in_place_of_others_change_nothing():
    words = KINDS["dict"]()
    reads = reads_of(words)
    words["word 1003"] = int("1003")
    assert reads.hold() and reads.hold()
