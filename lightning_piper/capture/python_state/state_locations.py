"""Places of the Python state that a step reads, and guards on the values in these places. A captured step may
run while its guards hold."""

from __future__ import annotations

import enum
import functools
import random
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from lightning_piper.capture.proxies.deferred_numbers import is_deferred
from lightning_piper.capture.proxies.numbers import NumberProxy
from lightning_piper.capture.python_state.object_content import (
    ENVIRONMENT,
    content_of,
    files_behind,
    is_disk_file,
    is_opaque_iterator,
    position_of,
    reaches_outside,
)
from lightning_piper.capture.python_state.unchanged_items import (
    are_same,
    entries,
    is_flat,
    items_of,
    version_of,
)
from lightning_piper.capture.torch_private import _torch
from lightning_piper.errors import CaptureError

MISSING = object()  # the value of a place that has no value, such as a dict's entry that does not exist
GONE = object()  # the value of a place whose owner no longer exists
_RELEASED = object()  # a `Guard.value` that the guard no longer holds
ALL = object()  # a `StateLocation.name` that stands for all entries of the dict
# Classes of immutable values, which guards compare by `repr`.
VALUES = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype,
    torch.device, PurePath, range,
          slice, type(Ellipsis))  # fmt: skip
NUMBERS = (int, float)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
PROXIES = (
    weakref.ProxyTypes
)  # test `type(x) in PROXIES` before `isinstance(x, ...)`, which reads the referent


def referent(value: Any) -> Any:
    """Return the object to which a weak reference or a weak proxy refers. Return None if the object no longer
    exists."""
    if type(value) not in PROXIES:
        return value()
    try:
        return value.__dir__.__self__  # a proxy has no other way to its object than a bound method
    except ReferenceError:
        return None


