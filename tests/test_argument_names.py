"""A misspelled argument is an error with the accepted names and the nearest one, in Python as in JSON."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.common.argument_names import problem_of, unknown
from lightning_piper.directives import parse


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: piper.Replicate(shard_param=True), r"Replicate\(shard_param=...\): .*Did you mean 'shard_params'\?"),
        (lambda: piper.Split(microbatches=2), r"Split\(microbatches=...\): .*Did you mean 'num_microbatches'\?"),
        (lambda: piper.PiperStrategy(zero_stage=3), r"PiperStrategy\(zero_stage=...\): .*Did you mean 'zero'\?"),
        (lambda: piper.parallel(microbatch=2), r"parallel\(microbatch=...\): .*Did you mean 'microbatches'\?"),
        (lambda: parse([{"op": "place", "device": 0}]), r"field 'device' is unknown. .*Did you mean 'devices'\?"),
    ],
)  # fmt: skip
def test_the_nearest_name_is_proposed(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(piper.PiperError, match=message) as caught:
        call()
    assert "unknown. Give one of " in str(caught.value)


def test_a_name_unlike_all_others_gets_the_list_only() -> None:
    assert unknown("qqq", ["filter", "devices"]) == "unknown. Give one of filter, devices"
    assert problem_of(lambda **anything: None, ["qqq"]) is None


def test_right_names_make_the_same_objects_as_before() -> None:
    made = piper.Replicate(zero=3)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), dataclasses.replace(made)):
        assert other == made and type(other) is piper.Replicate
    for of in (piper.Replicate, piper.PiperStrategy, piper.parallel):
        assert "zero" in inspect.signature(of).parameters
