"""What the code of a pass does with memory: which of its results share memory, and with what; and how much is there at once.

The code's graph is run once without data, node by node, in the order in which the code runs and with its drops: each value goes
after its last use, and so does an argument that nobody else holds. Memory is counted by storages, as tensors share them. What a
kernel needs for itself while it runs is not seen.

    a -> mm -> relu -> view -> sum        storages: a | mm | relu = view | sum        most at `relu`: a is gone, mm is not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.sizes import filled
from lightning_piper.ir.boxed import RUNS_KEY
from lightning_piper.ir.regions import Code

Group = int  # of arguments that share a storage


class Peak(NamedTuple):
    """The moment in which most is there.

    Attributes:
        nbytes: of all that the code made or was given for good.
        results: which of the storages that it made, and hands out, are there.
        groups: of the arguments that it was given for good, those that are there.
    """

    nbytes: int
    results: frozenset[int]
    groups: frozenset[Group]


@dataclass
class Footprint:
    """Of one pass at one size. Storages are numbered: first those of the arguments, then those that the code makes.

    Attributes:
        outputs: of each output bundle, the storages of its tensors.
        nbytes: of the storages that the code makes, by number.
    """

    outputs: tuple[tuple[int, ...], ...]
    nbytes: dict[int, int]
    _events: list[int] = field(repr=False)  # n: storage n is made; ~n: it is let go of
    _peaks: dict[Any, Peak] = field(default_factory=dict, repr=False)

    def peak(self, given: Sequence[Group | None], sizes: tuple[int, ...]) -> Peak:
        """When most is there, and what.

        Args:
            given: for each argument that the code alone holds, the group of those with one storage; None for the others.
            sizes: bytes of the storage of each group.
        """
        key = (tuple(given), sizes)
        if key not in self._peaks:
            self._peaks[key] = self._find(given, sizes)
        return self._peaks[key]

    def _find(self, given: Sequence[Group | None], sizes: tuple[int, ...]) -> Peak:
        most, at = -1, 0
        for i, (live, _) in enumerate(self._walk(given, sizes)):
            if live > most:
                most, at = live, i
        there: set[int] = set()
        left = [0] * len(sizes)
        for i, (_, held) in enumerate(self._walk(given, sizes)):
            if i == at:
                there, left = set(held[0]), list(held[1])
                break
        made = {n for bundle in self.outputs for n in bundle if n in self.nbytes}
        return Peak(most, frozenset(there & made), frozenset(g for g, n in enumerate(left) if n))

    def _walk(self, given: Sequence[Group | None], sizes: tuple[int, ...]) -> Any:
        """Bytes that are there after each event, and what (which goes on changing)."""
        left = [0] * len(sizes)
        for group in given:
            if group is not None:
                left[group] += 1
        there: set[int] = set()
        live = sum(sizes)
        yield live, (there, left)
        for event in self._events:
            if event >= 0:
                there.add(event)
                live += self.nbytes[event]
            elif ~event in self.nbytes:
                there.discard(~event)
                live -= self.nbytes[~event]
            elif (group := given[~event]) is not None:
                left[group] -= 1
                live -= 0 if left[group] else sizes[group]
            yield live, (there, left)


_KNOWN: WeakKeyDictionary[torch.fx.Graph, dict[Any, Footprint]] = WeakKeyDictionary()


def footprint(code: Code) -> Footprint:
    """Of a pass. It is found once for each code, in time linear in its nodes."""
    known = _KNOWN.setdefault(code.graph, {})
    key = (code.inputs, code.sizes)
    if key not in known:
        known[key] = _Walk(code).footprint if _is_known(code) else _opaque(code)
    return known[key]


def _is_known(code: Code) -> bool:
    """Code that is the user's own, and not captured, is not run."""
    return len(code.graph.nodes) > 0 and not any(RUNS_KEY in node.meta for node in code.graph.nodes)


def _opaque(code: Code) -> Footprint:
    """Each result is a tensor of its own, and all are made at once."""
    count = len(code.inputs)
    flat = [spec for specs in code.outputs for spec in specs]
    nbytes = {count + i: spec.nbytes for i, spec in enumerate(flat)}
    numbers = iter(nbytes)
    return Footprint(tuple(tuple(next(numbers) for _ in specs) for specs in code.outputs), nbytes, list(nbytes))


class _Walk:
    """One run of a graph without data."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._values: dict[Node, Any] = {}
        self._number: dict[int, int] = {}  # storage -> its number, while it is there
        self._users: dict[int, int] = {}  # number -> values that have it
        self._nbytes: dict[int, int] = {}
        self._events: list[int] = []
        self._next = len(code.inputs)
        outputs: list[int] = []
        last = self._last_uses()
        given = iter(enumerate(code.inputs))
        with _torch.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            for node in code.graph.nodes:
                if node.op == "output":
                    outputs = [self._number[_storage(self._values[x])] for x in node.args[0]]
                    continue
                if node.op == "placeholder":
                    number, spec = next(given)
                    value: Any = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
                    self._number[_storage(value)] = number
                    self._users[number] = 0
                elif node.op == "get_attr":
                    value = mode.from_tensor(getattr(code.graph.owning_module, node.target))
                else:
                    args, kwargs = self._given(node.args), self._given(node.kwargs)
                    value = node.target(*args, **kwargs)
                    del args, kwargs
                self._hold(node, value)
                for gone in last.get(node, ()):
                    self._drop(gone)
        counts = iter(outputs)
        bundles = tuple(tuple(next(counts) for _ in specs) for specs in code.outputs)
        self.footprint = Footprint(bundles, self._nbytes, self._events)

    def _last_uses(self) -> dict[Node, list[Node]]:
        """Node -> what is dropped behind it: what it uses last, and itself if nothing uses it. Unused arguments stay."""
        found: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(self._code.graph.nodes):
            if node.op != "placeholder" and not node.users and node.op != "output":
                found.setdefault(node, []).append(node)
            for x in node.all_input_nodes:
                if x not in seen:
                    seen.add(x)
                    if node.op != "output":
                        found.setdefault(node, []).append(x)
        return found

    def _given(self, argument: Any) -> Any:
        return torch.fx.node.map_arg(filled(argument, self._code.sizes), lambda x: self._values[x])

    def _hold(self, node: Node, value: Any) -> None:
        self._values[node] = value
        for storage in {_storage(x): x for x in _torch.tree_leaves(value) if isinstance(x, torch.Tensor)}.items():
            number = self._number.get(storage[0])
            if number is None:
                number = self._number[storage[0]] = self._next
                self._next += 1
                self._users[number] = 0
                self._nbytes[number] = 0 if node.op == "get_attr" else storage[1].untyped_storage().nbytes()
                self._events.append(number)
            self._users[number] += 1

    def _drop(self, node: Node) -> None:
        value = self._values.pop(node)
        for storage in {_storage(x) for x in _torch.tree_leaves(value) if isinstance(x, torch.Tensor)}:
            number = self._number[storage]
            self._users[number] -= 1
            if not self._users[number]:
                self._events.append(~number)
                del self._number[storage]


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
