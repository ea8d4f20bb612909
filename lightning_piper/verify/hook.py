"""The static check as a hook of the pipeline."""

from __future__ import annotations

from typing import Any

from lightning_piper.common.units import Stopwatch
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done
from lightning_piper.verify.static_check import check, check_orders

# Attributes of a DAG that no rule of a node depends on, or whose changes `revision` counts.
_COUNTED = ("nodes", "graph", "program", "overlaps", "_next", "_code")


class StaticCheck:
    """A hook that checks a DAG after each pass, except passes that are judged together with the next pass.

    If a pass only added or removed orders, the rules of nodes cannot find anything new, so the hook checks
    only that the graph has no cycle. When the program is finished, the hook checks everything.

    Attributes:
        watch: Measures the time of the checks.
    """

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._sound: Any = None  # `_settings` of the DAG that was accepted last

    def __call__(self, dag: TrainingDAG, done: Done) -> None:
        """Check the DAG after a pass.

        Raises:
            VerificationError: See `check`.
        """
        if not done.by.apart:
            return
        with self.watch:
            found = None if done.by.finished else _settings(dag)
            if found is not None and found == self._sound:
                check_orders(dag)
            else:
                check(dag, final=done.by.finished)
            self._sound = found


def _settings(dag: TrainingDAG) -> dict[str, Any]:
    """Return a copy of a DAG's settings and its revision, which stay the same if only orders change."""
    return {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in vars(dag).items()
        if key not in _COUNTED
    }
