"""Sums over processes: if they have few bytes, each member computes them itself."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.distributed import sums
from tests.distributed.processes import launch


def test_small_sums_are_added_in_the_order_of_the_members(tmp_path: Path) -> None:
    found = launch(sums.SIZE, sums.sums, tmp_path)
    cases = [
        (dtype, numel)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
        for numel in range(5)
    ]
    assert len(cases) == len(found[0])
    reordered = 0
    for case, ranks in zip(cases, zip(*found, strict=True), strict=True):
        assert {exchanged for exchanged, _ in ranks} == {case[1] < 4}, (
            "with one element more, gloo adds them up"
        )
        first = ranks[0][1]
        assert all(torch.equal(x, first) for _, x in ranks), f"{case}: the members have the same bits"
        parts = [sums.values(rank, case[0], first.numel()) for rank in range(sums.SIZE)]
        if case[1] < 4:
            assert torch.equal(first, parts[2] + parts[0] + parts[1]), case
            reordered += not torch.equal(first, parts[0] + parts[1] + parts[2])
        else:
            torch.testing.assert_close(first, sum(parts))
    assert reordered, "in another order the bits would be others"
