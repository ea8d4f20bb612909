"""Mistakes of expert parallelism. docs/museum.md describes each of them."""

from __future__ import annotations

import pytest

from tests.museum.cases import Case, assert_caught

CASES = {
    "router_unsummed": Case(
        "router not summed", "graph", "router.weight reaches the optimizer as Partial.*its own gradient"
    ),
    "averaged_over_owners": Case("mean over owners", "training", "gradient blocks.0.up differs"),
    "owners_unsummed": Case(
        "experts not summed", "graph", "blocks.0.up reaches the optimizer as Partial.*its own gradient"
    ),
    "router_detached": Case(
        "gradients stay at their experts", "graph", "rows are at experts. Combine them first"
    ),
    "brought_back_unordered": Case("back without the order of dispatch", "training", "differs"),
    "bias_moves_each_microbatch": Case(
        "running statistics once for each microbatch", "graph", "wait for each other in a circle"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])
