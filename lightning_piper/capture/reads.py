"""What one captured step has read in Python: its guards, and the numbers that are inputs of its graph."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lightning_piper.capture import _torch
from lightning_piper.capture.batch import BatchSpec
from lightning_piper.capture.carried import Carried, form_of_content
from lightning_piper.capture.deferred import Namespace, understood
from lightning_piper.capture.kept import Grows, Keeping, may_grow
from lightning_piper.capture.numbers import Answer, Inputs
from lightning_piper.capture.places import GENERATORS, NUMBERS, Guard, Guards, Place, changed_numbers, form_of
from lightning_piper.capture.reach import is_users, reached
from lightning_piper.capture.recorder import Recorder
from lightning_piper.capture.source import shown_line
from lightning_piper.capture.unchanged import Refusing, changes
from lightning_piper.errors import CaptureError

T = TypeVar("T")
_KINDS = ["cpu", *([found.type] if (found := torch.accelerator.current_accelerator()) else [])]  # of devices that steps run on
# What of torch's own state decides which operations a step is made of.
_OF_TORCH: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    **{f"torch.is_autocast_enabled({kind!r})": partial(torch.is_autocast_enabled, kind) for kind in _KINDS},
    **{f"torch.get_autocast_dtype({kind!r})": partial(torch.get_autocast_dtype, kind) for kind in _KINDS},
}
BECOMES_INPUT = 2  # changes of a number after which it is an input of the graph


class Drawn(Exception):
    """A step has drawn from Python's, numpy's or torch's global generator, or from the one given here."""


@dataclass
class History:
    """What the captures of one step have taught.

    Attributes:
        changes: how often a number's change broke a guard, by its place.
        inputs: numbers that change so often that they are inputs of further captures.
        causes: what made a capture necessary -> how often.
        batch_idx: number of the batch in its epoch, as the step is given it.
        batch: spec of the batch, which has what the step carries.
        growing: lists and dicts to which it adds, by place.
    """

    changes: Counter[Any] = field(default_factory=Counter)
    inputs: dict[Any, Place] = field(default_factory=dict)
    growing: dict[Any, Place] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)
    batch_idx: int = 0
    batch: BatchSpec | None = None

    def learn(self, reads: Reads) -> None:
        """The last capture no longer serves."""
        for guard in reads.guards.broken():
            if isinstance(guard, str):
                self.causes[guard] += 1
                continue
            at = guard.place
            self.causes[at.where] += 1
            for path in changed_numbers(guard):
                place = Place(at.where + "".join(f"[{k!r}]" for k in path), at.owner, at.name, at.item, path)
                self.changes[place.key] += 1
                if self.changes[place.key] >= BECOMES_INPUT and place.takes_number:
                    self.inputs[place.key] = place
        for answer in reads.inputs.answers.values():
            if not answer.holds():
                self.causes[answer.where] += 1