class WeakAttributes:
    """The attributes of an object, in its `__dict__` or its slots, as the owner of places. It does not keep the
    object alive.

    Attributes:
        id: the id of the `__dict__`, or of an object with slots only.
    """

    def __init__(self, value: Any) -> None:
        self._held = weakref.ref(value)
        self._slots = not hasattr(value, "__dict__")
        self.id = id(value if self._slots else self._entries())

    @classmethod
    def of(cls, value: Any) -> WeakAttributes | dict[str, Any] | None:
        """Return the `WeakAttributes` of an object.

        Return the `__dict__` of an object that does not support weak references or defines `__dict__` itself
        (None if it has slots only). Also return the `__dict__` of a module, because this dict counts its
        changes.
        """
        entries: dict[str, Any] | None = getattr(value, "__dict__", None)
        if isinstance(value, torch.nn.Module):
            return entries
        try:
            found = cls(value)
        except (TypeError, AttributeError):
            return entries
        return found if found.id == id(value if entries is None else entries) else entries

    def _entries(self) -> Any:
        value = self._held()
        return None if value is None else object.__getattribute__(value, "__dict__")

    def get(self, name: str, default: Any) -> Any:
        """Return the attribute, or the default. Return `GONE` if the object no longer exists."""
        value = self._held()
        if value is None:
            return GONE
        return getattr(value, name, default) if self._slots else self._entries().get(name, default)

    def pop(self, name: str, default: Any) -> None:
        """Remove the attribute, if the object has it."""
        if self._slots and hasattr(self._held(), name):
            delattr(self._held(), name)
        elif not self._slots and (entries := self._entries()) is not None:
            entries.pop(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        if self._slots:
            setattr(self._held(), name, value)
        elif (entries := self._entries()) is not None:
            entries[name] = value


@dataclass(frozen=True, eq=False)
class StateLocation:
    """A place that holds a value: an entry of a dict (attributes of most objects, globals) or an attribute
    (slots, classes, cells).

    For example, `self.config["sizes"][2]` is
    `StateLocation('self.config["sizes"][2]', vars(module), "config", path=("sizes", 2))`.

    Attributes:
        where: The expression that a user would write for the place.
        owner, name: The dict (or `WeakAttributes`) and its key, or the object and its attribute.
        item: Whether the place is an entry of a dict. If not, it is an attribute.
        path: If the value is inside of a container in that place, the keys that lead to the value.
    """

    where: str
    owner: Any
    name: Any
    item: bool = True
    path: tuple[Any, ...] = ()

    @property
    def key(self) -> Any:
        """A key that is equal for equal places, as long as the owner exists."""
        owner = self.owner.id if type(self.owner) is WeakAttributes else id(self.owner)
        return (owner, self.name, self.path)

    def get(self) -> Any:
        """Return the current value at this place. Return `MISSING` if there is no value. If the name is `ALL`,
        return all (key, value) pairs of the dict as a tuple."""
        if self.name is ALL:
            return tuple(self.owner.items())
        found: Any = (
            self.owner.get(self.name, MISSING) if self.item else getattr(self.owner, self.name, MISSING)
        )
        for key in self.path:
            try:
                found = entries(found)[key]
            except (LookupError, TypeError):
                return MISSING
        return found

    @property
    def takes_number(self) -> bool:
        """Whether the place holds an int or a float, and a `NumberProxy` can replace it during a trace."""
        if type(self.get()) not in NUMBERS:
            return False
        if not self.path:
            return True
        within = entries(StateLocation(self.where, self.owner, self.name, self.item, self.path[:-1]).get())
        # Other containers may convert the value, reject it, or store it elsewhere.
        return getattr(type(within), "__setitem__", None) in _SETTING

    def put(self, value: Any) -> None:
        """Set the value at this place. If the place is an entry of a dict, `MISSING` removes the entry."""
        if self.path:
            within = StateLocation(self.where, self.owner, self.name, self.item, self.path[:-1]).get()
            entries(within)[self.path[-1]] = value
        elif self.item and value is MISSING:
            self.owner.pop(self.name, None)
        elif self.item:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


_SETTING = (dict.__setitem__, list.__setitem__, OrderedDict.__setitem__, deque.__setitem__)
Path = tuple[Any, ...]  # keys within a container


def form_of(
    value: Any, without: frozenset[Path] = frozenset(), path: Path = (), inside: tuple[int, ...] = ()
) -> Any:
    """Return a key that is equal for values that mean the same to a step. Guards compare these keys.

    `VALUES`, containers, arrays, generators, bound methods, partial functions, and objects whose content
    `content_of` returns are compared by content. All tensors inside of containers are equal. Other objects, and
    tensors outside of containers, are compared by identity, because their attributes are separate places. A
    weak reference counts as its object, or as no object.

    The key does not keep an object alive that is compared by identity, because the user's code can see it
    vanish. The exception is an object without support for weak references.

    Args:
        without: paths of numbers that count as equal to any other number.
        path, inside: used by the recursion: path so far, and ids of the enclosing containers.
    """
    if type(value) is NumberProxy:
        value = value.value
    if path in without and type(value) in NUMBERS:
        return "any number"
    if type(value) in (int, str, bool, type(None)):
        return (type(value), value)
    if type(value) in PROXIES or isinstance(value, weakref.ref):
        return ("weak", type(value), form_of(referent(value), without, (*path, "()"), inside))
    if isinstance(value, VALUES):
        return (type(value), repr(value))
    if isinstance(value, torch.Tensor):
        # Torch's RNNs replace the tensors in the lists of their weights, so tensors in containers are equal.
        return _ObjectIdentity(value) if not path else torch.Tensor
    if isinstance(value, np.ndarray):
        of_objects = value.dtype == object
        content = tuple(map(_ObjectIdentity, value.flat)) if of_objects else zlib.crc32(value.tobytes())
        return ("array", value.dtype.str, value.shape, content)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState | random.Random):
        return zlib.crc32(
            repr(value.getstate() if isinstance(value, random.Random) else value.get_state()).encode()
        )
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, types.MethodType):  # every attribute access makes a new method object
        return (type(value), (_ObjectIdentity(value.__func__), _ObjectIdentity(value.__self__)))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (type(value), tuple(form_of(x, without, (*path, i), inside) for i, x in enumerate(parts)))
    value = entries(value)
    if isinstance(value, Mapping):
        return (
            type(value),
            tuple((_key_form(key), form_of(x, without, (*path, key), inside)) for key, x in value.items()),
        )
    if isinstance(value, Set):
        return (type(value), frozenset(form_of(x, without, (*path, None), inside) for x in value))
    if is_sequence(value):
        return (type(value), tuple(form_of(x, without, (*path, i), inside) for i, x in enumerate(value)))
    if (content := content_of(value)) is not None:
        return ("content", type(value), form_of(content, inside=inside))
    return _ObjectIdentity(value)


