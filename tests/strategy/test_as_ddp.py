"""Modules that DistributedDataParallel trains, though one device would give other results, train under this
strategy as under DDP.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.strategy.as_ddp import KINDS, evaluate, one_device, train, train_unevenly


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("as_ddp")
    return launch_trainings(2, train, folder / "run", folder)


@pytest.mark.parametrize("kind", KINDS)
def test_each_process_has_the_bits_of_ddp(kind, ranks):
    for found in ranks:
        (wanted, _), *others = found[kind]
        for values, _ in others:
            assert all(torch.equal(values[name], value) for name, value in wanted.items())


def test_copies_that_drift_apart_are_told_of(ranks):
    for kind in KINDS:
        drifts = "rate" in kind
        (first, said), (other, silent) = (found[kind][1] for found in ranks)
        assert drifts != all(torch.equal(first[name], other[name]) for name in first)
        assert len(said) == drifts and all(
            "0.1 on rank 0, and 0.2 on rank 1. So the replicas update" in text for text in said
        )
        assert not silent


def test_processes_may_have_different_numbers_of_batches_in_evaluations(tmp_path):
    for rank, found in enumerate(launch_trainings(2, evaluate, tmp_path / "run", tmp_path)):
        for kind in ("streamed", "sized"):
            (wanted, _), *others = found[kind]
            warned = 2 + (
                kind == "streamed"
            )  # batches of a prediction are counted first, if that is possible
            assert len(wanted) == 4 + 1 + (6, 5)[rank] and all(
                values == wanted and len(said) == warned * (rank == 0) for values, said in others
            ), (
                kind,
                found[kind],
            )
        assert "numbers of batches that may differ" in found["refused"]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_replicas_may_have_different_numbers_of_samples(accumulated, uneven):
    """A mean counts each replica alike, as under DDP; what is divided by a count is one device's."""

    def far(one, other):
        return max(float((one[name] - x).abs().max()) for name, x in other.items())

    alone = one_device(accumulated)
    for rank, found in enumerate(uneven):
        (ddp, _), (ours, said), (over, _) = (
            found[f"{kind} {accumulated}"] for kind in ("ddp", "replicas", "over")
        )
        assert far(ours, ddp) < 1e-14 and far(over, alone) < 1e-14 and far(ddp, alone) > 1e-4
        assert len(said) == (rank == 0) and all("3 to 4 samples in training batch 1" in text for text in said)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    return launch_trainings(2, train_unevenly, folder / "run", folder)
