"""Faults of tensor parallelism that have happened in other systems. Each is seeded into the package, and the
tests name the check that finds it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper import Place
from lightning_piper.capture.tensor_sharding import ring_attention
from lightning_piper.errors import VerificationError
from lightning_piper.holdings.tensor_map import HolderGroup
from lightning_piper.ir import sharded_values
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.values import Partial, Replicated, Sharded
from lightning_piper.ops import chunk, metrics, weights
from lightning_piper.ops.communication import redistribute
from lightning_piper.placements import attention, proof, ring, rules, vocabulary
from lightning_piper.placements.rule import Rule
from lightning_piper.verify.static_check import check
from tests.fused import fusing, params
from tests.groups import marked
from tests.tensors import VOCABULARY, compiled_for, decoder, divided, replicas, tensors

aten = torch.ops.aten
R, P = Replicated(), Partial()
TWO = Place(filter={}, devices=[0, 1])
THREE = Place(filter={}, devices=[0, 1, 2])
WORDS = [TWO, divided([0, 1], params=VOCABULARY)]
KEYS = [TWO, divided([0, 1], params={}, values={"*": 1}, attention="keys")]
RING = [THREE, divided([0, 1, 2], params={}, values={"*": 1}, attention="ring")]
FUSED = [TWO, divided([0, 1], params=params(fusing()))]
SEQUENCE = [TWO, divided([0, 1], sequence=True)]


@pytest.fixture(autouse=True)
def nothing_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_proved", set())


def bias_on_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each member add the bias after a product of rows, so the bias is added once for each member."""
    original = rules._pointwise

    def wrong(node: Any) -> Any:
        return [*original(node), *([Rule((P, R), (P,))] if len(node.all_input_nodes) == 2 else [])]

    monkeypatch.setattr(rules, "_pointwise", wrong)


def norms_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each member keep the gradient of a norm's weight from its own part of the sequence."""
    original = rules._layer_norm_backward

    def whole(node: Any) -> Any:
        for rule in original(node):
            yield Rule(rule.inputs, (rule.outputs[0], *(R if p else None for p in rule.outputs[1:])))

    monkeypatch.setitem(rules._FAMILIES, aten.native_layer_norm_backward.default, whole)


def local_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a softmax over words take a member's largest word for the largest of all words."""
    original = rules._sum

    def local(node: Any) -> Any:
        for rule in original(node):
            yield Rule(rule.inputs, (R,)) if node.target is aten.amax.default else rule

    monkeypatch.setitem(rules._FAMILIES, aten.amax.default, local)


def local_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a softmax divide by the sum over a member's words only."""
    original = rules._sum

    def local(node: Any) -> Any:
        for rule in original(node):
            yield Rule(rule.inputs, (R,)) if rule.outputs == (P,) else rule

    monkeypatch.setitem(rules._FAMILIES, aten.sum.dim_IntList, local)


def rows_of_another_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each member look words up by the indices of another member."""
    original = redistribute._part

    def part(x: torch.Tensor, after: Any, index: int, count: int) -> torch.Tensor:
        return original(x, after, count - 1 - index if x.dtype is torch.int64 else index, count)

    monkeypatch.setattr(redistribute, "_part", part)


def row_of_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let words of another member get the first row of this member, which is then added to the right row."""
    monkeypatch.setattr(vocabulary, "_own", lambda index, ids: torch.ones_like(index, dtype=torch.bool))
    monkeypatch.setattr(
        vocabulary, "_local", lambda index, ids, own, size: (index - ids[0]).clamp(0, len(ids) - 1)
    )


def keys_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each member keep the gradients of keys and values from its own queries."""
    original = attention.attention_rules

    def own(node: Any) -> Any:
        for rule in original(node):
            yield Rule(rule.inputs, tuple(R if p == P else p for p in rule.outputs))

    monkeypatch.setitem(
        rules._FAMILIES, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, own
    )


def queries_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a causal mask take each member's queries for the first queries of the sequence, so that they do not
    see earlier keys.
    """
    original = redistribute._part

    def part(x: torch.Tensor, after: Any, index: int, count: int) -> torch.Tensor:
        return original(x, after, 0 if x.dtype is torch.int64 else index, count)

    monkeypatch.setattr(redistribute, "_part", part)


def heads_of_another_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take parts of heads, with the samples and heads as one dimension, for parts of the whole dimension."""
    original = rules.regrouping

    def whole(*args: Any) -> Any:
        for before, after in original(*args):
            yield before, Sharded(after.dim) if after.blocks > 1 else after

    monkeypatch.setattr(rules, "regrouping", whole)


def beside_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each member a contiguous part of the fused queries, keys and values, which is not a part of each
    of them.
    """
    original = Sharded.parts
    monkeypatch.setattr(
        Sharded, "parts", lambda placement, whole, count: original(Sharded(placement.dim), whole, count)
    )


def terms_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the members' terms for whole values, so that no node sums the gradients of the norms."""
    for module in (sharded_values, chunk):
        monkeypatch.setattr(module, "is_summed", lambda dag, output: False)


def summed_over_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also sum gradients that all members have, which scales them by the size of the axis."""
    monkeypatch.setattr(
        TrainingDAG,
        "mesh_of",
        lambda dag, name: dag.mesh if name in dag.divided else Mesh.flat(len(dag.mesh.group_ranks)),
    )


def counted_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each member report the loss."""
    monkeypatch.setattr(metrics, "is_counted", lambda dag, group_rank: True)


