"""The warning for a step that runs uncaptured, and the reasons why a step cannot run so."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.session.eager.conditions import _said
from lightning_piper.session.eager.eager_replicas import why_not
from lightning_piper.session.process_runtime import Settings

PLAIN = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])]
PROBLEM = "directive 1 (replicate): field 'filter': each replica would update norm.running_mean"


@pytest.mark.parametrize("program, reason", [
    (PLAIN, "Reason: each replica would update norm.running_mean. "),
    ([PLAIN[0], piper.Replicate(filter={}, devices=[0, 1], shard_grads=True)], f"Reason: {PROBLEM}. "),
], ids=["replicas", "shards"])  # fmt: skip
def test_a_directive_is_named_only_in_a_program_that_the_user_gave(program: list[Any], reason: str) -> None:
    """Without directives, the strategy makes the first program."""
    before: Any = SimpleNamespace(
        world=SimpleNamespace(size=2, count=2), settings=SimpleNamespace(program=program)
    )
    said = _said("training_step", before, PROBLEM, ["shard_grads"] if program is not PLAIN else [])
    assert reason in said and said.startswith(
        "Piper could not capture training_step, so it runs uncaptured in every process, data-parallel like DDP."
    )
    assert ("shard_grads shards only the optimizer state" in said) == (program is not PLAIN)


def test_an_evaluation_by_one_replica_is_not_like_ddp() -> None:
    before: Any = SimpleNamespace(
        world=SimpleNamespace(size=2, count=1), settings=SimpleNamespace(program=PLAIN)
    )
    assert "so it runs uncaptured in every process. Reason" in _said("validation_step", before, PROBLEM, [])


def test_the_reason_names_the_line_that_built_the_directive() -> None:
    program = [piper.Place(filter={}, devices=[0]), piper.Split(filter={}, num_microbatches=2)]
    context = contextlib.nullcontext
    settings = Settings(program, 1, True, context, context, local=True, timeout=None)
    reason = why_not(nn.Linear(2, 2), settings, torch.device("cpu"))
    assert reason is not None and f" (directive 1 (split) was built at {program[1].built_at})." in reason
    assert program[1].built_at is not None and "test_uncaptured_steps.py" in program[1].built_at
    settings = dataclasses.replace(settings, program=program[:1])
    assert why_not(nn.Linear(2, 2), settings, torch.device("cpu")) is None
