"""Numbers in place of a graph's symbols: inside of the context the numbers are there. At the end, also after
an error, the symbols are back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_piper.capture.joint.concrete_sizes import concretize
from lightning_piper.capture.joint.sizes import NotSymbolic, SymbolicSize
from lightning_piper.ir.values import TensorSpec

WHOLE, PART = torch.empty(6, 2), torch.empty(3, 2)


def graph() -> torch.fx.Graph:
    """Return the graph of `x[: sizes[0]][: sizes[1]]`."""
    found = torch.fx.Graph()
    x = found.placeholder("x")
    first = found.call_function(torch.narrow, (x, 0, 0, SymbolicSize(0)))
    second = found.call_function(torch.narrow, (first, 0, 0), {"length": SymbolicSize(1)})
    x.meta["val"], first.meta["val"], second.meta["val"] = WHOLE, (PART, [PART]), PART
    return found


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec((8, 2), tensor.dtype, (2, 1))


def looks_of(found: torch.fx.Graph) -> list[Any]:
    return [(id(node.meta["val"]), node.args, node.kwargs) for node in found.nodes if "val" in node.meta]


def test_numbers_are_inside_and_symbols_return() -> None:
    own = graph()
    before = looks_of(own)
    with concretize(own, [5, 4], spec):
        x, first, second = own.nodes
        assert x.meta["val"].shape == first.meta["val"][1][0].shape == (8, 2)
        assert first.args[3] == 5 and second.kwargs["length"] == 4
        new = own.call_function(torch.narrow, (second, 0, 0, first.args[3]))
    assert looks_of(own) == before and new.args[3] == SymbolicSize(0)


def test_symbols_return_after_an_error_inside() -> None:
    own = graph()
    before = looks_of(own)
    with pytest.raises(ZeroDivisionError), concretize(own, [5, 4], spec):
        raise ZeroDivisionError
    assert looks_of(own) == before


def test_symbols_return_if_one_has_no_number() -> None:
    own = graph()
    before = looks_of(own)
    with pytest.raises(NotSymbolic, match="truth value"), concretize(own, [5, True], spec):
        pass
    assert looks_of(own) == before


def test_a_new_value_is_refused_and_symbols_return() -> None:
    own = graph()
    before = looks_of(own)
    with (
        pytest.raises(NotSymbolic, match="was added, with a value of its own"),
        concretize(own, [5, 4], spec),
    ):
        new = own.call_function(torch.relu, (next(iter(own.nodes)),))
        new.meta["val"] = torch.empty(1)
    assert looks_of(own)[:3] == before
