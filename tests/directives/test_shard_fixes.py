"""Messages of the directives that shard experts and tensors, each with a program that triggers it and its fix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper import Place, Replicate, ShardExperts, ShardSequences, ShardWeights
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse
from tests.directives.test_fixes import BOTH, Lone, Parts, compiled, place
from tests.directives.test_more_fixes import WEIGHT, check_fix, sharded
from tests.errors import dividing

EXPERTS = [place({}, *BOTH), Replicate()]
TENSORS = Place(devices=[0, 1], axes=["tp"])
FOUR = [[0, 1], [2, 3]]
# A second layer with the same experts
AGAIN = """
        with piper.annotate("PP", 0), piper.annotate("EP"):
            rows, sizes = piper.dispatch(rows, counts)
            rows = torch.relu(piper.grouped_linear(rows, self.up, sizes))
            rows = piper.combine(piper.grouped_linear(rows, self.down, sizes))
        with piper.annotate("PP", 0):
            out ="""
TWICE = ('\n        with piper.annotate("PP", 0):\n            out =', AGAIN)


@cache
def captured(*changes: tuple[str, str]) -> Any:
    return capture(dividing.experts(*changes), dividing.batch())


def experts(*program: Any, changes: tuple[tuple[str, str], ...] = ()) -> object:
    return compile_step(captured(*changes), tuple(parse(program)))


def divided(*changes: tuple[str, str]) -> object:
    return experts(*EXPERTS, ShardExperts(), changes=changes)


def inside(added: str) -> tuple[str, str]:
    return dividing.GELU, f"{dividing.GELU}; {added}"


def meshes(*axes: list[str], last: list[list[int]] = FOUR) -> object:
    conditions: list[Any] = [{"EP": "-"}, {"EP": 0}, {"EP": 1}]
    given = zip(axes, conditions, (FOUR, FOUR, last), strict=True)
    places = [Place(devices=devices, axes=a, filter=each) for a, each, devices in given]
    return experts(*places, Replicate(), ShardExperts(), changes=(TWICE,))


def replicated(*zero: int) -> object:
    parts: list[Any] = [{"EP": 0}, {"EP": 1}, {"EP": "-"}]
    policies = [Replicate(filter=part, zero=level) for part, level in zip(parts, zero, strict=True)]
    return experts(place({}, *BOTH), *policies, ShardExperts(), changes=(TWICE,))


def weights(params: Any, **fields: Any) -> object:
    return piper.compile(Lone(), torch.randn(2, 4), [TENSORS, ShardWeights(params=params, **fields)])


def selected(condition: Any) -> object:
    params: dict[str, Any] = {"layers.0.weight": 0, "layers.3.weight": 0}
    return compiled(TENSORS, ShardWeights(filter=condition, params=params))


def sequences(*dims: int, label: str = "*") -> object:
    directives = [ShardSequences(values={label: d}, axis=a) for d, a in zip(dims, ("cp", "c2"), strict=False)]
    mesh = Place(devices=FOUR, axes=["cp", "c2"]) if len(dims) > 1 else Place(devices=[0, 1], axes=["cp"])
    return piper.compile(Parts(), torch.randn(2, 4, 4), [mesh, *directives])


CASES: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "a filter without experts": (
        lambda: experts(*EXPERTS, ShardExperts(filter={"EP": "-"})),
        r"selects only regions without experts: PP=0\. Select the experts, with the filter \{\"PP\": 0, \"EP\": 0\}",
        lambda: experts(*EXPERTS, ShardExperts(filter={"PP": 0, "EP": 0})),
    ),
    "a mesh without the axis of the experts": (
        lambda: experts(Place(devices=[[0], [1]], axes=["dp", "ep"]), Replicate(), ShardExperts()),
        r"mesh dp=2 x ep=1\. Place it on a mesh with two or more .*, such as Place\(devices=\[0, 1\], axes=\['ep'\]\)",
        lambda: experts(Place(devices=[0, 1], axes=["ep"]), Replicate(), ShardExperts()),
    ),
    "random numbers in the experts": (
        lambda: divided(inside("rows = F.dropout(rows)")),
        r"draws random numbers, .* Move the random operation, such as dropout, out of the region",
        lambda: divided(("rows * score", "F.dropout(rows) * score")),
    ),
    "a result without combine": (
        lambda: divided(inside("extra = rows"), ("F.mse_loss(", "extra.mean() + F.mse_loss(")),
        r"returns relu without combine, .* Pass each tensor that leaves the region through piper\.combine",
        lambda: divided(inside("extra = piper.combine(rows)"), ("F.mse_loss(", "extra.mean() + F.mse_loss(")),
    ),
    "weights of experts elsewhere": (
        lambda: divided(("F.mse_loss(", "self.up.mean() + F.mse_loss(")),
        r"PP=0 also uses 'up', but not as a weight of experts\. Give this region a parameter of its own instead of 'up'",
        lambda: divided(("F.mse_loss(", "self.router.weight.mean() + F.mse_loss(")),
    ),
    "experts interleaved in memory": (
        lambda: divided(("torch.ones(4, 6, 8)", "torch.ones(6, 4, 8).transpose(0, 1)")),
        r"strides \[8, 32, 1\], .* Create it as a contiguous tensor with the experts in its first dimension",
        lambda: divided(("torch.ones(4, 6, 8)", "torch.ones(6, 4, 8).transpose(0, 1).contiguous()")),
    ),
    "one of two regions of the same experts": (
        lambda: experts(*EXPERTS, ShardExperts(filter={"EP": 0}), changes=(TWICE,)),
        r"PP=0,EP=1 also uses 'up', but this directive does not select the region\. Select all regions that use 'up'",
        lambda: divided(TWICE),
    ),
    "experts divided twice": (
        lambda: experts(*EXPERTS, ShardExperts(), ShardExperts()),
        r"are already sharded\. Shard each region only once",
        lambda: experts(*EXPERTS, ShardExperts()),
    ),
    "experts with two levels of ZeRO": (
        lambda: replicated(1, 2, 0),
        r"different replicate options use .* up, down\. Give regions that share parameters the same replicate options",
        lambda: replicated(2, 2, 0),
    ),
    "meshes of experts in two orders": (
        lambda: meshes(["dp", "ep"], ["dp", "ep"], ["ep", "dp"]),
        r"at different positions along 'ep'\. Give all groups meshes of one shape, with the devices and the axes in the same order",
        lambda: meshes(["dp", "ep"], ["dp", "ep"], ["dp", "ep"]),
    ),
    "meshes of experts of two sizes": (
        lambda: meshes(*[["dp", "ep"]] * 3, last=[[0, 1, 2, 3]]),
        r"have different numbers of devices along 'ep'\. Give all groups the same number",
        lambda: meshes(*[["dp", "ep"]] * 3),
    ),
    "a device in two groups": (
        lambda: experts(*EXPERTS, ShardExperts(devices=[[0, 1], [1, 2]])),
        r"device 1 is in 2 groups\. Give groups that share no device, and place the chunks on them",
        lambda: experts(*EXPERTS, ShardExperts(devices=[0, 1])),
    ),
    "params without dimensions": (
        lambda: weights(None),
        r"None does not map names of parameters to dimensions\. Give names or patterns .* \{\"\*\.q_proj\.weight\": 0\}",
        lambda: weights({"fc.weight": 0}),
    ),
    "a wrong name of a weight": (
        lambda: weights({"fc.wight": 0}),
        r"'fc\.wight' matches no parameter\. Give .*, such as fc\.weight\. Did you mean 'fc\.weight'",
        lambda: weights({"fc.weight": 0}),
    ),
    "a dimension that a weight does not have": (
        lambda: weights({"fc.weight": 2}),
        r"shape \[4, 4\], which does not have a dimension 2\. Give it dimension 0 or 1",
        lambda: (weights({"fc.weight": 0}), weights({"fc.weight": 1})),
    ),
    "a bias without its weight": (
        lambda: weights({"fc.bias": 0}),
        r"cannot work on shards of fc\.bias as S\(0\) along .tp., with fc\.weight whole\. Leave fc\.bias out of params",
        lambda: (weights({"fc.bias": 0, "fc.weight": 0}), weights({"fc.weight": 0})),
    ),
    "a norm of shards": (
        lambda: weights({"fc.weight": 0, "norm.weight": 0}),
        r"cannot work on shards of norm\.weight as S\(0\).*\. Leave norm\.weight out of params",
        lambda: weights({"fc.weight": 0}),
    ),
    "two directives along one axis": (
        lambda: sharded(
            TENSORS, ShardWeights(params={"up.weight": 0}), ShardWeights(params={"down.weight": 1})
        ),
        r"several directives shard tensors along 'tp'\. Combine them into one directive",
        lambda: sharded(TENSORS, ShardWeights(params=WEIGHT)),
    ),
    "one device along the axis": (
        lambda: sharded(
            Place(devices=[[0], [1]], axes=["dp", "tp"]), ShardWeights(params=WEIGHT), Replicate()
        ),
        r"only one device along 'tp'\. Give the axis two or more devices",
        lambda: sharded(Place(devices=FOUR, axes=["dp", "tp"]), ShardWeights(params=WEIGHT), Replicate()),
    ),
    "a weight that is read elsewhere": (
        lambda: selected({"PP": 0}),
        r"PP=1 also reads layers\.3\.weight, .* Select all regions that read layers\.3\.weight\. \{\} selects all regions",
        lambda: selected({}),
    ),
    "groups beside the place": (
        lambda: sharded(
            Place(devices=[0, 1, 2, 3]), ShardWeights(params=WEIGHT, devices=[0, 1]), Replicate()
        ),
        r"is placed on \[0, 1, 2, 3\]\. Choose groups so that some of them together have exactly these devices",
        lambda: sharded(Place(devices=[0, 1, 2, 3]), ShardWeights(params=WEIGHT, devices=FOUR), Replicate()),
    ),
    "a label without a region": (
        lambda: sequences(1, label="PP=7"),
        r"'PP=7' matches no region\. Give a label or pattern of regions, such as PP=0, untagged",
        lambda: sequences(1, label="PP=0"),
    ),
    "a dimension without values": (
        lambda: sequences(5),
        r"have at most 3 dimensions\. Name another dimension: positions are dimension 1 of",
        lambda: sequences(1),
    ),
    "one dimension along two axes": (
        lambda: sequences(1, 1),
        r"an earlier directive shards dimension 1 of values along 'cp'\. Shard each dimension along one axis only",
        lambda: sequences(1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fix_of_a_message_works(name: str) -> None:
    check_fix(*CASES[name])
