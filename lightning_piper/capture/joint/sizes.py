"""Sizes of the batch as symbols, and the numbers of a graph that are computed from these sizes.

`SymbolicStep` traces a step once with symbols, and then fills in the numbers of each batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import TensorSpec

Dims = frozenset[tuple[int, int]]  # (index of a tensor in the batch, dimension)
Specs = tuple[TensorSpec, ...]
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class NotSymbolic(Exception):
    """Raised if the step cannot be traced with symbols for its sizes. The message names the reason."""


@dataclass(frozen=True)
class SymbolicSize:
    """A number in a graph that depends on sizes of the batch: the entry `index` of the list of numbers that
    `SizeNumbers.at` computes. Its text, `sizes[3]`, is valid code."""

    index: int

    def __repr__(self) -> str:
        return f"sizes[{self.index}]"


class SizeSymbols:
    """The symbols of one trace: which dimension of the batch is which symbol, and for which sizes the trace is
    valid.

    Args:
        free: the dimensions that become symbols.

    Attributes:
        names: names of the symbols, in the order in which all methods take and return values. Empty before
            `fakes` is called.
    """

    def __init__(self, free: Dims) -> None:
        self._free = free
        self._specs: Specs = ()
        self._shapes = _torch.ShapeSymbols()
        # (index of a tensor in the batch, dimension) -> name of its symbol
        self._of: dict[tuple[int, int], str] = {}
        self.names: tuple[str, ...] = ()

    def fakes(
        self, specs: Specs, device: torch.device
    ) -> tuple[_torch.FakeTensorMode, tuple[torch.Tensor, ...]]:
        """Return a fake mode, and fake tensors of these specs in which symbols replace the free dimensions.

        Each call makes new symbols. `values` and `conditions` then refer to them.

        Raises:
            NotImplementedError: a size is too large for a symbol (`_torch.LARGEST`).
        """
        self._specs, self._shapes, self._of = specs, _torch.ShapeSymbols(), {}
        tensors = []
        for leaf, spec in enumerate(specs):
            sizes = self._shapes.sizes(spec.shape, {dim for at, dim in self._free if at == leaf})
            self._of |= {
                (leaf, dim): _torch.expression(x)
                for dim, x in enumerate(sizes)
                if isinstance(x, torch.SymInt)
            }
            with self._shapes.mode:
                tensors.append(torch.empty(sizes, dtype=spec.dtype, device=device))
        self.names = tuple(dict.fromkeys(self._of.values()))
        return self._shapes.mode, tuple(tensors)

    def values(self, specs: Specs) -> tuple[int, ...] | None:
        """Return the symbols' values for tensors of these specs, in the order of `names`.

        Return None if the tensors do not fit the trace: another number of tensors, another dtype or number of
        dimensions, another size of a fixed dimension, or two values for one symbol.
        """
        found: dict[str, int] = {}
        if len(specs) != len(self._specs):
            return None
        for leaf, (spec, own) in enumerate(zip(specs, self._specs, strict=True)):
            if len(spec.shape) != len(own.shape) or spec.dtype != own.dtype:
                return None
            for dim, (size, known) in enumerate(zip(spec.shape, own.shape, strict=True)):
                name = self._of.get((leaf, dim))
                if size != (known if name is None else found.setdefault(name, size)):
                    return None
        return tuple(found[name] for name in self.names)

    def conditions(self) -> Callable[..., bool]:
        """Return a function of the symbols' values, in the order of `names`, that returns whether the trace is
        valid for them.

        Raises:
            NotSymbolic: the trace is valid for one value of a symbol only.
            NotImplementedError: the trace is valid only if assertions on values hold at run time.
        """
        if self._shapes.is_fixed(self.names):
            raise NotSymbolic("the step's Python code takes a size as a number")
        conditions = list(dict.fromkeys(self._shapes.conditions(self.names)))
        evaluate = _torch.evaluator(self.names, conditions)
        return lambda *values: all(evaluate(*values))


class SizeNumbers:
    """The computation of a graph's numbers from the values of its symbols.

    Args:
        symbols: the symbols of the trace.
    """

    def __init__(self, symbols: SizeSymbols) -> None:
        self._symbols = symbols
        self._known: dict[str, int] = {}  # expression -> its index
        # for each number of the graph: the index of its expression, or (operation, args, kwargs)
        self._sources: list[int | tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = []
        self._evaluate: Callable[..., tuple[Any, ...]] | None = None

    def of(self, size: Any) -> int:
        """Return the index of a size, which is a number or an expression of symbols. A new expression is
        added."""
        self._evaluate = None
        return self._known.setdefault(_torch.expression(size), len(self._known))

    def size(self, size: Any) -> SymbolicSize:
        """Add a number of the graph that is an expression of symbols. Return its `SymbolicSize`."""
        self._sources.append(self.of(size))
        return SymbolicSize(len(self._sources) - 1)

    def result(
        self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> SymbolicSize:
        """Add a number of the graph that Python computes from other numbers of the graph. Return its
        `SymbolicSize`. In `args` and `kwargs`, each such other number is a `SymbolicSize`."""
        self._sources.append((operation, args, kwargs))
        return SymbolicSize(len(self._sources) - 1)

    def at(self, values: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return two tuples for these values of the symbols: the value of each expression by the index from
        `of`, and each number of the graph by the `index` of its `SymbolicSize`."""
        if self._evaluate is None:
            self._evaluate = _torch.evaluator(self._symbols.names, list(self._known))
        known, found = self._evaluate(*values), list[Any]()
        for source in self._sources:
            if isinstance(source, int):
                found.append(known[source])
            else:
                operation, args, kwargs = source
                found.append(operation(*fill_sizes(args, found), **fill_sizes(kwargs, found)))
        return known, tuple(found)