def _key_form(key: Any) -> Any:
    """Return the form of a dict's key: the key itself, or its `_ObjectIdentity` if its class compares objects
    by identity, or compares tensors."""
    by_identity = getattr(type(key), "__eq__", None) is object.__eq__ or isinstance(key, torch.Tensor)
    return _ObjectIdentity(key) if by_identity else key


def is_sequence(value: Any) -> bool:
    """Return whether the value is a list, a tuple, a deque or a `ListConfig` of omegaconf."""
    return isinstance(value, list | tuple) or type(value).__name__ in ("deque", "ListConfig")


def containers_of(value: Any) -> list[Any]:
    """Return the value and the values inside of it, at any depth, that are lists, deques, dicts or sets. Each
    occurs once, in the order of the value's items."""
    found: dict[int, Any] = {}

    def walk(value: Any) -> None:
        if type(value) in PROXIES:
            return
        value = entries(value)
        inside = value.values() if isinstance(value, Mapping) else value
        if id(value) in found or not (is_sequence(value) or isinstance(value, Mapping | Set)):
            return
        if not isinstance(value, tuple | frozenset):
            found[id(value)] = value
        for x in inside:
            walk(x)

    walk(value)
    return list(found.values())


class _ObjectIdentity:
    """A wrapper that is equal only to wrappers of the same object. It does not keep the object alive, unless the
    object does not support weak references. After the object's end, it is equal to no other wrapper."""

    def __init__(self, value: Any) -> None:
        self._id, self._kind = id(value), type(value)
        try:
            self._weak: weakref.ref[Any] | None = weakref.ref(value)
        except TypeError:
            self._weak, self._strong = None, value

    @property
    def value(self) -> Any:
        """The object. `GONE` if it no longer exists."""
        if self._weak is None:
            return self._strong
        found = self._weak()
        return GONE if found is None else found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        found = self.value
        return isinstance(other, _ObjectIdentity) and other.value is found and found is not GONE

    def __hash__(self) -> int:
        return self._id

    def __repr__(self) -> str:
        return f"a {self._kind.__name__}"


def taking_from(iterator: str) -> CaptureError:
    """Return the error for a step that takes the next value of an iterator.

    Args:
        iterator: the expression that a user would write for the iterator.
    """
    return CaptureError(
        f"the step takes the next value of the iterator {iterator}. A captured step would reuse the value "
        "from its capture in every step. Take the value in a hook, such as on_train_batch_start, and keep it in an "
        "attribute or a buffer [PIPER-C004]"
    )


def _is_fixed(value: Any) -> bool:
    """Return whether the value is an immutable value of `VALUES`, such as a number, or a tuple of such
    values, such as `normalized_shape` of a layer norm."""
    if type(value) in PROXIES:
        return False
    return isinstance(value, VALUES) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


