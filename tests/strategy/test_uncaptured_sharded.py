"""Steps that are not captured, under programs that shard: each process holds a part of the optimizer's state,
and trains to the bit as with DDP.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.strategy.test_uncaptured import far
from tests.strategy.uncaptured_sharded import REFUSED, ROWS, SEEDED, train, train_seeded

# A captured step adds in another order. If two passes of a step leave gradients in one parameter, DDP
# averages the sum that each process has at that point; here each pass is averaged and then added.
ROUNDED = ("Later", "Afterwards")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return launch_trainings(2, train, folder / "run", folder)


@pytest.mark.parametrize(("kind", "level"), [*ROWS, ("accumulated", "zero1")])
def test_it_trains_as_with_ddp(kind, level, ranks):
    for rank in ranks:
        own, peer = rank[kind, level], rank[kind]
        assert own["states"] == peer["states"]
        if kind not in ("Later", "File"):  # the first steps are captured: losses are of all replicas
            equal = (lambda x: pytest.approx(x, rel=1e-12, abs=0)) if kind in ROUNDED else (lambda x: x)
            assert own["seen"] == equal(peer["seen"]) and own["losses"] == equal(peer["losses"])
        for part in ("values", "saved"):
            assert own[part].keys() == peer[part].keys()
            for name, value in peer[part].items():
                # Between two steps each replica has the statistics of its own batches.
                if part == "saved" or "running" not in name or rank is ranks[0]:
                    assert torch.allclose(
                        own[part][name], value, rtol=0, atol=1e-12 if kind in ROUNDED else 0
                    ), name


@pytest.mark.parametrize(("kind", "level"), ROWS)
def test_each_process_has_a_part_of_the_state(kind, level, ranks):
    whole, parts = ranks[0][kind]["numbers"], [rank[kind, level]["numbers"] for rank in ranks]
    assert sum(parts) == whole and max(parts) < whole


def test_it_is_told_that_parameters_and_gradients_are_whole(ranks):
    said = {
        level: "\n".join(ranks[0][kind, level]["warned"]) for kind, level in ROWS if kind in ("Gan", "Net")
    }
    words = "each process has whole parameters and gradients, so {} shards only the optimizer state"
    assert words.format("shard_grads") in said["zero2"] and words.format("shard_params") in said["zero3"]
    assert "has whole parameters" not in said["zero1"]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_is_refused_by_all(kind, ranks):
    assert all(REFUSED[kind] in rank["refused"][kind] for rank in ranks), ranks[0]["refused"][kind]


@pytest.mark.long
def test_seeded_bugs_show(tmp_path):
    ranks = launch_trainings(2, train_seeded, tmp_path / "run", tmp_path)
    for what, (kind, *_) in SEEDED.items():
        assert any(far(rank[what], rank[kind]) > 1e-6 for rank in ranks), what
