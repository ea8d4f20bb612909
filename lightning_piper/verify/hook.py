"""The static check as a hook of the pipeline."""

from __future__ import annotations

from typing import Any

from lightning_piper.common.units import Stopwatch
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done
from lightning_piper.verify.static_check import check, check_structure

# Attributes of a DAG that `_contents` does not copy. It copies nodes and data edges in a form of its own.
_GRAPH = ("nodes", "graph", "program", "overlaps", "_next")


class StaticCheck:
    """A hook that checks a DAG after each pass, except passes that are judged together with the next pass.

    If a pass only added or removed orders, the rules of nodes cannot find anything new, so the hook checks
    only the edges. When the program is finished, the hook checks everything.

    Attributes:
        watch: Measures the time of the checks.
    """

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._sound: Any = None  # `_contents` of the DAG that was accepted last

    def __call__(self, dag: TrainingDAG, done: Done) -> None:
        """Check the DAG after a pass.

        Raises:
            VerificationError: See `check`.
        """
        if not done.by.apart:
            return
        with self.watch:
            found = None if done.by.finished else _contents(dag)
            if found is not None and found == self._sound:
                check_structure(dag)
            else:
                check(dag, final=done.by.finished)
            self._sound = found


def _contents(dag: TrainingDAG) -> Any:
    """Return a copy of a DAG's nodes, data edges and settings, without orders, to compare it later."""
    about = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in vars(dag).items()
        if key not in _GRAPH
    }
    nodes = {node.id: (type(node), dict(vars(node))) for node in dag.nodes.values()}
    return about, nodes, {(a, b) for a, b, data in dag.graph.edges(data="data") if data}
