"""Record state that a step without a backward pass keeps in Python (`self.outputs.append(loss)`, `self.last =
preds`, `self.seen += len(x)`).

During a trace, an `AppendProxy` replaces each list or dict to which the step adds, and a `NumberProxy`
replaces each number that the step increases. The trace returns the added values like results. After each run,
Piper adds these values, computed from the batch, to the user's objects. Any other use of a replaced list or
dict, such as reading its length, raises an error: the trace would see the state of one batch only.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.proxies.deferred_numbers import is_deferred
from lightning_piper.capture.proxies.numbers import NumberProxy
from lightning_piper.capture.proxies.proxy_classes import Proxy
from lightning_piper.capture.python_state.state_locations import ALL, Guard, StateLocation
from lightning_piper.capture.python_state.state_protection import Attribute, attributes
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.limits import kind_of
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

_GROWING = (list, deque, dict, OrderedDict, defaultdict)
_VALUES = (type(None), bool, int, float, str, torch.Tensor)
# (index of the place in `EffectLog.places`, keys from the place's value to the changed container, operation,
# argument of the operation). For `self.outputs["loss"].append(x)`, it is (0, ("loss",), "append", x). The
# operation "attribute" assigns the argument to the place.
Effect = tuple[int, tuple[Any, ...], str, Any]


class ContainerGrowth(Exception):
    """Raised when a trace finds that the step adds to a list or dict, or increases a number.

    The next trace replaces the list, dict or number by a placeholder.
    """


def may_append(guard: Guard) -> bool:
    """Return whether a broken guard is on a list or dict that the place still holds. So the step may have
    added to it, or changed it in another way. The next trace shows which."""
    at = guard.place
    return (
        type(guard.value) in _GROWING
        and at.item
        and not at.path
        and at.name is not ALL
        and at.get() is guard.value
    )


class AppendProxy(Proxy):
    """A placeholder for a list or a dict that only supports adding entries.

    Items that are lists or dicts are again such placeholders. `isinstance` sees the class of the list or dict.
    Any other use raises a `CaptureError`, such as storing or returning the placeholder. The placeholder does
    not change the list or dict, but passes each addition to `note`.

    Args:
        like: the list or dict.
        where: its name in messages.
        note: called for each addition with the keys to the changed container, the operation, and the
            operation's argument.
        path: The keys that lead from the container in the place to `like`.
    """

    def __init__(
        self,
        like: Any,
        where: str,
        note: Callable[[tuple[Any, ...], str, Any], None],
        path: tuple[Any, ...] = (),
    ) -> None:
        self.__dict__.update(_like=like, _where=where, _note=note, _path=path)

    __class__ = property(lambda self: type(self._like))

    def append(self, value: Any) -> None:
        self._adds("append", value)

    def extend(self, values: Any) -> None:
        self._adds("extend", list(values))

    def __iadd__(self, values: Any) -> AppendProxy:  # type: ignore[misc]
        self.extend(values)
        return self

    def _adds(self, how: str, value: Any) -> None:
        """Note an operation of a list. Raise a `CaptureError` if this is not a list."""
        if not isinstance(self._like, list | deque):
            self._refuse()
        self._keep(how, value)

    def _keep(self, how: str, value: Any) -> None:
        """Note an operation. Raise a `CaptureError` if its argument has a placeholder, which would reach the
        user's objects."""
        for x in _torch.tree_flatten(value)[0]:
            if type(x) is AppendProxy:
                x._refuse()
        self._note(self._path, how, value)

    def __getitem__(self, key: Any) -> AppendProxy:
        """Return the placeholder of an item, which must be a list or dict. A missing item of a `defaultdict`
        is a new one."""
        try:
            inside = self._like[key]
        except (LookupError, TypeError):
            factory = getattr(self._like, "default_factory", None)
            inside = None if factory is None else factory()
        return self._inside(key, inside)

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(value) is AppendProxy and value._note is self._note and value._path == (*self._path, key):
            return  # the end of `self.outputs[key] += [x]`, which `__iadd__` has recorded
        if not isinstance(self._like, dict):
            self._refuse()
        self._keep("set", (key, value))

    def setdefault(self, key: Any, default: Any = None) -> AppendProxy:
        if not isinstance(self._like, dict):
            self._refuse()
        self._keep("setdefault", (key, default))
        return self._inside(key, self._like.get(key, default))

    def update(self, *args: Any, **entries: Any) -> None:
        for key, value in dict(*args, **entries).items():
            self[key] = value

    def _inside(self, key: Any, value: Any) -> AppendProxy:
        """Return the placeholder of the item `value`. Raise a `CaptureError` unless it is a list or dict."""
        if type(value) not in _GROWING:
            self._refuse()
        return AppendProxy(value, f"{self._where}[{key!r}]", self._note, (*self._path, key))

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"{user_line()}: the step may only add to {self._where} (append, extend, or set an item of a dict). Python "
            "code runs only while the step is captured, so any other use would see the contents from then in later "
            "steps. Do everything else with it in a hook [PIPER-C003]"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __len__ = __iter__ = __contains__ = __setattr__ = __delitem__ = __bool__ = __eq__ = __ne__ = __add__ = (
        __radd__
    ) = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __hash__ = __reversed__ = __mul__ = __rmul__ = __imul__ = _refuse
    __str__ = __repr__ = __format__ = __or__ = __ror__ = __ior__ = __copy__ = __deepcopy__ = _refuse
    __reduce_ex__ = _refuse


