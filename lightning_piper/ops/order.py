"""Temporal order between groups of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_piper.ir.nodes import Node
from lightning_piper.ops.base import Operation, register_operation
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.reference import Made, Reference


@dataclass(frozen=True, kw_only=True)
class Barrier(Node):
    """An ordering join, which runs nothing. Nodes ordered after it wait for all nodes ordered before it.

    It orders a group of m nodes before a group of n nodes with m + n edges.
    """

    everywhere = True


def check(facts: Facts, node: Barrier) -> Iterable[str]:
    return ()


def interpret(run: Reference, node: Barrier) -> Made:
    return [[] for _ in run.group_ranks]


register_operation(Operation(Barrier, check, interpret, alike=True))
