"""Mistakes of gradient accumulation and of losses. docs/museum.md describes each of them."""

from __future__ import annotations

import pytest

from tests.museum.cases import Case, assert_caught

CASES = {
    "mean_of_means": Case("tokens weighed as samples", "execution", "metric returned loss differs", "pipeline"),
    "tokens_of_one_replica": Case("denominator of one replica", "graph", "divides by counts of one replica"),
    "smoothing_not_divided": Case("one tangent for all terms", "execution", "gradient shared.weight differs"),
    "negatives_without_gradient": Case(
        "gradients of one replica for the sum", "training", "gradient .* differs"
    ),
    "contrast_times_replicas": Case(
        "loss of the whole batch in each replica", "capture", "each would count it again"
    ),
    "own_negatives_only": Case(
        "samples of one replica", "graph", "but the batch is divided over 2 replicas"
    ),
    "statistics_of_parts": Case(
        "statistics of the batch not summed", "graph", "Sum it over the whole batch first"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])