@dataclass(eq=False)
class Guard:
    """A check that a place still has the value that it had when the step was captured.

    Attributes:
        form: the key that `form_of` returned for the value.
        value: the value itself. Its content may have changed since. After `release`, only if it is immutable.
        loose: paths to numbers inside of the value. These numbers are inputs, so the guard ignores them.
        containers: the lists, dicts and sets in the value, as `containers_of` returned them.
    """

    place: StateLocation
    form: Any
    value: Any
    loose: frozenset[Path] = frozenset()
    containers: Sequence[Any] = ()
    # `items_of` and `version_of` the value when its form was last compared
    _items: list[Any] | None = None
    _version: int | None = None

    @classmethod
    def of(cls, place: StateLocation, loose: frozenset[Path] = frozenset()) -> Guard:
        """Return a guard on the value that the place has now."""
        value = place.get()
        found = cls(place, form_of(value, loose), value, loose)
        if found.mutable:
            found.containers = containers_of(value)
        return found

    @functools.cached_property
    def mutable(self) -> bool:
        """Whether `form` can change without an assignment to the place, such as the form of a list."""
        if self.place.name is ALL or _is_fixed(self.value):
            return False
        return not isinstance(self.form, _ObjectIdentity) and self.value is not MISSING

    @property
    def written_anew(self) -> bool:
        """Whether an immutable value of a dict's entry, such as a number or a text, was replaced by another
        immutable value, or an environment variable was set for the first time. A number that a tensor has does not
        count. Read this only if the guard does not hold."""
        at, now = self.place, self.place.get()
        fixed = _is_fixed(self.value) or (self.value is MISSING and type(at.owner) is ENVIRONMENT)
        known = _is_fixed(now) and not is_deferred(now)
        return at.item and not at.path and at.name is not ALL and fixed and known

    def release(self) -> None:
        """Stop keeping the value alive. Call it when the trace has ended: from then on, `form` is enough."""
        if is_disk_file(self.value):  # between steps, hooks may use it
            self.form = _ObjectIdentity(self.value)
        if self.value is not MISSING and not _is_fixed(self.value):
            self.value, self.containers = _RELEASED, ()

    def retake(self) -> None:
        """Undo `release` before another trace, if the place still has the value."""
        if self.value is _RELEASED and self.holds():
            self.value = self.place.get()
            self.containers = containers_of(self.value) if self.mutable else ()

    def now(self) -> Any:
        """Return the form of the value that the place has now."""
        return form_of(self.place.get(), self.loose)

    def holds(self) -> bool:
        """Return whether the value of the place still has the same form."""
        value = self.place.get()
        if value is GONE:
            return False
        if type(self.form) is _ObjectIdentity and value is self.form.value:
            return True
        if value is self.value and not self.mutable:
            return True
        # These comparisons are much faster than a comparison of forms.
        within = self.place.owner if self.place.name is ALL else value
        version = version_of(within)
        if version is not None and version == self._version:
            return True
        items = items_of(within)
        if items is None or self._items is None or not are_same(items, self._items):
            if form_of(value, self.loose) != self.form:
                return False
            self._items = items
        self._version = version if version is not None and is_flat(within) else None
        return True


def changed_numbers(guard: Guard) -> Iterator[Path]:
    """Return the paths of the changed numbers in the value of a guard that no longer holds. If the
    value itself is the number, its path is (). There are no paths if anything other than a number that can be
    assigned to has changed."""

    def walk(before: Any, after: Any, path: Path) -> Iterator[Path | None]:
        """Yield the path of each number that differs between two forms, and None for any other difference."""
        if before == after:
            return
        # The form of a container or number is (class, content).
        same = (
            isinstance(before, tuple)
            and isinstance(after, tuple)
            and before[0] == after[0]
            and len(before) == len(after) == 2
        )
        if not same:
            yield None
        elif before[0] in NUMBERS:
            yield path
        elif isinstance(before[1], tuple) and isinstance(after[1], tuple) and len(before[1]) == len(after[1]):
            keyed = issubclass(before[0], Mapping)
            if keyed and [k for k, _ in before[1]] != [k for k, _ in after[1]]:
                yield None
                return
            # Entries of these classes cannot be assigned to.
            if issubclass(before[0], tuple | functools.partial | types.MethodType):
                yield None
                return
            for i, (x, y) in enumerate(zip(before[1], after[1], strict=True)):
                if keyed:
                    key = x[0].value if type(x[0]) is _ObjectIdentity else x[0]
                    yield from walk(x[1], y[1], (*path, key))
                else:
                    yield from walk(x, y, (*path, i))
        else:
            yield None

    found = list(walk(guard.form, guard.now(), ()))
    return iter(()) if None in found else iter(p for p in found if p is not None)