def take_attributes(
    module: nn.Module,
    before: list[Attribute],
    was_read: Callable[[StateLocation], bool],
    keep: Callable[[StateLocation, Any], None],
) -> None:
    """Call `keep` with each plain value (None, a number, a text or a tensor) that the step has assigned to an
    attribute of the module or of a submodule, and restore the attribute.

    Skip attributes that the step has read, and attributes that had another kind of value before. Also skip
    parameters and buffers.

    Args:
        before: the attributes before the step.
        was_read: returns whether the step has read a place.
        keep: called with the place of the attribute, and the assigned value.
    """
    known = {(id(part), name): (value, form) for _, part, name, value, form in before}
    for path, part, name, value, form in attributes(module):
        old = known.get((id(part), name))
        if old is not None and (form is old[1] or form == old[1]):
            continue
        entries = vars(part)
        place = StateLocation(f"self.{path}.{name}" if path else f"self.{name}", entries, name)
        if name not in entries or was_read(place) or not (isinstance(value, _VALUES) or is_deferred(value)):
            continue
        if old is not None and not isinstance(old[0], _VALUES):
            continue
        keep(place, value)
        if old is None:
            del entries[name]
        else:
            entries[name] = old[0]


def replay(places: Sequence[StateLocation], kept: Sequence[Effect]) -> None:
    """Repeat on the user's objects the changes that a step made during its trace, in the same order.

    Args:
        places: `EffectLog.places`.
        kept: the changes, with values that were computed from the current batch.
    """
    for index, path, how, value in kept:
        if how == "attribute":
            places[index].put(value)
            continue
        target = places[index].get()
        for key in path:
            target = target[key]
        _HOW[how](target, value)


def _set(target: Any, item: tuple[Any, Any]) -> None:
    target[item[0]] = item[1]


# operation of an `Effect` -> function of the container and the argument
_HOW: Mapping[str, Callable[[Any, Any], Any]] = {
    "append": lambda target, value: target.append(value),
    "extend": lambda target, values: target.extend(values),
    "set": _set,
    "setdefault": lambda target, item: target.setdefault(*item),
}


class ResultBuilder:
    """A callable that builds a step's return value, and the state that the step keeps, from the step's result
    tensors (`StepCode.rebuild`).

    The argument `leaves` of the methods has the tensors of the return value, then the tensors of the kept
    state. The arguments `given` are the further arguments of `BatchSpec.rebuild`.

    Args:
        returned: the spec of the return value.
        kept: the spec of the kept state, which is a list of `Effect`.
        places: `EffectLog.places`.
    """

    def __init__(self, returned: BatchSpec, kept: BatchSpec, places: Sequence[StateLocation]) -> None:
        self._returned, self._kept, self._places = returned, kept, tuple(places)

    def __call__(self, leaves: Sequence[torch.Tensor], *given: Any) -> Any:
        """Return the step's return value."""
        return self._returned.rebuild(leaves[: len(self._returned.specs)], *given)

    def and_keep(self, leaves: Sequence[torch.Tensor], *given: Any) -> Any:
        """Return the step's return value, and store the kept state on the user's objects."""
        replay(self._places, self._kept.rebuild(leaves[len(self._returned.specs) :], *given))
        return self(leaves, *given)


class EffectLog:
    """A recorder of the state that a step keeps while it is traced.

    Attributes:
        found: the additions and assignments so far, in order.
        places: the place of each entry of `found`, with the same index.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all changes, because a tracer runs the step more than once."""
        self.found: list[Effect] = []
        self.places: list[StateLocation] = []

    def growing(self, place: StateLocation) -> AppendProxy:
        """Return the placeholder that replaces the container at a place during the trace."""
        return AppendProxy(
            place.get(), place.where, lambda path, how, value: self.note(place, path, how, value)
        )

    def note(self, place: StateLocation, path: tuple[Any, ...], how: str, value: Any) -> None:
        """Record a change of the value in a place. See `Effect` for the arguments."""
        self.places.append(place)
        self.found.append((len(self.places) - 1, path, how, value))

    def numbers(self, placed: Sequence[tuple[StateLocation, Any]], step: str) -> None:
        """Record the new values of numbers that the step has changed, such as `self.seen += len(x)`, and put
        the placeholders of the numbers back in place.

        Args:
            placed: (place, `NumberProxy` that was in the place before the step ran).
            step: the name of the step.

        Raises:
            CaptureError: the step has replaced a number by a value that does not follow from numbers that
                are inputs, such as a tensor.
        """
        for place, number in placed:
            now = place.get()
            if now is number:
                continue
            place.put(number)
            if type(now) is not NumberProxy:
                what, fix = kind_of(now), "Set it in a hook"
                if isinstance(now, torch.Tensor) or is_deferred(now):
                    what = "a tensor" if isinstance(now, torch.Tensor) else f"{what} from a tensor"
                    fix = (
                        "Accumulate tensors in a metric object (torchmetrics.MeanMetric), or append them to a list "
                        "and add them up in a hook"
                    )
                raise CaptureError(
                    f"{step} replaces {place.where}, a number that it reads, by {what}. Python code runs "
                    f"only while the step is captured, so later steps would not see the new value. {fix} [PIPER-C003]"
                )
            self.note(place, (), "attribute", now)
