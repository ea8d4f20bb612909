"""Order between groups of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_piper.ir.nodes import Node
from lightning_piper.ops.base import Operation, register_operation
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.reference import Made, Reference


@dataclass(frozen=True, kw_only=True)
class Barrier(Node):
    """Runs nothing: what is ordered after it waits for all that is ordered before it. Keeps an order between two groups of
    m and n nodes at m + n edges."""

    everywhere = True


def check(facts: Facts, node: Barrier) -> Iterable[str]:
    return ()


def interpret(run: Reference, node: Barrier) -> Made:
    return [[] for _ in run.places]


register_operation(Operation(Barrier, check, interpret, alike=True))
