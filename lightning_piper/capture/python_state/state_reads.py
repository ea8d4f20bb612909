"""Record what one captured step has read in Python: its guards, and the numbers that are inputs of its
graph."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.proxies.batch_changes import BatchChanges, own_attributes
from lightning_piper.capture.proxies.deferred_numbers import Namespace, accepting_deferred
from lightning_piper.capture.proxies.numbers import NumberAnswer, NumberInputs
from lightning_piper.capture.proxies.opaque_content import Carried, form_of_content
from lightning_piper.capture.python_state.effects import refusing_effects
from lightning_piper.capture.python_state.name_scan import is_users, reached_locations
from lightning_piper.capture.python_state.object_content import MEMOISED, held_by
from lightning_piper.capture.python_state.side_effects import ContainerGrowth, EffectLog, may_append
from lightning_piper.capture.python_state.state_locations import (
    GENERATORS,
    NUMBERS,
    VALUES,
    Guard,
    Guards,
    StateLocation,
    changed_numbers,
    form_of,
)
from lightning_piper.capture.python_state.state_protection import RefusalMode, changes
from lightning_piper.capture.python_state.state_recorder import StateRecorder
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.replaced_attribute import checked_calls
from lightning_piper.common.user_lines import shown_line
from lightning_piper.errors import CaptureError

T = TypeVar("T")
# The device types on which steps run.
_KINDS = ["cpu", *([found.type] if (found := torch.accelerator.current_accelerator()) else [])]
# State of torch that decides which operations a step runs: expression -> function that returns its value.
_OF_TORCH: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    **{f"torch.is_autocast_enabled({kind!r})": partial(torch.is_autocast_enabled, kind) for kind in _KINDS},
    **{f"torch.get_autocast_dtype({kind!r})": partial(torch.get_autocast_dtype, kind) for kind in _KINDS},
}
# State of torch that a step may change while it runs: function that changes it -> (function that returns the value,
# function that sets it).
_SET_BY: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    **{
        f"torch.set_autocast_enabled({kind!r}, ...)": (
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        for kind in _KINDS
    },
}
BECOMES_INPUT = 2  # number of broken guards after which a number becomes an input of the graph


class RandomDraw(Exception):
    """Raised if a step has drawn random numbers outside of the graph: from the generator in `args`. Without
    `args`, from a global generator of Python, numpy or torch."""


@dataclass
class History:
    """The findings of all captures of one step about its Python state.

    Each new capture of the step gets the same `History`. So a number whose changes have caused captures
    becomes an input of the graph. The caller sets `batch_idx` and `batch` before each step.

    Attributes:
        changes: Key of a number's place -> how often its change broke a guard.
        inputs: Key -> place of a number that changes so often that further captures take it as an input.
        growing: Key -> place of a list or dict to which the step adds.
        causes: Reason for another capture -> how often it occurred.
        batch_idx: Number of the batch in its epoch, as the step receives it.
        batch: Spec of the current batch, including its contents other than tensors.
    """

    changes: Counter[Any] = field(default_factory=Counter)
    inputs: dict[Any, StateLocation] = field(default_factory=dict)
    growing: dict[Any, StateLocation] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)
    batch_idx: int = 0
    batch: BatchSpec | None = None

    def learn(self, reads: StateReads) -> None:
        """Record the reasons why a capture is no longer valid: the places, and the answers of proxies,
        that have changed. A number with `BECOMES_INPUT` changes becomes an input of the next capture.

        Args:
            reads: the reads of that capture.
        """
        for guard in reads.guards.broken():
            if isinstance(guard, str):
                self.causes[guard] += 1
                continue
            at = guard.place
            self.causes[at.where] += 1
            for path in changed_numbers(guard):
                place = StateLocation(
                    at.where + "".join(f"[{k!r}]" for k in path), at.owner, at.name, at.item, path
                )
                self.changes[place.key] += 1
                if self.changes[place.key] >= BECOMES_INPUT and place.takes_number:
                    self.inputs[place.key] = place
        for answer in reads.inputs.answers.values():
            if not answer.holds():
                self.causes[answer.where] += 1


def _attribute(store: Mapping[str, torch.Tensor | None], name: str, key: str) -> Any:
    """Return a Python attribute of the tensor that a module's store of parameters or buffers currently has
    under `name`. Return None if there is no tensor or no attribute."""
    tensor = store.get(name)
    return None if tensor is None else vars(tensor).get(key)


class StateReads:
    """The Python state that a step read during its capture, with the guards and inputs that follow from it.

    A trace enters `tracing`. Inside of it, each run of the step's code enters `running`. Before each step,
    `hold` returns whether the capture is still valid.

    Attributes:
        guards: Places that must hold the same values as during the capture.
        inputs: The numbers that are inputs of the graph, and the answers of proxies that Python code used,
            which also must stay the same.
        namespaces: Globals dicts of the step's code in the last trace, with the names that the code calls.
        batch_changes: The changes that the step made to its batch in the last trace.
        keeping: Records the values that a step without a backward pass puts into Python objects. None if the
            step must not keep state.
    """

    def __init__(self, history: History | None = None) -> None:
        self.history = History() if history is None else history
        # A copy, so that all traces of this capture have the same inputs.
        self._places = dict(self.history.inputs)
        self.guards = Guards(inputs=self._places)
        self.inputs = NumberInputs()
        self._recorder: StateRecorder | None = None
        # Whether the backward pass is being traced, and the contexts that were entered for it.
        self._backwards, self._behind = False, contextlib.ExitStack()
        self.namespaces: list[Namespace] = []
        # Key of a place -> its guard, and the value that the step has written there. The guard's value is
        # put back after each run of the step.
        self._written: dict[Any, tuple[Guard, Any]] = {}
        self.batch_changes = BatchChanges()
        self.keeping: EffectLog | None = None
        # Places of numbers, each with the `NumberProxy` that replaces the number during a trace.
        self._numbers: list[tuple[StateLocation, Any]] = []
        # `_memoised`: places of functions under `functools.cache` that the step's code names.
        # `_results`: id of an object that such a function has returned -> {end of the expression: object}.
        self._memoised: list[StateLocation] = []
        self._results: dict[int, dict[str, Any]] = {}

    def hold(self) -> bool:
        """Return whether all values that the step has read are still the same as during the capture."""
        return self.guards.hold() and all(answer.holds() for answer in self.inputs.answers.values())

    def source(self, where: str, get: Callable[[], Any]) -> Any:
        """Return a `NumberProxy` for a number that changes from step to step, such as `batch_idx`. The number
        becomes an input of the graph. If `inputs.plain`, return the number itself.

        Args:
            where: the expression that a user would write for the number.
            get: returns the current number.
        """
        return self.inputs.source(where, where, get)

    def note_value(self, where: str, get: Callable[[], Any]) -> None:
        """Guard a value for which no `StateLocation` exists. If `where` is already guarded, do nothing.

        Args:
            where: the expression that a user would write for the value.
            get: returns the current value.
        """
        self.inputs.answers.setdefault(("read", where), NumberAnswer(where, get, get()))

    def guard_attributes(self, module: nn.Module) -> None:
        """Guard the numbers and texts among the Python attributes that the user has given parameters and
        buffers."""
        for path, part in module.named_modules():
            for store in (part._parameters, part._buffers):
                for name, x in store.items():
                    for key, value in ({} if x is None else own_attributes(x)).items():
                        if isinstance(value, bool | int | float | str):
                            where = ".".join(filter(None, ["self", path, name, key]))
                            # Look the tensor up by its name, because it may be replaced, such as by a
                            # placeholder.
                            self.note_value(where, partial(_attribute, store, name, key))

    def carried(self, item: Carried) -> Carried:
        """Return the current batch's list or object at the position of `item`. Its content may differ from
        the content of `item`, which comes from the captured batch."""
        assert self.history.batch is not None
        return self.history.batch.carried[item.index]

    def note(self, item: Carried) -> None:
        """Guard the content of a list or object of the batch, because the step reads it. The batch of a later
        step must then have the same content at this position."""

        def now() -> Any:
            return form_of_content(self.carried(item).content)

        self.inputs.answers.setdefault(("carried", item.index), NumberAnswer(f"batch{item.path}", now, now()))

    @contextlib.contextmanager
    def tracing(self, module: nn.Module, step: str) -> Iterator[None]:
        """Return a context for one trace of the step.

        Within this context, `NumberProxy` objects replace numbers that are inputs, and `AppendProxy` objects
        replace lists and dicts to which the step adds. The context guards the places that the step's code
        names. At the end, the user's objects return to their places.

        Raises:
            CaptureError: at the end, if the backward pass has changed a value that the step has read.
        """
        self._recorder = recorder = StateRecorder(module, self.guards, self.inputs)
        named, self.namespaces = reached_locations(module, step, recorder)
        put: list[tuple[StateLocation, Any]] = []
        self._numbers = []
        self.guards.retake()
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
                self.inputs.answers.setdefault(("torch", where), NumberAnswer(where, ask, ask()))
            for where, hooks in _torch.global_hooks().items():
                self.guards.note_hooks(where, hooks)
            for place in named:
                if place.key not in {place.key for place, _ in put}:
                    self.guards.note(place)
            self._memoised = [place for place in named if isinstance(place.get(), MEMOISED)]
            self._note_results()
            yield
            if self._backwards and (changed := next(self.guards.broken(), None)) is not None:
                raise changes(step, changed if isinstance(changed, str) else changed.place.where)
        finally:
            self._behind.close()
            self._recorder, self._backwards = None, False
            for place, value in put:
                place.put(value)
            self.guards.release()

    @contextlib.contextmanager
    def running(self, module: nn.Module, step: str, numbers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context in which the user's code runs, inside of `tracing`, and in which its reads are
        recorded. The tracer enters such a context for each run of the step.

        Args:
            numbers: the graph's inputs for the numbers that are already known.

        Raises:
            CaptureError: at the end, if the code has changed an object that it has read. Numbers and texts
                may change once; see `with_first_write`.
            RandomDraw: at the end, if the code has drawn from a random generator that it has read.
            ContainerGrowth: at the end, if `keeping` is set, and the code has added to a list or dict, or has
                increased a number. The next trace replaces the list, dict or number by a placeholder.
        """
        assert self._recorder is not None
        self._behind.close()  # the tracer runs the step more than once
        deferred = accepting_deferred(self.namespaces)
        with (
            RefusalMode(module, step),
            refusing_effects(step, self.namespaces),
            self.inputs.tracing(numbers),
            deferred,
            self._recorder.watching(),
            _torch_unchanged(step),
        ):
            yield
        self._note_results()
        if self.keeping is not None:
            self.keeping.numbers(self._numbers, step)
        for changed in [*self.guards.broken(), *self.guards.aliased()]:
            if self.keeping is not None and isinstance(changed, Guard):
                self._learn_kept(changed)
            if isinstance(changed, Guard) and isinstance(changed.value, GENERATORS):
                raise RandomDraw(changed.value)
            if isinstance(changed, str) or not changed.written_anew:
                raise changes(step, changed if isinstance(changed, str) else changed.place.where)
            self._written[changed.place.key] = changed, changed.place.get()
            changed.place.put(changed.value)  # the tracer runs the step more than once

    def _note_results(self) -> None:
        """Guard the content of lists, arrays and other objects that cached functions have returned. Immutable
        values and tensors do not need a guard."""
        for place in self._memoised:
            for name, x in held_by(place.get()).items():
                if id(x) not in self._results and not isinstance(x, (*VALUES, tuple, torch.Tensor)):
                    holder = self._results[id(x)] = {name: x}
                    self.guards.note(StateLocation(f"{place.where}{name}", holder, name))

    def goes_back(self, step: str, numbers: Sequence[torch.Tensor]) -> None:
        """From now until the end of `tracing`, also record the reads of the backward pass, whose hooks are the
        user's code. Refuse effects there as in the forward pass. Call it after the forward pass.

        Args:
            step, numbers: the arguments of `running`.
        """
        assert self._recorder is not None
        self._backwards = True
        for context in (
            self.inputs.tracing(numbers),
            accepting_deferred(self.namespaces),
            self._recorder.watching(),
            refusing_effects(step),
        ):
            self._behind.enter_context(context)

    def _learn_kept(self, changed: Guard) -> None:
        """If the changed value is a list or dict to which the step may have added, or a number that the step
        has changed, record its place for the next trace, and remove its guard. Otherwise do nothing.

        Args:
            changed: a guard that no longer holds.

        Raises:
            ContainerGrowth: a place was recorded, so the step must be traced again.
        """
        place = changed.place
        counts = type(changed.value) in NUMBERS and isinstance(place.get(), (*NUMBERS, torch.Tensor))
        if may_append(changed):
            self.history.growing[place.key] = place
        elif counts and place.item and place.key not in self._places:
            self.history.inputs[place.key] = self._places[place.key] = place
        else:
            return
        del self.guards.by_key[place.key]
        raise ContainerGrowth

    def was_read(self, place: StateLocation) -> bool:
        """Return whether the step has read the value in a place, so that a guard for it exists."""
        return place.key in self.guards.by_key

    def with_first_write(self, step: str, run: Callable[[], T], same: Callable[[T, T], bool]) -> T:
        """Return the trace that `run` makes, even if the step writes a Python value once.

        A model of `transformers`, for example, stores its problem type in the first step. If the first trace
        has written such a value, the function puts the value in place and traces once more. The written value
        remains in place, as it does after the first step on one device.

        Args:
            step: the name of the step.
            run: traces the step.
            same: returns whether two traces are equal.

        Raises:
            CaptureError: the second trace writes again, or differs from the first trace. The values from
                before the traces are then in place again.
            Exception: any error of `run`.
        """
        self._written = {}
        traced, written = run(), self._pop_written()
        if not written:
            return traced
        for guard, value in written:
            guard.place.put(value)
            del self.guards.by_key[guard.place.key]
        again = run()
        if self._pop_written() or not same(traced, again):
            for guard, _ in written:
                guard.place.put(guard.value)
            raise changes(step, written[0][0].place.where)
        return again

    def _pop_written(self) -> list[tuple[Guard, Any]]:
        """Return (guard, written value) for each place that the step has written, and forget them."""
        written, self._written = list(self._written.values()), {}
        return written


