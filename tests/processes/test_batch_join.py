"""Batches of several processes, joined into one batch or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_piper.errors import BatchError
from lightning_piper.processes.batch_join import BatchJoin

TWO: Any = SimpleNamespace(
    size=2,
    replica=0,
    replicas=(0, 0),
    host_group=None,
    group_of=lambda ranks: None,
    gather=lambda value, ranks=None: [value, value],
)


@pytest.mark.parametrize(
    "batch, why",
    [
        ({"n": 3}, "because it has no tensor. Give the batch tensors with the samples in dimension 0"),
        ((torch.ones(2, 3), torch.ones(4)), "because its tensors have no common first dimension"),
    ],
)
def test_a_batch_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch, batch: Any, why: str) -> None:
    """The other process has the same batch. The samples of its tensors are joined, and they are refused without a
    dimension of samples."""
    monkeypatch.setattr(dist, "all_gather", lambda found, own, group: [each.copy_(own) for each in found])
    join = BatchJoin(TWO)
    with pytest.raises(BatchError, match=f"cannot join this batch, {why}"):
        join.joined(batch)
    x, n = join.joined((torch.ones(2, 3), 3))
    assert x.shape == (4, 3) and n == 3
