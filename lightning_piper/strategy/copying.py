"""What of a strategy goes into a copy (`copy.deepcopy(trainer)`, `pickle.dumps(trainer)`): all that a next fit needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_piper.errors import PiperError
from lightning_piper.strategy.optimizer import ShardedOptimizer

OF_A_RUN = ("_fit", "_trained", "_standalone", "_evaluation", "_loading", "_watch")


def without_fit(attributes: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """A strategy's attributes without the plans, connections and processes of a run, which are of this process alone. The
    optimizer's state is there as one device would have it, so that the copy can be saved.

    Raises:
        PiperError: the state is in several processes.
    """
    trained: ShardedOptimizer | None = attributes["_trained"]
    if trained is not None and processes > 1:
        raise PiperError(
            "PiperStrategy: a Trainer cannot be copied after a fit over processes, of which each has a part of the optimizer's "
            "state; copy it before, or save a checkpoint and load it into a new one"
        )
    state = {**attributes, **dict.fromkeys(OF_A_RUN)}
    state.pop("_loaded", None)
    if trained is not None:
        state["_later"] = trained.full_state()
    if (launcher := attributes["_launcher"]) is not None:
        state["_launcher"] = copy.copy(launcher)
        state["_launcher"].procs = []
    return state