def fill_sizes(argument: Any, numbers: Sequence[Any]) -> Any:
    """Return an argument, also a nested one, in which each `SymbolicSize` is replaced by its number."""
    return map_aggregate(argument, lambda x: numbers[x.index] if isinstance(x, SymbolicSize) else x)


def take_numbers(graph: torch.fx.Graph, numbers: SizeNumbers) -> None:
    """Remove the operations of a graph that compute numbers, and record the numbers in `numbers`. The readers
    of such an operation get a `SymbolicSize` instead.

    Raises:
        NotSymbolic: a number is not computed from sizes alone.
    """
    found: dict[Node, SymbolicSize] = {}

    def of(x: Any) -> Any:
        return found.get(x, x) if isinstance(x, Node) else x

    def sized(argument: Any) -> Any:
        return map_aggregate(argument, of)

    known: dict[str, SymbolicSize] = {}  # expression -> its `SymbolicSize`
    for node in graph.nodes:
        inputs, value = node.all_input_nodes, node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, _NUMBERS):
            if any(x in found for x in inputs):
                node.args, node.kwargs = sized(node.args), sized(node.kwargs)
        elif isinstance(value, torch.SymInt):
            expression = _torch.expression(value)
            if expression not in known:
                known[expression] = numbers.size(value)
            found[node] = known[expression]
        elif inputs and all(x in found for x in inputs):
            found[node] = numbers.result(node.target, sized(node.args), sized(node.kwargs))
        else:
            raise NotSymbolic(str(node.target))
    for node in reversed(found):
        graph.erase_node(node)


# (shape, dtype, stride) of a tensor. Each size and stride is the index of an expression in a `SizeNumbers`.
IndexedSpec = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
# One entry for each output bundle of a pass, then one for all its inputs. Each entry has the tensors' specs.
Outputs = tuple[tuple[IndexedSpec, ...], ...]


# Return a spec with indices instead of sizes. New expressions are added to `numbers`.
def indexed_spec(numbers: SizeNumbers, spec: TensorSpec) -> IndexedSpec:
    return tuple(map(numbers.of, spec.shape)), spec.dtype, tuple(map(numbers.of, spec.stride))


# Return a spec with sizes instead of indices. `known` is the first result of `SizeNumbers.at`.
def spec_at(spec: IndexedSpec, known: Sequence[Any]) -> TensorSpec:
    return TensorSpec(tuple(known[i] for i in spec[0]), spec[1], tuple(known[i] for i in spec[2]))