class Reads:
    """What a step's Python code read while it was captured, and what is done about it.

    Attributes:
        guards: places that stood as they stand.
        inputs: numbers.
        namespaces: globals of the step's code, as of the last trace.
    """

    def __init__(self, history: History | None = None) -> None:
        self.history = History() if history is None else history
        self._places = dict(self.history.inputs)  # as of the capture: every trace of it has the same inputs
        self.guards = Guards(inputs=self._places)
        self.inputs = Inputs()
        self._recorder: Recorder | None = None
        self._backwards, self._behind = False, contextlib.ExitStack()  # is the backward pass traced? Entered meanwhile
        self.namespaces: list[Namespace] = []
        self._written: dict[Any, tuple[Guard, Any]] = {}  # what the step has written, undone again
        self.keeping: Keeping | None = None  # of a step that may keep something, while it is traced
        self._numbers: list[tuple[Place, Any]] = []  # which stand in their places meanwhile

    def hold(self) -> bool:
        """Does the step still mean what was captured?"""
        return self.guards.hold() and all(answer.holds() for answer in self.inputs.answers.values())

    def source(self, where: str, get: Callable[[], Any]) -> Any:
        """A number that changes from step to step."""
        return self.inputs.source(where, where, get)

    def carried(self, item: Carried) -> Carried:
        """What the batch that is there carries in this place: the one that was captured may have carried something else."""
        assert self.history.batch is not None
        return self.history.batch.carried[item.index]

    def note(self, item: Carried) -> None:
        """The content of what the batch carries is read: another one needs another capture."""

        def now() -> Any:
            return form_of_content(self.carried(item).content)

        self.inputs.answers.setdefault(("carried", item.index), Answer(f"batch{item.path}", now, now()))

    @contextlib.contextmanager
    def tracing(self, module: nn.Module, step: str) -> Iterator[None]:
        """Around a trace: numbers that are inputs stand in their places, and reads can be recorded."""
        self._recorder = recorder = Recorder(module, self.guards, self.inputs)
        named, self.namespaces = reached(module, step, recorder)
        put: list[tuple[Place, Any]] = []
        self._numbers = []
        try:
            for place in self._places.values():
                if place.takes_number:
                    value = place.get()
                    place.put(number := self.inputs.source(place.key, place.where, place.get))
                    put.append((place, value))
                    self._numbers.append((place, number))
            if (keeping := self.keeping) is not None:
                for place in self.history.growing.values():
                    put.append((place, place.get()))
                    place.put(keeping.growing(place))
            for where, ask in _OF_TORCH.items():
                self.inputs.answers.setdefault(("torch", where), Answer(where, ask, ask()))
            for where, hooks in _torch.global_hooks().items():
                self.guards.note_hooks(where, hooks)
            for place in named:
                if place.key not in {place.key for place, _ in put}:
                    self.guards.note(place)
            yield
            if self._backwards and (changed := next(self.guards.broken(), None)) is not None:
                raise changes(step, changed if isinstance(changed, str) else changed.place.where)
        finally:
            self._behind.close()
            self._recorder, self._backwards = None, False
            for place, value in put:
                place.put(value)

    @contextlib.contextmanager
    def running(self, module: nn.Module, step: str, numbers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the user's code, inside of `tracing`. `numbers`: the graph's inputs for those that are known.

        Raises:
            CaptureError: it changes what it has read.
        """
        assert self._recorder is not None
        self._behind.close()  # the tracer runs the step more than once
        with Refusing(module, step), self.inputs.tracing(numbers), understood(self.namespaces), self._recorder.watching():
            yield
        if self.keeping is not None:
            self.keeping.numbers(self._numbers, step)
        for changed in list(self.guards.broken()):
            if self.keeping is not None and isinstance(changed, Guard):
                self._learn_kept(changed)
            if isinstance(changed, Guard) and isinstance(changed.value, GENERATORS):
                raise Drawn(changed.value)
            if isinstance(changed, str) or not changed.written_anew:
                raise changes(step, changed if isinstance(changed, str) else changed.place.where)
            self._written[changed.place.key] = changed, changed.place.get()
            changed.place.put(changed.value)  # the tracer runs the step more than once

    def goes_back(self, numbers: Sequence[torch.Tensor]) -> None:
        """The user's code has run, inside of `tracing`. What follows is the backward pass: its hooks are the user's code, too.
        `numbers`: as for `running`."""
        assert self._recorder is not None
        self._backwards = True
        for context in (self.inputs.tracing(numbers), understood(self.namespaces), self._recorder.watching()):
            self._behind.enter_context(context)

    def _learn_kept(self, changed: Guard) -> None:
        """The step has changed what it has read: adds it to a list, or counts?

        Raises:
            Grows: it may.
        """
        place = changed.place
        counts = type(changed.value) in NUMBERS and isinstance(place.get(), (*NUMBERS, torch.Tensor))
        if may_grow(changed):
            self.history.growing[place.key] = place
        elif counts and place.item and place.key not in self._places:
            self.history.inputs[place.key] = self._places[place.key] = place
        else:
            return
        del self.guards.by_key[place.key]
        raise Grows

    def was_read(self, place: Place) -> bool:
        """Has the step read what stands in a place?"""
        return place.key in self.guards.by_key

    def settled(self, step: str, run: Callable[[], T], same: Callable[[T, T], bool]) -> T:
        """What `run` traces of a step that may write a value once, as a model of `transformers` notes which problem it solves. The
        value is there from now on, as it is after the first step on one device.

        Raises:
            CaptureError: the step is another one then, or writes again.
        """
        self._written = {}
        traced, written = run(), self._taken()
        if not written:
            return traced
        for guard, value in written:
            guard.place.put(value)
            del self.guards.by_key[guard.place.key]
        again = run()
        if self._taken() or not same(traced, again):
            for guard, _ in written:
                guard.place.put(guard.value)
            raise changes(step, written[0][0].place.where)
        return again

    def _taken(self) -> list[tuple[Guard, Any]]:
        written, self._written = list(self._written.values()), {}
        return written


@contextlib.contextmanager
def without_drawing() -> Iterator[None]:
    """Random numbers go on afterwards as if none had been drawn.

    Raises:
        Drawn: some were.
    """
    before = _generators()
    try:
        yield
        drawn = _drawn(before)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
    if drawn:
        raise Drawn


def _generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _drawn(before: tuple[Any, Any, torch.Tensor]) -> bool:
    python, numpy, state = _generators()
    with _torch.with_data():
        same = torch.equal(state, before[2])
    return not same or python != before[0] or not _alike(numpy, before[1])


def _alike(a: Any, b: Any) -> bool:
    """Of numpy's states: dictionaries of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def refuse_drawing(step: str, drawn: Drawn, run: Callable[[], Any]) -> CaptureError:
    """The error for a step that draws, with the line after which `run` first has drawn."""
    own, before = drawn.args, _generators()
    states = list(map(form_of, own))
    line, found = "", ""

    def watch(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal line, found
        if found or not is_users(frame.f_code):
            return None
        if line and (list(map(form_of, own)) != states if own else _drawn(before)):
            found = line
        at = frame.f_back if event == "return" and frame.f_back is not None else frame
        if is_users(at.f_code) and not at.f_code.co_filename.startswith("<"):  # a dataclass's, say
            line = shown_line(at.f_code.co_filename, at.f_lineno)
        return watch

    tracing = sys.gettrace()
    with contextlib.suppress(Exception), without_drawing():
        sys.settrace(watch)
        try:
            run()
        finally:
            sys.settrace(tracing)
    where = f"{found}: " if found else ""
    return CaptureError(
        f"{where}{step} draws random numbers in Python (random, numpy.random, or a seed of torch's), and a captured step would "
        "keep the first ones. Draw them with torch, as tensors (torch.rand, torch.randint, torch.bernoulli), "
        "or in the collate function"
    )
