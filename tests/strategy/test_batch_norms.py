"""Batch norms over replicas use the statistics of the whole batch, as one device with the whole batch does."""

from __future__ import annotations

import pytest

from tests.distributed.processes import launch_trainings
from tests.groups import grouped, marked, on_demand
from tests.strategy.batch_norms import TRAININGS, alone, work

NEAR = 1e-13  # float64, after some steps
OWN = "each replica's own"
NAMES = [(name, processes) for processes, names in TRAININGS.items() for name in names if name != OWN]
QUICK = ["DP2, residual", "ZeRO-3", "as it is, uneven", OWN]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    def run(names):
        processes = next(size for size, known in TRAININGS.items() if names[0] in known)
        folder = tmp_path_factory.mktemp("batch_norms")
        seen = launch_trainings(processes, work, folder / "run", processes, names, folder)
        return {name: [rank[name] for rank in seen] for name in names}

    return on_demand([*grouped(TRAININGS[2], QUICK, 10), list(TRAININGS[4])], run)


def furthest(found, expected):
    assert found.keys() <= expected.keys()
    return max(float((x.double() - expected[name].double()).abs().max()) for name, x in found.items())


@pytest.mark.parametrize("name, processes", marked(NAMES, [(name, 2) for name in QUICK]))
def test_as_on_one_device_with_the_whole_batch(name, processes, ranks, tmp_path):
    expected, found = alone(name, processes, tmp_path), ranks(name)
    assert any("running_mean" in key for key in expected["values"])
    for rank in found:
        assert rank["values"].keys() == expected["values"].keys()
        assert furthest(rank["values"], expected["values"]) <= NEAR
        for mine, whole in zip(
            rank["gradients"], expected["gradients"][-len(rank["gradients"]) :], strict=False
        ):
            assert furthest(mine, whole) <= NEAR
        assert bool(rank["gradients"]) == (processes == 2 and "ZeRO" not in name)
        if not name.startswith("as it is"):
            assert not rank["warned"] and abs(rank["seen"]["loss"] - expected["seen"]["loss"]) <= NEAR
    assert found[0]["saved"].keys() == expected["saved"].keys()
    assert furthest(found[0]["saved"], expected["saved"]) <= NEAR


def test_without_it_each_replica_has_its_own(ranks, tmp_path):
    """The control: what is compared above is another thing then."""
    expected, found = alone(OWN, 2, tmp_path), ranks(OWN)
    assert furthest(found[0]["values"], expected["values"]) > 1e-3
