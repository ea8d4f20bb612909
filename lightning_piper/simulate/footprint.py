"""The memory of a pass's code: which of its results share memory, and how much is allocated at once.

The code's graph runs once on fake tensors, node by node, in the order in which the code runs. Each value is
dropped after its last use. This includes arguments, if only the code holds them. Tensors that share a storage
count once. The workspace of a kernel does not count, except the scores of a chunk of `linear_cross_entropy`:

    a -> mm -> relu -> view -> sum        storages: a | mm | relu = view | sum        the peak is at
    `relu`: the code has freed a, and not yet mm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from lightning_piper.capture.joint.sizes import fill_sizes
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.boxed_code import RUNS_KEY
from lightning_piper.ir.regions import Code
from lightning_piper.placements.chunked_scores import CHUNKED, workspace

Group = int  # number of a set of arguments that share a storage


class Peak(NamedTuple):
    """The moment with the most memory in use.

    Attributes:
        nbytes: The bytes of the code's own storages and of the arguments that only the code holds.
        results: The numbers of the output storages that the code has made and not freed.
        groups: The groups with an argument that the code has not freed. Only the code holds the arguments of
            a group.
    """

    nbytes: int
    results: frozenset[int]
    groups: frozenset[Group]


@dataclass
class Footprint:
    """The memory of one pass at one size. Storages have numbers: the k-th argument has the storage k, and
    larger numbers are storages that the code makes.

    Attributes:
        outputs: For each output bundle, the numbers of the storages of its tensors.
        nbytes: Number of a storage that the code makes -> its bytes.
    """

    outputs: tuple[tuple[int, ...], ...]
    nbytes: dict[int, int]
    _events: list[int] = field(repr=False)  # n: the code makes storage n; ~n: the code frees storage n
    _peaks: dict[Any, Peak] = field(default_factory=dict, repr=False)  # arguments of `peak` -> its result

    def peak(self, given: Sequence[Group | None], sizes: tuple[int, ...]) -> Peak:
        """Return the moment with the most memory in use.

        Args:
            given: For each argument, the group of arguments with its storage if only the code holds it. None
                for an argument that other values also hold.
            sizes: The bytes of the storage of each group.
        """
        key = (tuple(given), sizes)
        if key not in self._peaks:
            self._peaks[key] = self._find(given, sizes)
        return self._peaks[key]

    def _find(self, given: Sequence[Group | None], sizes: tuple[int, ...]) -> Peak:
        """Return the result of `peak` without its cache."""
        # The first walk finds the peak. The second walk stops there and reads which storages are in use.
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
        """Yield (bytes in use, (storages, counts)) at the start and after each event.

        `storages` are the storages in use that the code has made, and `counts` is the number of arguments in
        use of each group. The generator changes these two objects at each event.
        """
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
    """Return the footprint of a pass, in time linear in the nodes of its graph. Later calls with the same
    graph, inputs and sizes return the same object."""
    known = _KNOWN.setdefault(code.graph, {})
    key = (code.inputs, code.sizes)
    if key not in known:
        known[key] = _GraphRun(code).footprint if _is_known(code) else _opaque(code)
    return known[key]


def _is_known(code: Code) -> bool:
    """Return whether the graph contains all operations of the code. It does not if the code runs a function
    of the user (`RUNS_KEY`)."""
    return len(code.graph.nodes) > 0 and not any(RUNS_KEY in node.meta for node in code.graph.nodes)


def _opaque(code: Code) -> Footprint:
    """Return a footprint in which each output tensor has a storage of its own, and none is freed."""
    count = len(code.inputs)
    flat = [spec for specs in code.outputs for spec in specs]
    nbytes = {count + i: spec.nbytes for i, spec in enumerate(flat)}
    numbers = iter(nbytes)
    return Footprint(
        tuple(tuple(next(numbers) for _ in specs) for specs in code.outputs), nbytes, list(nbytes)
    )


class _GraphRun:
    """One run of a graph on fake tensors, which makes `footprint`."""

    def __init__(self, code: Code) -> None:
        """Run the graph, and record when each storage is made and freed."""
        self._code = code
        self._values: dict[Node, Any] = {}
        self._number: dict[int, int] = {}  # torch's identity of a live storage -> its number
        self._users: dict[int, int] = {}  # number -> count of live values on this storage
        self._nbytes: dict[int, int] = {}  # number of a storage that the code makes -> bytes
        self._events: list[int] = []
        self._next = len(code.inputs)
        outputs: list[int] = []
        last = self._last_uses()
        given = iter(enumerate(code.inputs))
        with _torch.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            for node in code.graph.nodes:
                used = 0
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
                    used = workspace(node.target, args) if node.target in CHUNKED else 0
                    del args, kwargs
                self._hold(node, value)
                if used:
                    self._nbytes[self._next] = used
                    self._events += [self._next, ~self._next]
                    self._next += 1
                for gone in last.get(node, ()):
                    self._drop(gone)
        counts = iter(outputs)
        bundles = tuple(tuple(next(counts) for _ in specs) for specs in code.outputs)
        self.footprint = Footprint(bundles, self._nbytes, self._events)

    def _last_uses(self) -> dict[Node, list[Node]]:
        """Return, for each node, the nodes whose values are dropped after it: the inputs that it is the last
        to use, and the node itself if nothing uses it.

        Outputs and unused arguments are never dropped.
        """
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
        return torch.fx.node.map_arg(fill_sizes(argument, self._code.sizes), lambda x: self._values[x])

    def _hold(self, node: Node, value: Any) -> None:
        """Record the storages of a node's value. A storage without a number gets one. The storage of a
        constant of the module counts 0 bytes, because the pass does not make it."""
        self._values[node] = value
        for storage in {
            _storage(x): x for x in _torch.tree_leaves(value) if isinstance(x, torch.Tensor)
        }.items():
            number = self._number.get(storage[0])
            if number is None:
                number = self._number[storage[0]] = self._next
                self._next += 1
                self._users[number] = 0
                self._nbytes[number] = 0 if node.op == "get_attr" else storage[1].untyped_storage().nbytes()
                self._events.append(number)
            self._users[number] += 1

    def _drop(self, node: Node) -> None:
        """Drop the value of a node, and free the storages that no other live value uses."""
        value = self._values.pop(node)
        for storage in {_storage(x) for x in _torch.tree_leaves(value) if isinstance(x, torch.Tensor)}:
            number = self._number[storage]
            self._users[number] -= 1
            if not self._users[number]:
                self._events.append(~number)
                del self._number[storage]


def _storage(x: torch.Tensor) -> int:
    """Return torch's identity of the storage of a tensor. A later storage may have the identity of a freed
    one."""
    return int(x.untyped_storage()._cdata)
