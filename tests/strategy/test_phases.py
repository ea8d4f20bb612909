"""The phases of a strategy, and what each of them leaves when its run has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_piper.processes.world import World
from lightning_piper.strategy.phases import Ended, Evaluating, Fitting, Idle, Left, Starting, over

WORLD = World(0, 2, torch.device("cpu"), replicas=(0, 1))


def standalone(local: bool = False) -> Any:
    return SimpleNamespace(
        world=WORLD, seed=5, evaluation="plans", settings=SimpleNamespace(evaluates=not local)
    )


def test_what_a_run_leaves():
    left, fit = Left(seed=3), SimpleNamespace(seed=7, optimizer="cut down", world=WORLD, evaluation="plans")
    state = {"state": {}, "param_groups": []}
    assert over(Idle(left)) == Idle(left)
    assert over(Evaluating(standalone(), left)) == Idle(left, (0, 1))
    assert over(Starting(standalone(), later=state)) == Idle(Left(5, state=state), (0, 1))
    fitting: Any = Fitting(fit, None)  # type: ignore[arg-type]
    ended = over(fitting)
    assert ended == Ended(fit) and over(ended) is ended  # type: ignore[arg-type]
    assert fitting.left == ended.left == Left(7, ("cut down",))  # type: ignore[arg-type]


def test_who_runs_the_other_steps():
    assert Evaluating(standalone(), Left()).evaluation == Starting(standalone()).evaluation == "plans"
    assert Starting(standalone(local=True)).evaluation is None and Idle().evaluation is None