def shifted_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let keys come from another member than the next one."""
    original = redistribute._part

    def part(x: torch.Tensor, after: Any, index: int, count: int) -> torch.Tensor:
        far = isinstance(after, Sharded) and after.turn and x.is_floating_point()
        return original(x, dataclasses.replace(after, turn=after.turn + 1) if far else after, index, count)

    monkeypatch.setattr(redistribute, "_part", part)


def keys_taken_for_the_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a causal mask take received keys for the keys of this member's own part of the sequence."""
    original = redistribute._part

    def part(x: torch.Tensor, after: Any, index: int, count: int) -> torch.Tensor:
        return original(
            x, dataclasses.replace(after, turn=0) if x.dtype is torch.int64 else after, index, count
        )

    monkeypatch.setattr(redistribute, "_part", part)


def every_part_counts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Average the attention to two parts of the keys, regardless of the sums of their weights."""
    monkeypatch.setattr(
        ring, "_shares", lambda lse, other: (*(torch.full_like(lse, 0.5),) * 2, torch.logaddexp(lse, other))
    )


def sums_of_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backward pass use the sum of weights of one part as the sum over all parts."""
    original = ring._shares
    monkeypatch.setattr(ring, "_shares", lambda lse, other: (*original(lse, other)[:2], other.clone()))


def gradients_not_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a member add the gradients of received keys to the gradients of its own keys."""
    original = ring_attention._turned

    def kept(several: Any, x: Any, part: Any, turn: int) -> Any:
        if turn or several.held[x] == part:
            return original(several, x, part, turn)
        several.held[x] = part
        return x

    monkeypatch.setattr(ring_attention, "_turned", kept)


def gathered_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sharded.joined
    monkeypatch.setattr(Sharded, "joined", lambda placement, parts: original(placement, list(parts)[::-1]))


FAULTS: list[tuple[Any, list[Any], str]] = [
    (bias_on_every_member, [TWO, divided([0, 1])], "the rule of aten.add.Tensor for .* is wrong"),
    (norms_not_summed, SEQUENCE, "the rule of aten.native_layer_norm_backward.default for .* is wrong"),
    (local_maximum, WORDS, "the rule of aten.amax.default for S.* is wrong"),
    (rows_of_another_part, WORDS, "NOT EQUIVALENT"),
    (row_of_nobody_counts, WORDS, "the rule of lightning_piper.rows.default for .* is wrong"),
    (local_sum, WORDS, "the rule of aten.sum.dim_IntList for S.* is wrong"),
    (
        keys_not_summed,
        KEYS,
        "the rule of aten._scaled_dot_product_flash_attention_for_cpu_backward.default for .* is wrong",
    ),
    (queries_from_the_beginning, KEYS, "NOT EQUIVALENT"),
    (shifted_too_far, RING, "NOT EQUIVALENT"),
    (keys_taken_for_the_own_ones, RING, "NOT EQUIVALENT"),
    (every_part_counts_alike, RING, "NOT EQUIVALENT"),
    (sums_of_the_last_part, RING, "NOT EQUIVALENT"),
    (gradients_not_brought_back, RING, "NOT EQUIVALENT"),
    (heads_of_another_sample, KEYS, "the rule of aten.view.default for .* is wrong"),
    (beside_taken_for_one, FUSED, "is wrong|NOT EQUIVALENT"),
    (terms_left, SEQUENCE, "NOT EQUIVALENT|differs between the devices"),
    (
        summed_over_members,
        replicas({}),
        "shards, but|which other replicas have|NOT EQUIVALENT|differs between the devices|sums",
    ),
    (counted_by_each, [TWO, divided([0, 1])], "NOT EQUIVALENT"),
    (gathered_in_the_wrong_order, SEQUENCE, "is wrong|NOT EQUIVALENT"),
]


@pytest.mark.parametrize(
    ("fault", "program", "said"), marked(FAULTS, FAULTS[::4]), ids=[fault.__name__ for fault, *_ in FAULTS]
)
def test_it_is_found(fault, program, said, monkeypatch):
    make = fusing if program is FUSED else decoder
    assert piper.verify(make(), tensors(8), program).verdict == "verified"
    fault(monkeypatch)
    proof._proved.clear()
    try:
        found = str(piper.verify(make(), tensors(8), program))
    except VerificationError as error:
        found = str(error)
    assert re.search(said, found), found


def test_tokens_are_counted_once():
    """Of padded sequences, each member of a line has the same tokens."""
    dag = compiled_for(replicas({})).dag.copy()
    node = next(dag.of_type(weights.CountsSum))
    dag.change(node, mesh=Mesh.flat(4))
    with pytest.raises(
        VerificationError, match="sums counts over data=4, but the batch is divided over data=2 x tp=2"
    ):
        check(dag)


def test_clipping_counts_each_element_once():
    """Of shards that several members have alike, one counts."""
    group = HolderGroup({0: (0, 4), 1: (0, 4), 2: (4, 8), 3: (4, 8)}, None)
    assert group.canonical_holders == {0: (0, 4), 2: (4, 8)}
    assert dataclasses.replace(group, ranges={0: (0, 8), 1: (0, 8)}).canonical_holders == {0: (0, 8)}
