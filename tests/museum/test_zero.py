"""Mistakes of data parallelism and of ZeRO. docs/museum.md describes each of them."""

from __future__ import annotations

import pytest

from tests.museum.cases import Case, assert_caught

CASES = {
    "weights_of_last_step": Case("gathered once for all steps", "training", "step 1, .* differs"),
    "last_microbatch_unsummed": Case(
        "last microbatch added after the sum", "graph", r"adds grad .*P\(sum\).*S\(0\)"
    ),
    "earlier_microbatches_lost": Case("per-microbatch sum dropped", "graph", "samples 0:3 are missing"),
    "second_use_lost": Case("weight used twice counted once", "execution", "gradient shared.weight differs"),
    "copied_not_added": Case("sum overwritten", "training", "gradient .* differs", "pipeline"),
    "groups_unsummed": Case("sum over groups forgotten", "graph", "every group would step with its own gradient"),
    "summed_too_early": Case(
        "sum starts too early", "graph", r"accumulate %.* reads %.*, but no.* wait", "pipeline"
    ),
    "shards_of_other_layout": Case("shard of the neighbor delivered", "training", "gradient .* differs"),
    "bucket_reused_early": Case(
        "sums waited for elsewhere", "plans", "stream compute started it, and gets its memory back"
    ),
    "gradients_not_zeroed": Case("gradients of the last step", "training", "differs after the update", "pipeline"),
    "summed_in_bfloat16": Case("buckets summed in bfloat16", "training", "differs"),
    "one_mask_for_replicas": Case("one mask for all replicas", "training", "differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])
