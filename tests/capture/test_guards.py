"""Guards: Python values that a step has read, compared before the step runs again."""

from __future__ import annotations

import ctypes
import decimal
import functools
import io
import logging
import multiprocessing
import os
import threading
import weakref
from array import array
from collections import ChainMap
from contextvars import ContextVar
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_piper.capture import CapturedStep, History, capture
from lightning_piper.capture.python_state import state_recorder
from lightning_piper.capture.torch_private import _torch
from lightning_piper.errors import CaptureError

BATCH = torch.ones(2, 3, dtype=torch.float64)


class Module(L.LightningModule):
    """A module whose step is one layer, and `body` of the layer's output."""

    def __init__(self, body: Any, **state: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        for name, value in state.items():
            setattr(self, name, value)
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(self, self.layer(batch)).mean()


def captured(module: L.LightningModule) -> CapturedStep:
    found = capture(module, BATCH)
    found.at(2)
    return found


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_change_is_seen_whenever_guards_are_first_compared(asked_before: bool) -> None:
    module = Module(lambda self, x: x * self.beta, beta=0.5)
    reads = captured(module).reads
    if asked_before:
        assert reads.hold()
    module.beta = 0.25
    assert not reads.hold()
    module.beta = 0.5
    assert reads.hold()


class Scale:
    """An object that is called, such as a loss function."""

    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor * FACTOR


FACTOR = 1.0


def helper(x: Tensor) -> Tensor:
    return x * 2


def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * FACTOR


class Kept:
    """A descriptor that keeps the values of all objects."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.values.get(owner, 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.values[owner] = value


class Described:
    factor = Kept()


class Made:
    @property
    def factor(self) -> float:
        return 1.0


@functools.cache
def cached(x: int) -> list[float]:
    return [x * 1.0]


@functools.lru_cache(maxsize=2)
def last_ones(x: int) -> dict[str, float]:
    return {"x": x * 1.0}


VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)
HOLDING: ContextVar[Scale] = ContextVar("HOLDING", default=Scale())  # noqa: B039
TABLE = {"x": 1.0}
OF_THREAD = threading.local()
OF_THREAD.x = 1


def _imports(self: Any, x: Tensor) -> Tensor:
    from tests.capture import test_guards as here

    return x * getattr(here, "FACTOR")  # noqa: B009


CHANGES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "a method, on the object": (
        lambda self, x: self(x),
        {},
        lambda m, p: p.setattr(m, "forward", torch.tanh),
    ),
    "a helper": (
        lambda self, x: helper(x),
        {},
        lambda m, p: p.setitem(globals(), "helper", torch.tanh),
    ),
    "an object that is called": (
        lambda self, x: self.scale(x),
        {"scale": Scale()},
        lambda m, p: p.setattr(m.scale, "factor", 3.0),
    ),
    "its method": (
        lambda self, x: self.scale(x),
        {"scale": Scale()},
        lambda m, p: p.setattr(Scale, "__call__", lambda self, x: x),
    ),
    "what its method names": (
        lambda self, x: self.scale(x),
        {"scale": Scale()},
        lambda m, p: p.setitem(globals(), "FACTOR", 3.0),
    ),
    "in a list": (
        lambda self, x: self.all[0](x),
        {"all": [Scale()]},
        lambda m, p: p.setattr(m.all[0], "factor", 3.0),
    ),
    "a bound method": (
        lambda self, x: self.call(x),
        {"call": Scale().__call__},
        lambda m, p: p.setattr(m.call.__self__, "factor", 3.0),
    ),
    "an import in the function": (_imports, {}, lambda m, p: p.setitem(globals(), "FACTOR", 3.0)),
    "a namespace": (
        lambda self, x: x * self.space.k,
        {"space": SimpleNamespace(k=1.0)},
        lambda m, p: p.setattr(m.space, "k", 2.0),
    ),
    "an array of Python": (
        lambda self, x: x * self.numbers[0],
        {"numbers": array("d", [1.0])},
        lambda m, p: m.numbers.__setitem__(0, 2.0),
    ),
    "numbers of C": (
        lambda self, x: x * self.numbers[0],
        {"numbers": (ctypes.c_double * 2)(1.0, 2.0)},
        lambda m, p: m.numbers.__setitem__(0, 2.0),
    ),
    "bytes": (
        lambda self, x: x * self.numbers[0],
        {"numbers": bytearray(b"a")},
        lambda m, p: m.numbers.__setitem__(0, 2),
    ),
    "a text in memory": (
        lambda self, x: x * len(self.text.getvalue()),
        {"text": io.StringIO("a")},
        lambda m, p: m.text.write("ab"),
    ),
    "a lock": (
        lambda self, x: x * 2 if self.lock.locked() else x,
        {"lock": threading.Lock()},
        lambda m, p: m.lock.acquire(),
    ),
    "an event": (
        lambda self, x: x * 2 if self.event.is_set() else x,
        {"event": threading.Event()},
        lambda m, p: m.event.set(),
    ),
    "values of a dict": (
        lambda self, x: x * sum(self.values),
        {"values": TABLE.values()},
        lambda m, p: p.setitem(TABLE, "x", 2.0),
    ),
    "the precision of decimals": (
        lambda self, x: x * float(self.decimals.divide(Decimal(1), Decimal(3))),
        {"decimals": decimal.Context(prec=5)},
        lambda m, p: setattr(m.decimals, "prec", 2),
    ),
    "the level of a logger": (
        lambda self, x: x * 2 if self.log_of_loss.isEnabledFor(10) else x,
        {"log_of_loss": logging.getLogger(__name__)},
        lambda m, p: m.log_of_loss.setLevel(10),
    ),
    "a context variable": (lambda self, x: x * VARIABLE.get(), {}, lambda m, p: VARIABLE.set(2.0)),
    "an object in a context variable": (
        lambda self, x: x * HOLDING.get().factor,
        {},
        lambda m, p: p.setattr(HOLDING.get(), "factor", 3.0),
    ),
    "a value of the thread": (lambda self, x: x * OF_THREAD.x, {}, lambda m, p: p.setattr(OF_THREAD, "x", 2)),
    "the environment": (
        lambda self, x: x * float(os.environ.get("PIPER_TEST_FACTOR", "1")),
        {},
        lambda m, p: p.setenv("PIPER_TEST_FACTOR", "2"),
    ),
    "what a descriptor keeps": (
        lambda self, x: x * self.described.factor,
        {"described": Described()},
        lambda m, p: setattr(m.described, "factor", 2.0),
    ),
    "a property of a class": (
        lambda self, x: x * Made().factor,
        {},
        lambda m, p: p.setattr(Made, "factor", property(lambda self: 2.0)),
    ),
    "what a cached function returned": (
        lambda self, x: x * cached(1)[0],
        {},
        lambda m, p: cached(1).__setitem__(0, 2.0),
    ),
    "the last results of a function": (
        lambda self, x: x * last_ones(1)["x"],
        {},
        lambda m, p: p.setitem(last_ones(1), "x", 2.0),
    ),
}


class Called(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_step_calls_is_guarded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, state, change = CHANGES[name]
    module = Called(body, **state)
    reads = captured(module).reads
    module.unread = 1
    assert reads.hold()
    change(module, monkeypatch)
    assert not reads.hold()


@pytest.mark.parametrize("follows", [True, False])
def test_attributes_are_compared_where_versions_of_dicts_do_not_follow_them(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 does not count a write to an attribute."""
    monkeypatch.setattr(_torch, "dict_version", lambda _: 0)
    monkeypatch.setattr(_torch, "dict_version_follows_attributes", lambda: follows)
    module = Called(lambda self, x: x * self.factor, factor=2.0)
    reads = captured(module).reads
    assert reads.hold()
    module.factor = 3.0
    assert reads.hold() == follows  # without a version that changes, nothing is compared


WRITES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number that processes share": (
        lambda self: setattr(self.shared, "value", self.shared.value + 1),
        {"shared": multiprocessing.Value("d", 1.0)},
        "self.shared",
    ),
    "an array": (
        lambda self: self.numbers.__setitem__(0, self.numbers[0] + 1),
        {"numbers": array("d", [1.0])},
        "self.numbers",
    ),
    "a context variable": (lambda self: VARIABLE.set(VARIABLE.get() + 1), {}, "VARIABLE"),
    "a value of the thread": (lambda self: setattr(OF_THREAD, "x", OF_THREAD.x + 1), {}, "OF_THREAD"),
    "the environment": (
        lambda self: os.environ.update(PIPER_TEST=os.environ.get("PIPER_TEST", "") + "x"),
        {},
        r"os.environ\['PIPER_TEST'\]",
    ),
    "a list that a function caches": (lambda self: cached(1).append(1.0), {}, "cached"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_step_that_changes_it_each_time_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, state, where = WRITES[name]
    monkeypatch.setenv("PIPER_TEST", "")
    module = Module(lambda self, x: (write(self), x)[1], **state)
    with pytest.raises(CaptureError, match=f"training_step changes .*{where}"):
        captured(module).retrace()


def test_a_step_may_set_a_variable_of_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_TEST", "")
    monkeypatch.delenv("PIPER_TEST")

    def body(self: Any, x: Tensor) -> Tensor:
        return x * float(os.environ.setdefault("PIPER_TEST", "2"))

    assert captured(Module(body)).reads.hold() and os.environ["PIPER_TEST"] == "2"


def test_variables_are_seen_however_often_steps_were_captured() -> None:
    """Python 3.13 loses track of a class's `__getitem__` that was replaced a thousand times."""
    seen: list[str] = []
    for _ in range(1100):
        with state_recorder._reading_variables(lambda owner, name: seen.append(name)):
            for _ in range(3):
                os.environ.get("PIPER_TEST")
        os.environ.get("PIPER_TEST")
    assert seen == ["PIPER_TEST"] * 3300


def steps(module: Module, values: list[Any], put: Any) -> list[CapturedStep]:
    """Return the capture that serves each of the values, chosen as the strategy chooses it."""
    history, found = History(), []
    for value in values:
        put(module, value)
        serving = next((x for x in found if x.reads.hold()), None)
        if serving is None:
            if found:
                history.learn(found[-1].reads)
            serving = capture(module, BATCH, history=history)
            serving.at(2)
        else:
            serving.retrace()
        found.append(serving)
    return found


def test_a_number_that_is_an_input_may_become_something_else() -> None:
    module = Module(lambda self, x: x * 7 if self.k is None else x * self.k, k=0.1)
    found = steps(module, [0.1, 0.2, 0.3, 0.4, None, 0.5, None, 2], lambda m, value: setattr(m, "k", value))
    # Two values, the input, and nothing, which is no number; an int is another kind of number.
    assert [found.index(x) for x in found] == [0, 1, 2, 2, 4, 2, 4, 7]


def test_a_capture_from_before_a_number_was_an_input_is_traced_as_it_was() -> None:
    module = Module(lambda self, x: sum(x * self.k for _ in range(self.k)), k=1)
    found = steps(module, [1, 2, 3, 1, 2, 3, 4], lambda m, value: setattr(m, "k", value))
    assert [found.index(x) for x in found] == [0, 1, 2, 0, 1, 2, 6]


@pytest.mark.parametrize("kind", [ChainMap, MappingProxyType])
def test_containers_that_write_elsewhere_are_left_alone(kind: Any) -> None:
    base = {"k": 0.5}
    module = Module(lambda self, x: x * self.table["k"], table=kind(base))
    found = steps(module, [0.1, 0.2, 0.3, 0.4], lambda m, value: base.__setitem__("k", value))
    assert len(set(map(id, found))) == 4 and base == {"k": 0.4}
    assert kind is not ChainMap or module.table.maps == [base]


def test_torchs_own_state_is_guarded() -> None:
    """It decides which operations a step is made of."""
    reads = captured(Module(lambda self, x: x * 2)).reads
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not reads.hold()
    assert reads.hold()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before != torch.float64 else torch.float32)
    try:
        assert not reads.hold()
    finally:
        torch.set_default_dtype(before)
    assert reads.hold()


