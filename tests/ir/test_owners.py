"""Owners of whole parameters: each parameter has one, and all have about as much to update over all buckets."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_piper.ir.owners import Owners, update_cost
from lightning_piper.ir.values import TensorSpec

quick = settings(max_examples=100, derandomize=True, deadline=None, database=None)
WIDTH = 4
# The matrices of a transformer's layer, and its vectors.
LAYER = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (4 * WIDTH,))
shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=9)


def specs(shapes: list[tuple[int, ...]] | tuple[tuple[int, ...], ...]) -> list[TensorSpec]:
    return [TensorSpec.of(torch.empty(shape)) for shape in shapes]


def assigned(owners: Owners, shapes: list[tuple[int, ...]] | tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    tensors = specs(shapes)
    return owners.assign(tensors, [spec.numel for spec in tensors])


def loads(layers: int, members: int, anew: bool = False) -> list[int]:
    """The cost of each member's parameters of so many equal buckets. With `anew`, each bucket is the first."""
    owners, found = Owners(members), Counter(dict.fromkeys(range(members), 0))
    for _ in range(layers):
        chosen = assigned(Owners(members) if anew else owners, LAYER)
        for spec, owner in zip(specs(LAYER), chosen, strict=True):
            found[owner] += update_cost(spec)
    return [found[member] for member in range(members)]


def test_costs() -> None:
    """Those of Newton-Schulz iterations for matrices, which a transpose does not change."""
    assert [update_cost(spec) for spec in specs([(8, 3), (3, 8), (5, 2, 3), (7,), (), (0, 3)])] == [
        72, 72, 150, 7, 1, 0,
    ]  # fmt: skip


@quick
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 6))
def test_every_tensor_has_one_owner_and_no_shard_is_longer_than_needed(
    buckets: list[list[tuple[int, ...]]], members: int
) -> None:
    owners = Owners(members)
    for bucket in buckets:
        sizes = [spec.numel for spec in specs(bucket)]
        chosen = assigned(owners, bucket)
        assert len(chosen) == len(bucket) and set(chosen) <= set(range(members))
        held = Counter(dict.fromkeys(range(members), 0))
        for size, owner in zip(sizes, chosen, strict=True):
            held[owner] += size
        # What the earlier buckets gave to the members does not make shards longer.
        alone = Counter(dict.fromkeys(range(members), 0))
        for size, owner in zip(sizes, assigned(Owners(members), bucket), strict=True):
            alone[owner] += size
        assert sorted(held.values()) == sorted(alone.values())
        assert max(held.values()) <= sum(sizes) / members + max(sizes)


@pytest.mark.parametrize("members", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("layers", [6, 8, 12, 24])
def test_equal_layers_are_equal_work(layers: int, members: int) -> None:
    found = loads(layers, members)
    largest = max(map(update_cost, specs(LAYER)))
    assert sum(found) == layers * sum(map(update_cost, specs(LAYER)))
    assert max(found) - min(found) <= 2 * largest
    # The control: every bucket by itself gives its largest part to the first member. Three members have equal parts.
    alone = loads(layers, members, anew=True)
    assert alone[0] == max(alone) and (members == 3 or max(alone) - min(alone) > layers / 2 * WIDTH**3)


def test_buckets_of_one_matrix_go_round() -> None:
    owners = Owners(3)
    assert [assigned(owners, [(9, 9)]) for _ in range(6)] == [(0,), (1,), (2,), (0,), (1,), (2,)]


def test_a_large_embedding_does_not_take_matrices_from_its_owner() -> None:
    """Its update may be cheap, so the owner still gets half of the layers' matrices."""
    owners = Owners(2)
    assert assigned(owners, [(1000, WIDTH)]) == (0,)
    matrices = Counter(assigned(owners, [(WIDTH, WIDTH)])[0] for _ in range(10))
    assert matrices == {0: 5, 1: 5}


def test_owners_that_were_noted_count() -> None:
    owners = Owners(2)
    owners.add(specs([(9, 9)]), [0])
    assert assigned(owners, [(9, 9)]) == (1,)
