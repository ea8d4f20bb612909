"""Temporarily replace a graph's symbols by numbers.

`SymbolicStep` does this to analyze the terms of the loss (`weigh`): the analysis needs numbers, but its result
holds at all sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from lightning_piper.capture.joint.sizes import NotSymbolic, SymbolicSize
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import TensorSpec


class _ConcreteInt(int):
    """The number that replaces a `SymbolicSize`. It prints like the `SymbolicSize`."""

    index: int

    def __repr__(self) -> str:
        return repr(SymbolicSize(self.index))

    def __format__(self, spec: str) -> str:
        return repr(self)


class _ConcreteFloat(float):
    index: int
    __repr__, __format__ = _ConcreteInt.__repr__, _ConcreteInt.__format__


@contextlib.contextmanager
def concretize(
    graph: torch.fx.Graph, numbers: Sequence[Any], spec: Callable[[torch.Tensor], TensorSpec]
) -> Iterator[None]:
    """Within this context, the graph's sizes and the shapes of its tensors are numbers. At the end, symbols
    replace the numbers again, also in new nodes.

    Code that is generated within the context still reads sizes from a list: `sizes[3]`.

    Args:
        numbers: the number of each `SymbolicSize`, by its `index`.
        spec: returns the spec of a tensor of the graph.

    Raises:
        NotSymbolic: the tensor, list or tuple of a new node is not the value of an existing node, so its
            symbols are unknown. Or the number of a `SymbolicSize` is a truth value.
    """
    # id of a value with numbers -> this value, and the original value with symbols.
    mode, known = _torch.FakeTensorMode(), dict[int, tuple[Any, Any]]()

    def concrete(value: Any) -> Any:
        """Return the value with numbers in its shape, and note the original value in `known`."""
        made = value
        if isinstance(value, torch.Tensor):
            found = spec(value)
            with mode:
                made = torch.empty_strided(found.shape, found.stride, dtype=value.dtype, device=value.device)
        elif isinstance(value, list | tuple):
            made = type(value)(map(concrete, value))
        known[id(made)] = made, value
        return made

    def number(argument: Any) -> Any:
        """Return a number that prints like the `SymbolicSize`. Return any other argument unchanged."""
        if not isinstance(argument, SymbolicSize):
            return argument
        value = numbers[argument.index]
        if type(value) not in (int, float):
            raise NotSymbolic("an operation takes a truth value")
        made = (_ConcreteInt if type(value) is int else _ConcreteFloat)(value)
        made.index = argument.index
        return made

    def size(argument: Any) -> Any:
        return (
            SymbolicSize(argument.index) if isinstance(argument, _ConcreteInt | _ConcreteFloat) else argument
        )

    own: list[str] = []  # the operations of new nodes whose values are not values of existing nodes
    try:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = concrete(node.meta["val"])
            node.args, node.kwargs = map_aggregate(node.args, number), map_aggregate(node.kwargs, number)
        yield
    finally:
        for node in graph.nodes:
            value = node.meta.get("val")
            if id(value) in known:
                node.meta["val"] = known[id(value)][1]
            elif isinstance(value, torch.Tensor | list | tuple):
                own.append(str(node.target))
            node.args, node.kwargs = map_aggregate(node.args, size), map_aggregate(node.kwargs, size)
    if own:
        raise NotSymbolic(f"{own[0]} was added, with a value of its own")