class Config:
    """A configuration as in models of `transformers`: the first step sets the kind of problem."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.steps, self.first = 0, True


def test_what_a_step_notes_once_is_there_from_then_on() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "several classes"
        return x * 2 if self.config.kind == "several classes" else x * 3

    module = Module(body, config=Config())
    step = captured(module)
    assert module.config.kind == "several classes" and step.reads.hold() and "2" in step.text
    step.retrace()
    module.config.kind = "one"
    assert not step.reads.hold()


def counting(self: Any, x: Tensor) -> Tensor:
    self.config.steps += 1
    return x


def beginning(self: Any, x: Tensor) -> Tensor:
    first, self.config.first = self.config.first, False
    return x * 2 if first else x * 3


@pytest.mark.parametrize("body, where", [(counting, "steps"), (beginning, "first")])
def test_what_the_next_step_would_do_otherwise_is_refused(body: Any, where: str) -> None:
    module = Module(body, config=Config())
    with pytest.raises(CaptureError, match=rf"training_step changes self\.config\.{where}"):
        captured(module)
    assert (module.config.steps, module.config.first) == (0, True)


SEEN: list[int] = []


def hooked(self: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: self.hook(self, gradient))
    return x


@pytest.mark.parametrize(
    "hook, where",
    [
        (lambda self, gradient: self.seen.append(1), r"self\.seen"),
        (lambda self, gradient: setattr(self, "last", gradient), r"self\.last"),
        (lambda self, gradient: setattr(self.config, "steps", self.config.steps + 1), r"self\.config\.steps"),
        (lambda self, gradient: SEEN.append(1), "SEEN"),
    ],
)
def test_what_a_hook_of_the_backward_pass_changes_is_refused(hook: Any, where: str) -> None:
    with pytest.raises(CaptureError, match=f"training_step changes {where}"):
        captured(Module(hooked, hook=hook, seen=[], last=None, config=Config()))
    SEEN.clear()


def test_what_it_logs_is_refused_and_what_it_reads_is_guarded() -> None:
    with pytest.raises(CaptureError, match=r"self\.log\('size'\) is called in the backward pass"):
        captured(Module(hooked, hook=lambda self, gradient: self.log("size", gradient.norm())))
    module = Module(hooked, hook=lambda self, gradient: gradient * self.factor, factor=0.5)
    step = captured(module)
    assert step.reads.hold() and "0.5" in step.text
    module.factor = 0.25
    assert not step.reads.hold()
