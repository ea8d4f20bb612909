"""Several weights in one parameter, of each of which the members have a part."""

from __future__ import annotations

from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper import Place, Replicate, Split
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.values import Sharded
from lightning_piper.ops.communication.redistribute import Redistribute
from tests.fused import fusing, params
from tests.groups import marked
from tests.tensors import divided, stages, tensors

KINDS = ("linear", "turned", "own")


def over(kind: str, degree: int = 2, **fields: Any) -> list[Any]:
    devices = list(range(degree))
    return [
        Place(filter={}, devices=devices),
        divided(devices, **({"params": params(fusing(kind))} | fields)),
    ]


@pytest.mark.parametrize("degree", marked([2, 4], [4]))
@pytest.mark.parametrize("kind", marked(KINDS, ["linear", "own"]))
def test_they_are_those_of_one_device(kind, degree):
    assert piper.verify(fusing(kind), tensors(8), over(kind, degree)).verdict == "verified"
    moved = [n for n in piper.compile(fusing(kind), tensors(8), over(kind, degree)).dag.of_type(Redistribute)]
    assert {n.label for n in moved} == {"allreduce.tp"} and len(moved) == 4  # two sums, forth and back


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_found(kind):
    (_, shard) = piper.tensor_parallel(fusing(kind), tensors(8), 2)
    name = {"linear": "qkv.weight", "turned": "turned", "own": "own.in_proj_weight"}[kind]
    assert shard.params[f"blocks.*.{name}"] == ((1, 3) if kind == "turned" else (0, 3))
    assert shard.params["blocks.*.up.weight"] == (0, 2) and shard.params["blocks.*.down.weight"] == 1


def test_they_go_with_other_directives():
    module = fusing("linear", "turned")
    about = {"params": params(module)}
    programs = [
        [*stages([[0, 1], [2, 3]]), divided([[0, 1], [2, 3]], sequence=True, **about)],
        [
            Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"]),
            Split(filter={}, dim_name="MB", num_microbatches=2),
            divided(None, **about),
            Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True),
        ],
    ]
    for program in programs:
        assert piper.verify(module, tensors(8), program).verdict == "verified"


def test_members_have_a_part_of_each():
    dag = piper.compile(fusing("turned"), tensors(8), over("turned")).dag
    assert dag.code.divided["blocks.0.turned"] == ("tp", Sharded(1, 3)) and dag.code.divided[
        "blocks.0.bias"
    ] == ("tp", Sharded(0, 3))
    assert dag.spec_of("blocks.0.turned").shape == (8, 12)


def test_a_weight_that_is_taken_for_one_is_gathered():
    """Then a part is no part of the queries: right, but for nothing."""
    program = over("linear", params={"*.qkv.weight": 0})
    assert piper.verify(fusing("linear"), tensors(8), program).verdict == "verified"
    found = {n.label for n in piper.compile(fusing("linear"), tensors(8), program).dag.of_type(Redistribute)}
    assert "allgather.tp" in found


def test_what_cannot_be_so_is_refused():
    with pytest.raises(DirectiveError, match="whose dimension 0 cannot be sharded evenly in each of 5 runs"):
        piper.verify(fusing("linear"), tensors(8), over("linear", params={"*.qkv.weight": (0, 5)}))
    with pytest.raises(DirectiveError, match="Give names or patterns with dimensions"):
        piper.verify(fusing("linear"), tensors(8), over("linear", params={"*.qkv.weight": (0, 3, 1)}))


def test_runs_in_another_order_are_found(monkeypatch):
    """Members that get their parts of the weights beside each other mixed up."""
    original = Sharded.parts
    monkeypatch.setattr(
        Sharded, "parts", lambda placement, whole, count: original(Sharded(placement.dim), whole, count)
    )
    assert piper.verify(fusing("linear"), tensors(8), over("linear")).verdict == "NOT EQUIVALENT"
