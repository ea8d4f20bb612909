"""The static check as a hook of the pipeline."""

from __future__ import annotations

from typing import Any

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done
from lightning_piper.verify.static import check, check_structure

_GRAPH = ("nodes", "graph", "program", "overlaps", "_next")


class StaticCheck:
    """Checks a DAG after each of its passes, unless that is judged together with the next one.

    A pass that only ordered nodes has changed nothing that the rules of nodes look at: then the edges alone are checked. Whatever
    the passes before did, all is checked where the program is finished.
    """

    def __init__(self) -> None:
        self._sound: Any = None  # what was accepted last

    def __call__(self, dag: TrainingDAG, done: Done) -> None:
        """Raises:
        VerificationError: as `check` does.
        """
        if not done.by.apart:
            return
        found = None if done.by.finished else _contents(dag)
        if found is not None and found == self._sound:
            check_structure(dag)
        else:
            check(dag, final=done.by.finished)
        self._sound = found


def _contents(dag: TrainingDAG) -> Any:
    """All of a DAG but the order of its nodes, to compare it with later."""
    about = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(dag).items() if key not in _GRAPH}
    nodes = {node.id: (type(node), dict(vars(node))) for node in dag.nodes.values()}
    return about, nodes, {(a, b) for a, b, data in dag.graph.edges(data="data") if data}
