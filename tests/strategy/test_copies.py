"""Trainers and strategies can be copied and pickled like plain ones, also after a fit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper.directives import Replicate
from lightning_piper.strategy.phases import Idle, Left, copied
from tests.strategy.fitting import PROGRAM, local, same, sharing_captures, trainer, values
from tests.strategy.models import make

ZERO = [
    *piper.schedules.gpipe(2, 2, [[0, 2], [1, 3]]),
    Replicate(filter={}, devices=[[0, 2], [1, 3]], shard_params=True),
]
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@sharing_captures
def further(fit, steps):
    """The values of a new module, trained by a Trainer that has run a fit before."""
    fit.fit_loop.epoch_loop.max_steps = steps
    module, loader = make("tied")
    fit.fit(module, loader)
    return values(module)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("program", [PROGRAM, ZERO], ids=["1F1B", "ZeRO-3"])
def test_a_copy_after_a_fit_saves_and_trains_like_the_original(how, program, tmp_path):
    fit, _ = trainer(local(program), max_steps=3)
    module, loader = make("tied")
    sharing_captures(fit.fit)(module, loader)
    again = COPIES[how](fit)
    assert again.strategy is not fit.strategy
    for which, name in ((fit, "original"), (again, "copy")):
        which.save_checkpoint(tmp_path / name)
    original, copied = (torch.load(tmp_path / name, weights_only=True) for name in ("original", "copy"))
    assert same(original["state_dict"], copied["state_dict"])
    states = [content["optimizer_states"][0] for content in (original, copied)]
    assert (
        states[0]["param_groups"] == states[1]["param_groups"]
        and states[0]["state"].keys() == states[1]["state"].keys()
    )
    assert len(states[0]["state"]) == len(list(module.parameters()))
    assert all(same(states[0]["state"][i], states[1]["state"][i]) for i in states[0]["state"])
    assert same(further(again, 6), further(fit, 6))
    assert not same(further(again, 7), further(fit, 8)), "the copies train on their own"


def test_a_strategy_is_copied_before_it_is_used():
    for how in COPIES.values():
        for strategy in (
            local(),
            piper.PiperStrategy(list(PROGRAM)),
            trainer(piper.PiperStrategy(list(PROGRAM)))[0].strategy,
        ):
            assert repr(how(strategy)) == repr(strategy)


def test_what_is_in_several_processes_is_not_copied():
    after: Any = Idle(Left(optimizers=(object(),)))
    with pytest.raises(piper.PiperError, match="cannot be copied after a fit over several processes"):
        copied(after, 2)
    before = Idle(Left(seed=3), replicas=(0, 1))
    assert copied(before, 2) == before
