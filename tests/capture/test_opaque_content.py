"""Parts of a batch that are not tensors: objects, and lists with one entry for each sample. If the step reads
them, they become guards or raise an error.
"""

from __future__ import annotations

import copy
import datetime
import enum
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_piper as piper
from lightning_piper.capture import capture, flatten
from lightning_piper.capture.python_state.state_reads import History, StateReads
from lightning_piper.compiler import compile
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.build import build_dag
from lightning_piper.verify import interpret
from tests.capture.test_batch import REPLICAS, SPLIT, Named, Unseen, named
from tests.strategy.graphs import Encoding, Graph, graph

ONE = [piper.Place(filter={}, devices=[0])]


class Color(enum.Enum):
    RED = 1


class Foreign:
    scale = 2.0

    def __len__(self) -> int:
        return 3


def reading(use: Callable[[Any], Any]) -> Named:
    module = Named()
    module.use = use  # type: ignore[method-assign]
    return module


CARRIED = [Path("a"), np.array([object()]), np.array(["a"]), datetime.date(2020, 1, 2), {1, "a"}, Color.RED,
    np.float32(2),
           Foreign(), print, [Foreign()] * 4, lambda: 3]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [*CARRIED[:2], *(pytest.param(more, marks=pytest.mark.long) for more in CARRIED[2:-2]), *CARRIED[-2:]],
)
def test_what_is_not_read_is_in_no_spec_and_no_guard(more: Any) -> None:
    seen = Unseen()
    put = seen.put

    def look(x: Any) -> float:
        put().append((isinstance(x, type(more)), isinstance(x, dict), copy.deepcopy(x) is x))
        return 1.0

    capture(reading(look), named(more)).at(4)
    assert {*seen.taken()} == {(True, False, True)}
    step = capture(reading(lambda x: float(x is not None)), named(more))
    step.at(4), step.at(2)
    assert not any("more" in str(answer.where) for answer in step.reads.inputs.answers.values())
    for program in (SPLIT, REPLICAS):
        compile(reading(lambda x: float(x is not None)), named(more), program)


PLAIN: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "path": (Path("a.b"), Path("a.c"), lambda x: len(x.suffix)),
    "date": (datetime.date(2020, 1, 2), datetime.date(2021, 1, 2), lambda x: x.year),
    "later": (
        datetime.date(2020, 1, 2),
        datetime.date(2021, 1, 2),
        lambda x: 1.0 if x > datetime.date(2020, 5, 1) else 2.0,
    ),
    "set": ({1, 2}, {2, 3}, sum),
    "member": ({1, 2}, {2, 3}, lambda x: 2.0 if 3 in x else 1.0),
    "enum": (Color.RED, None, lambda x: x.value),
    "scalar": (np.float32(2), np.float32(3), lambda x: torch.ones(()) * x),
    "scaled": (np.float32(2), np.float32(3), lambda x: x * torch.ones(())),
    "array": (np.arange(3.0), np.arange(3.0) + 1, lambda x: torch.as_tensor(x).sum()),
    "numpy": (np.arange(3.0), np.arange(3.0) + 1, lambda x: float(np.asarray(x).sum())),
    "text": (Path("a"), Path("b"), lambda x: float(len(f"{x}{x!s}") + (f"{x}" == "a"))),
    "list": (["a", "b", "c", "d"], ["a", "b", "c", "dd"], lambda x: float(sum(map(len, x)))),
    "numbers": ([1, 2, 3, 4], [1, 2, 3, 5], lambda x: torch.tensor(x).sum()),
    "key": (Color.RED, None, lambda x: {Color.RED: 3.0}[x]),
}


def value(step: Any, module: Any) -> float:
    code = step.at(4)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves = step.inputs(flatten(named(0))[0])
    assert code is not None
    return float(
        interpret(build_dag(step), {k: x.detach() for k, x in tensors.items()}, leaves).metrics[LOSS]
    )


@pytest.mark.parametrize("name", PLAIN)
def test_a_read_of_plain_content_is_a_guard(name: str) -> None:
    first, second, use = PLAIN[name]
    module, history = reading(use), History()
    step = capture(module, named(first), history=history)
    known = float(use(first))
    eager = reading(lambda x: known)
    eager.load_state_dict(module.state_dict())
    assert value(step, module) == pytest.approx(value(capture(eager, named(first)), eager))
    assert step.reads.hold()
    history.batch = flatten(named(copy.deepcopy(first)))[1]
    assert step.reads.hold()
    if second is not None:
        history.batch = flatten(named(second))[1]
        assert not step.reads.hold()


