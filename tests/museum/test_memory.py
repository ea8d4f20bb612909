"""Mistakes of recomputation and offload. docs/museum.md describes each of them."""

from __future__ import annotations

import pytest

from tests.museum.cases import Case, assert_caught

CASES = {
    "other_mask_recomputed": Case("second pass draws anew, interpreted", "execution", "gradient .* differs"),
    "random_recomputed": Case("random numbers computed again", "execution", "gradient .* differs"),
    "statistics_twice": Case(
        "second pass changes the buffer", "graph", "has 2 values, but it needs the last one alone"
    ),
    "recomputed_elsewhere": Case(
        "second pass elsewhere", "graph", "without a send and a receive between them"
    ),
    "fetched_before_stored": Case(
        "fetches do not wait", "plans", r"fetch %.*was written on stream store, and no event orders the two"
    ),
    "stored_before_computed": Case(
        "stores do not wait", "plans", r"store %.*was written on stream compute, and no event orders the two"
    ),
    "host_memory_reused": Case("room given back too early", "training", "gradient .* differs"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])
