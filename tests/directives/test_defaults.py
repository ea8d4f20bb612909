"""Fields of directives that may be omitted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.directives import parse, to_json

ALL: dict[str, Any] = {}


@pytest.mark.parametrize(
    "short, whole",
    [
        (piper.Place([0, 1]), piper.Place(filter=ALL, devices=[0, 1])),
        (piper.Split(4), piper.Split(filter=ALL, dim_name="MB", num_microbatches=4)),
        (piper.Replicate([0, 1], zero=1), piper.Replicate(filter=ALL, devices=[0, 1], shard_optimizer=True)),
        (piper.Replicate([0, 1], zero=2), piper.Replicate(filter=ALL, devices=[0, 1], shard_grads=True)),
        (piper.Replicate([0, 1], zero=3), piper.Replicate(filter=ALL, devices=[0, 1], shard_params=True)),
        (piper.Replicate([0, 1], zero=0), piper.Replicate(filter=ALL, devices=[0, 1])),
        (piper.Recompute(), piper.Recompute(filter=ALL)),
        (piper.Offload(), piper.Offload(filter=ALL)),
        (piper.ShardExperts(devices=[0, 1]), piper.ShardExperts(filter=ALL, devices=[0, 1])),
    ],
)
def test_a_field_left_out_has_its_default(short: Any, whole: Any) -> None:
    assert short == whole and to_json([short]) == to_json([whole])
    assert parse(to_json([short])) == [whole]


def test_levels_differ() -> None:
    """The negative control."""
    levels = [piper.Replicate([0, 1], zero=level) for level in range(4)]
    assert all(a != b for i, a in enumerate(levels) for b in levels[:i])


def test_json_may_give_a_level() -> None:
    program = [{"op": "place", "devices": [0, 1]}, {"op": "replicate", "zero": 3}]
    assert parse(program) == [piper.Place([0, 1]), piper.Replicate([0, 1], shard_params=True)]


@pytest.mark.parametrize("zero", [-1, 4, "3", True, 1.5])
def test_a_wrong_level_is_refused(zero: Any) -> None:
    with pytest.raises(piper.DirectiveError, match="field 'zero'"):
        piper.Replicate([0, 1], zero=zero)


def test_a_level_and_another_one_are_refused() -> None:
    with pytest.raises(
        piper.DirectiveError, match="field 'zero': the level is 1, but shard_params is set, which is level 3"
    ):
        piper.Replicate([0, 1], zero=1, shard_params=True)
    assert dataclasses.replace(piper.Replicate([0, 1], zero=3), average="replicas").shard_params


@pytest.mark.parametrize("make", [piper.Replicate, piper.ShardExperts])
def test_groups_left_out_are_those_of_the_places(make: Any) -> None:
    groups = [[0, 1], [2, 3]]
    placed = schedules.one_f_one_b(2, 4, devices=groups)[:3]
    assert parse([*placed, make()]) == [*placed, make(devices=groups)]
    assert parse([piper.Place([2, 3]), make()])[1] == make(devices=[2, 3])
    mesh = piper.Place(groups, axes=["dp", "ep"])
    assert parse([mesh, piper.ShardExperts()])[1] == piper.ShardExperts()


def test_a_place_on_one_device_has_no_replicas() -> None:
    with pytest.raises(
        piper.DirectiveError,
        match=r"directive 1 \(replicate\): field 'devices': the groups have 1 device",
    ):
        parse([piper.Place([0]), piper.Replicate()])