@contextlib.contextmanager
def _torch_unchanged(step: str) -> Iterator[None]:
    """Restore the state of torch in `_SET_BY` at the end of this context.

    Raises:
        CaptureError: at the end, if the code in the context has left a changed state.
    """
    before = {name: get() for name, (get, _) in _SET_BY.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        for name, (get, put) in _SET_BY.items():
            if get() != before[name]:
                changed.append(name)
                put(before[name])
    if changed:
        raise CaptureError(
            f"{step} calls {changed[0]} and does not restore the value. A captured step would do this only while Piper "
            "captures it. Restore the value in the step, or change it in a hook, such as on_train_start [PIPER-C003]"
        )


@contextlib.contextmanager
def without_drawing() -> Iterator[None]:
    """Within this context, random numbers must not be drawn from the global generators of Python, numpy or
    torch (on the CPU), even if the code restores their state. The generators are restored at the end.

    Raises:
        RandomDraw: at the end, if the code in the context has drawn random numbers, and has not failed.
    """
    before = _generators()
    within: list[str] = []  # the draws before the code restored the state, as in `torch.random.fork_rng`

    def note(*args: Any, **kwargs: Any) -> None:
        within.append(_drawn(before))

    try:
        with checked_calls(torch, "set_rng_state", note), checked_calls(torch.random, "set_rng_state", note):
            yield
        drawn = any(within) or _drawn(before)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
    if drawn:
        raise RandomDraw


def _generators() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the global generators of Python, numpy and torch."""
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _drawn(before: tuple[Any, Any, torch.Tensor]) -> str:
    """Return the name of a module whose global generator has changed since `_generators` returned `before`. Empty if
    all generators have the same state."""
    python, numpy, state = _generators()
    with _torch.with_data():
        same = torch.equal(state, before[2])
    if not same:
        return "torch"
    return "random" if python != before[0] else "" if _alike(numpy, before[1]) else "numpy.random"


def _alike(a: Any, b: Any) -> bool:
    """Return whether two states of numpy's generator are equal. A state is a dict of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def refuse_drawing(step: str, drawn: RandomDraw, run: Callable[[], Any]) -> CaptureError:
    """Return the error for a step that draws random numbers in Python. Run the step again to find the first
    line of the user's code that draws. If no line draws this time, the error does not name a line.

    Args:
        step: the name of the step.
        drawn: the error that shows which generator the step has drawn from.
        run: traces the step once more. Its errors are ignored.
    """
    own, before = drawn.args, _generators()
    states = list(map(form_of, own))
    line, found, source = "", "", type(own[0]).__name__ if own else ""

    def watch(frame: types.FrameType, event: str, _: Any) -> Any:
        """Note each line of the user's code. End `run` as soon as a line has drawn random numbers."""
        nonlocal line, found, source
        if not is_users(frame.f_code):
            return None
        if line and (list(map(form_of, own)) != states if own else _drawn(before)):
            found, source = line, source or _drawn(before)
            raise RandomDraw  # this ends `run`, which takes long while each line is watched
        at = frame.f_back if event == "return" and frame.f_back is not None else frame
        # Code without a file is skipped, for example code that a dataclass generates.
        if is_users(at.f_code) and not at.f_code.co_filename.startswith("<"):
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
    if source == "torch":
        return CaptureError(
            f"{where}{step} sets or advances torch's seed in Python, as torch.manual_seed does. A captured step would "
            "do this only once, while Piper captures it. Remove this call. Piper seeds each step [PIPER-C005]"
        )
    return CaptureError(
        f"{where}{step} draws random numbers in Python, or sets a seed "
        f"({source or 'random, numpy.random or a seed of torch'}). A captured step would do this only once, while Piper "
        "captures it. If it sets a seed, remove this call. Otherwise, draw the numbers as tensors: in the collate "
        "function, or with torch.rand, torch.randint or torch.bernoulli in the step [PIPER-C005]"
    )