def test_a_stale_object_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With guards that look at the batch that was captured, another one would be taken for it."""
    first, second, use = PLAIN["path"]
    held = {}
    for stale in (False, True):
        if stale:
            monkeypatch.setattr(StateReads, "carried", lambda self, item: item)
        history = History()
        step = capture(reading(use), named(first), history=history)
        step.at(4)
        history.batch = flatten(named(second))[1]
        held[stale] = step.reads.hold()
    assert held == {False: False, True: True}


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.scale,
    "length": lambda x: float(len(x)),
    "truth": lambda x: 1.0 if x else 2.0,
    "text": lambda x: float(len(str(x))),
    "equal": lambda x: 1.0 if x == 3 else 2.0,
    "hash": lambda x: float({x: 1}[x]),
    "swallowed": lambda x: getattr(x, "scale", 1.0) if hasattr(x, "scale") else 1.0,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_read_of_another_object_is_refused(name: str) -> None:
    says = (
        r"test_opaque_content.py:\d+ .*: training_step reads batch\['more'\], an object of type Foreign\. "
        r".* In the collate"
    )
    with pytest.raises(CaptureError, match=says):
        compile(reading(FOREIGN[name]), named(Foreign()), ONE)


@pytest.mark.parametrize(
    "use", [lambda x: setattr(x, "scale", 3), lambda x: x.append(1), lambda x: x.__setitem__(0, 2)]
)
def test_what_is_carried_may_not_be_changed(use: Any) -> None:
    more: Any = Foreign() if use.__code__.co_names == ("setattr",) else [1, 2, 3, 4]
    with pytest.raises(
        CaptureError, match=r"training_step changes batch\['more'\]\. A captured step would do this only once"
    ):
        compile(reading(lambda x: use(x) or 1.0), named(more), ONE)


def test_a_stand_in_has_the_protocols_of_its_class() -> None:
    found = Unseen()
    put = found.put

    def look(x: Any) -> float:
        put().append((isinstance(x, Path), isinstance(x, Iterable), isinstance(x, Sized), callable(x)))
        return 1.0

    capture(reading(look), named(Path("a"))).at(4)
    assert {*found.taken()} == {(True, False, False, False)}
    capture(reading(look), named({1})).at(4)
    assert {*found.taken()} == {(False, True, True, False)}


def test_objects_with_tensors_are_opened_and_put_together_again() -> None:
    data = graph(1)
    leaves, spec = flatten({"graph": data, "again": data})
    assert spec.paths == tuple(f"['graph']._store._mapping[{name!r}]" for name in ("x", "edges", "of", "y"))
    assert [type(item.content).__name__ for item in spec.carried] == ["PosixPath", "object"]
    made = spec.rebuild([x + 1 for x in leaves])
    assert type(made["graph"]) is Graph and made["graph"] is made["again"] and made["graph"] is not data
    assert made["graph"]._store._owner() is made["graph"] and torch.equal(made["graph"].x, data.x + 1)
    assert made["graph"].tag is data.tag
    encoding = Encoding(ids=torch.ones(3, 2), mask=torch.ones(3, 2))
    again = flatten(encoding)[1].rebuild(flatten(encoding)[0])
    assert (
        type(again) is Encoding
        and torch.equal(again.ids, encoding["ids"])
        and {**again}.keys() == {"ids", "mask"}
    )


UNEVEN: list[Any] = [
    (torch.ones(4, 4), torch.ones(8, 2)),
    {"ids": torch.ones(3, 4), "positions": torch.zeros(1, 4)},
    graph(1),
    torch.tensor(1.0),
    {"texts": ["a"]},
    None,
]


class Whole(Named):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = sum((x.double().sum() for x in flatten(batch)[0]), torch.ones((), dtype=torch.float64))
        return self.second(self.first(x.float() * torch.ones(1, 4))).square().mean()


@pytest.mark.parametrize("batch", UNEVEN)
def test_a_batch_without_common_samples_is_taken_whole(batch: Any) -> None:
    step = compile(Whole(), batch, ONE).step
    leaves, spec = flatten(batch)
    assert spec.size == max(1, leaves[0].shape[0] if leaves and leaves[0].ndim else 1)
    assert [tuple(x.shape) for x in leaves] == [x.shape for x in step.at(spec.size).batch_specs] == [
        x.shape for x in step.at(3 * spec.size).batch_specs
    ]  # fmt: skip
    piper.verify(Whole(), batch, ONE)
    for program, says in (
        (SPLIT, "directive 1 .*'num_microbatches': the batch cannot be split into 2"),
        (REPLICAS, "directive 1 .*'devices': .*2 replicas"),
    ):
        with pytest.raises(piper.DirectiveError, match=says) as refused:
            compile(Whole(), batch, program)
        assert ("no common first dimension" if leaves else "because it has no tensor. ") in str(refused.value)
    assert spec.times(2).size == 2 * spec.size
    compile(Whole(), spec.times(2), REPLICAS)  # each replica has one of its own