@dataclass
class Guards:
    """All guards of a captured step.

    `hold` runs before every step, so it must be fast. Some guards are on a dict's entry whose value is
    immutable or compared by identity. `hold` compares such a value only if Python's version counter of the
    dict has changed. If the counter does not follow attributes (Python 3.13), `hold` compares all values.
    """

    # Key of a place -> this place, which holds a number that is an input of the graph. Guards ignore these
    # numbers, also inside of containers.
    inputs: Mapping[Any, StateLocation] = field(default_factory=dict)
    by_key: dict[Any, Guard] = field(default_factory=dict)  # key of a place -> its guard
    # id of a dict of hooks -> (expression for the dict, the dict, its form when the step was captured)
    hooks: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stale = True
        # During a trace: id of a file of `files_behind` -> (expression of the guarded object, file, its position)
        self._files: dict[int, tuple[str, Any, int | None]] = {}

    def note(self, place: StateLocation) -> None:
        """Guard a place that the step reads. If the place is already guarded, keep the first value.

        Within a trace, also guard the files into which the value may write (`files_behind`).

        Raises:
            CaptureError: the value is or has an object of `reaches_outside`.
        """
        if place.key not in self.by_key:
            loose = (x.path for x in self.inputs.values() if x.key[:2] == place.key[:2])
            self.by_key[place.key] = Guard.of(place, frozenset(loose))
            self._note_files(self.by_key[place.key])
            self._stale = True

    def _note_files(self, guard: Guard) -> None:
        where, found = guard.place.where, files_behind(guard.value)
        if outside := next(filter(reaches_outside, (guard.value, *found)), None):
            if is_opaque_iterator(outside):
                raise taking_from(where)
            kind = f"{type(outside).__module__}.{type(outside).__qualname__}"
            raise CaptureError(
                f"the step uses {where}, which is or has an object of {kind}. A captured step would use it only while "
                "Piper captures it. Use it in a hook, such as on_train_batch_end or on_validation_batch_end [PIPER-C003]"
            )
        for file in found:
            self._files.setdefault(id(file), (where, file, position_of(file)))

    def note_hooks(self, where: str, hooks: dict[int, Any]) -> None:
        """Guard a dict of hooks: it must keep the same hooks in the same order. If it is already guarded, keep
        the first guard."""
        if id(hooks) not in self.hooks:
            self.hooks[id(hooks)] = (where, hooks, _hooks(hooks))
            self._stale = True

    def retake(self) -> None:
        """Call it before each trace: the guards keep the values alive that they compare."""
        for guard in self.by_key.values():
            guard.retake()
            self._note_files(guard)

    def release(self) -> None:
        """Call it after each trace: a capture does not extend the life of the user's objects. Between steps,
        hooks may write into files."""
        self._files.clear()
        for guard in self.by_key.values():
            guard.release()

    def hold(self) -> bool:
        """Return whether all guards hold."""
        if not self._stale and self._unwritten() and all(g.holds() for g in self._always):
            return True
        if next(self.broken(), None) is not None:
            return False
        self._arrange()
        return True

    def _unwritten(self) -> bool:
        """Return whether no dict in `_dicts` has changed, and no hook was added anywhere, since `_arrange`."""
        return (
            list(map(_torch.dict_version, self._dicts)) == self._versions
            and RemovableHandle.next_id == self._handles
        )

    def broken(self) -> Iterator[Guard | str]:
        """Yield the guards that do not hold, and then the expression of each dict of hooks that has
        changed, and of each object that has used its file in this trace."""
        yield from (guard for guard in self.by_key.values() if not guard.holds())
        yield from (where for where, x, end in self._files.values() if not x.closed and position_of(x) != end)
        yield from (where for where, hooks, form in self.hooks.values() if _hooks(hooks) != form)

    def aliased(self) -> Iterator[Guard]:
        """Yield the guards whose value now holds a list, dict or set that was elsewhere before. Such a guard
        may hold, because both containers had equal content."""
        before = {id(x) for guard in self.by_key.values() for x in guard.containers}
        for guard in self.by_key.values():
            if not guard.containers:
                continue
            own = set(map(id, guard.containers))
            now = [id(x) for x in containers_of(guard.place.get())]
            if len(now) != len(own) or any(x in before and x not in own for x in now):
                yield guard

    def _arrange(self) -> None:
        """Divide the guards into those that version counters cover (their dicts are in `_dicts`) and all
        others (`_always`). Record the current counters. Call it while all guards hold."""
        fixed = [
            g
            for g in self.by_key.values()
            if _torch.dict_version_follows_attributes()
            and g.place.item
            and not g.place.path
            and not g.mutable
            and type(g.place.owner) not in (ENVIRONMENT, WeakAttributes)
        ]
        hooks = [x for _, x, _ in self.hooks.values() if x]
        self._dicts = list({id(d): d for d in [*(g.place.owner for g in fixed), *hooks]}.values())
        known = set(map(id, fixed))
        self._always = [g for g in self.by_key.values() if id(g) not in known]
        self._versions = list(map(_torch.dict_version, self._dicts))
        self._handles = RemovableHandle.next_id
        self._stale = False


def _hooks(hooks: Mapping[int, Callable[..., Any]]) -> tuple[Any, ...]:
    return tuple((key, _ObjectIdentity(hook)) for key, hook in hooks.items())
