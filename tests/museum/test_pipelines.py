"""Mistakes of pipelines. docs/museum.md describes each of them."""

from __future__ import annotations

import pytest

from tests.museum.cases import Case, assert_caught

CASES = {
    "copies_step_apart": Case("tied update with own share", "graph", "one device sums"),
    "one_copy_steps": Case("tied update on one device", "graph", "is used on device 2, but no update"),
    "latest_gradient_sent": Case(
        "transfer of another microbatch",
        "graph",
        "works on samples 2:4 but reads activation",
        "pipeline",
    ),
    "shared_weight_twice": Case("gradient of weights doubled", "graph", "count 2 times", "halves"),
    "one_output_for_all": Case("hand-over incomplete", "execution", "gradient shared.weight differs"),
    "messages_overtake": Case(
        "posts exchanged", "plans", "expects the value of %.*comes first", "interleaved"
    ),
    "hooks_skipped": Case(
        "sum over replicas forgotten",
        "graph",
        "every replica would step with its own gradient",
        "zero bubble in replicas",
    ),
    "wiped_between_microbatches": Case(
        "only the last microbatch trained", "graph", "samples 0:4 are missing", "pipeline"
    ),
    "remainder_lost": Case("uneven remainder lost", "graph", "samples 3:5 are missing", "pipeline"),
    "sum_not_divided": Case("samples weighed as a sum", "execution", "metric returned loss differs"),
    "equal_weights": Case("mean over microbatches", "training", "gradient .* differs", "convolution"),
    "left_from_last_step": Case("message of the step before", "training", "step 1, .* differs", "pipeline"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])
