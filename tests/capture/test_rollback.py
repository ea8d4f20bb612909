"""Changes that a step made to objects before its trace failed are undone."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import multiprocessing
import os
import random
import threading
from array import array
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_piper.capture.eager.eager_step import EagerStep
from lightning_piper.capture.python_state import rollback
from lightning_piper.capture.python_state.rollback import rollback_on_failure
from lightning_piper.errors import CaptureError


class Thing:
    def __init__(self) -> None:
        self.count, self.parts = 0, {"a": [1, [2]], "b": {3}}
        self.other: Any = None


VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=1)


class Slotted:
    __slots__ = ("x",)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.number, self.names = 1, ["x"]
        self.thing = Thing()
        self.thing.other = self  # a cycle
        self.queue = collections.deque([1.0, 2.0], maxlen=3)
        self.counts = collections.Counter("aab")
        self.table = np.arange(4)
        self.numbers, self.draws = random.Random(1), np.random.default_rng(2)
        self.generator = torch.Generator().manual_seed(3)
        self.pair = (Thing(), 1)
        self.array, self.bytes = array("d", [1.0]), bytearray(b"ab")
        self.variable, self.local = VARIABLE, threading.local()
        self.local.x = 1
        self.text, self.event = io.StringIO("ab"), threading.Event()
        self.shared, self.flag = multiprocessing.Array("d", [1.0]), multiprocessing.Event()
        self.text.read(1)
        self.cached: Any = functools.cache(lambda: [1])
        self.cached()


def seen(holder: Holder) -> list[Any]:
    things = [[x.count, repr(x.parts)] for x in (holder.thing, holder.pair[0])]
    draws = [
        holder.numbers.getstate(),
        str(holder.draws.bit_generator.state),
        holder.generator.get_state().tolist(),
    ]
    return [
        holder.number,
        holder.names[:],
        list(holder.queue),
        dict(holder.counts),
        holder.table.tolist(),
        things,
        draws,
        [holder.array.tolist(), bytes(holder.bytes), VARIABLE.get(), holder.local.x],
        [os.environ.get("PIPER_TEST"), list(holder.cached())],
        [holder.text.getvalue(), holder.text.tell(), holder.event.is_set()],
        [holder.shared[:], holder.flag.is_set()],
        sorted(vars(holder)),
        sorted(vars(holder.inner)),
    ]


def change(holder: Holder) -> None:
    holder.number, holder.new = 2, 3
    holder.inner.mark = 1
    del holder.thing.other
    holder.names.append("y")
    for thing in (holder.thing, holder.pair[0]):
        thing.count += 1
        thing.parts["a"][1].append(4)
        thing.parts["b"].add(5)
        thing.parts["c"] = 6
    holder.queue.extend([3.0, 4.0])
    holder.counts.update("b")
    holder.table[0] = 9
    holder.array.append(2.0)
    holder.bytes[0] = 1
    VARIABLE.set(2)
    holder.local.x = 2
    holder.text.write("cd"), holder.event.set()
    holder.shared[0] = 2.0
    holder.flag.set()
    os.environ["PIPER_TEST"] = "1"
    holder.cached().append(2)
    holder.numbers.random(), holder.draws.random(), torch.rand(1, generator=holder.generator)


@pytest.mark.parametrize("error", [CaptureError("no"), TypeError("no")])
def test_all_is_as_before_when_it_failed(error):
    holder = Holder()
    before, identities = seen(holder), [id(holder.queue), id(holder.thing.parts["a"]), id(holder.table)]
    with pytest.raises(type(error)), rollback_on_failure(holder):
        change(holder)
        assert seen(holder) != before  # the control
        raise error
    assert seen(holder) == before and holder.thing.other is holder
    assert [id(holder.queue), id(holder.thing.parts["a"]), id(holder.table)] == identities
    assert not getattr(error, "late", False)


def test_the_compiled_program_is_no_state_of_the_user():
    """A module that trains holds its program, which has far more objects than the module."""
    net = nn.Linear(2, 2)
    step, thing = EagerStep(nn.Linear(1, 1), 1, (), torch.device("cpu")), Thing()
    vars(net).update(step=step, thing=thing)
    with pytest.raises(TypeError), rollback_on_failure(net):
        step.found, thing.count = (True,), 2
        raise TypeError
    assert (step.found, thing.count) == ((True,), 0)


SEEN, COUNT = [1], 1


def test_so_are_globals_and_closures_that_the_step_names():
    kept: list[int] = []

    class Counting(nn.Module):
        def training_step(self):
            global COUNT
            COUNT += 1
            SEEN.append(2)
            kept.append(3)

    module = Counting()
    with pytest.raises(CaptureError), rollback_on_failure(module):
        module.training_step()
        assert (COUNT, SEEN, kept) == (2, [1, 2], [3])  # the control
        raise CaptureError("no")
    assert (COUNT, SEEN, kept) == (1, [1], [])


def test_what_did_not_fail_stays(monkeypatch):
    monkeypatch.setenv("PIPER_TEST", "")
    holder = Holder()
    before = seen(holder)
    with rollback_on_failure(holder):
        change(holder)
    assert seen(holder) != before


ALONE = {
    "list": lambda: iter([1, 2, 3]),
    "range": lambda: iter(range(1, 9)),
    "count": lambda: itertools.count(1),
    "dict": lambda: iter({1: 2, 3: 4, 5: 6}),
    "str": lambda: iter("abc"),
    "repeat": lambda: itertools.repeat(1, 5),
}
OVER_OTHERS = {
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "zip": lambda: zip([1, 2, 3], [4, 5, 6], strict=True),
    "enumerate": lambda: enumerate("abc"),
    "map": lambda: map(str, [1, 2, 3]),
    "chain": lambda: itertools.chain([1, 2], [3]),
    "loader": lambda: iter(torch.utils.data.DataLoader([1, 2, 3])),
}


@pytest.mark.parametrize("name", ALONE)
def test_iterators_over_containers_are_put_back(name):
    holder, again = nn.Module(), ALONE[name]()
    holder.kept = [ALONE[name]()]
    with pytest.raises(CaptureError) as caught, rollback_on_failure(holder):
        next(holder.kept[0])
        raise CaptureError("no")
    assert not caught.value.late
    assert [next(holder.kept[0]) for _ in range(3)] == [next(again) for _ in range(3)]


COUNTER, PAIR = itertools.count(1), (itertools.count(1), 0)


class OfGlobals(nn.Module):
    def training_step(self) -> int:
        return next(COUNTER)


class OfATuple(nn.Module):
    def training_step(self) -> int:
        return next(PAIR[0])


def test_an_iterator_that_a_global_names_is_put_back():
    module = OfGlobals()
    with pytest.raises(CaptureError) as caught, rollback_on_failure(module):
        assert [module.training_step() for _ in range(3)] == [1, 2, 3]
        raise CaptureError("no")
    assert not caught.value.late and next(COUNTER) == 1


def test_where_no_copy_may_stand_an_iterator_cannot_be_put_back():
    module = OfATuple()
    with pytest.raises(CaptureError) as caught, rollback_on_failure(module):
        module.training_step()
        raise CaptureError("no")
    assert caught.value.late


@functools.cache
def table(size: int) -> torch.Tensor:
    return torch.arange(size)


class Memoised(nn.Module):
    @functools.lru_cache  # noqa: B019
    def mask(self, size: int) -> torch.Tensor:
        return torch.ones(size)

    def training_step(self, size: int) -> torch.Tensor:
        return table(size) + self.mask(size)


def test_functions_forget_what_they_were_asked_for_without_data():
    module = Memoised()
    known = module.training_step(2), table(2), module.mask(2)
    for size, kept in ((2, True), (3, False)):  # the first one is known
        with pytest.raises(CaptureError), rollback_on_failure(module):
            module.training_step(size)
            raise CaptureError("no")
        assert (table(2) is known[1], module.mask(2) is known[2]) == (kept, kept)


@pytest.mark.parametrize("name", OVER_OTHERS)
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_of_others_it_is_known_that_they_have_gone_on(name, taken):
    holder = nn.Module()
    holder.kept = OVER_OTHERS[name]()
    with pytest.raises(CaptureError) as caught, rollback_on_failure(holder):
        for _ in range(taken):
            next(holder.kept)
        raise CaptureError("no")
    assert caught.value.late == bool(taken)


def test_a_generator_cannot_be_put_back():
    holder = nn.Module()
    holder.numbers, holder.others = (i for i in range(9)), (i for i in range(9))
    with pytest.raises(CaptureError) as caught, rollback_on_failure(holder):
        next(holder.numbers)
        raise CaptureError("no")
    assert caught.value.late and caught.value.__notes__ == [
        "self.numbers advanced during the capture and cannot be reset, so this run cannot continue. If all devices "
        "are replicas, PiperStrategy(capture='never') runs the step unchanged"
    ]
    with pytest.raises(CaptureError) as caught, rollback_on_failure(holder):
        raise CaptureError("no")  # none has gone on
    assert not caught.value.late


@pytest.mark.parametrize(
    ("make", "late"), [(lambda: iter([1, 2, 3]), False), (lambda: (i for i in range(3)), True)]
)
def test_a_step_that_takes_from_an_iterator_is_refused(make, late):
    holder = nn.Module()
    holder.numbers = make()
    with (
        pytest.raises(CaptureError, match=r"takes the next value of the iterator self\.numbers") as caught,
        rollback_on_failure(holder),
    ):
        next(holder.numbers)
    assert caught.value.late == late


def test_large_modules_are_looked_at_in_part(monkeypatch):
    monkeypatch.setattr(rollback, "MANY", 50)
    holder = nn.Module()
    holder.things = [Thing() for _ in range(1000)]
    with pytest.raises(CaptureError), rollback_on_failure(holder):
        holder.things.append(Thing())
        raise CaptureError("no")
    assert len(holder.things) == 1000
