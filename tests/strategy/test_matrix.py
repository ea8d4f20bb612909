"""Every strategy with everything that people do with a Trainer: each process sees what a plain Trainer on one device sees, which is
given the batches of all replicas together.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.groups import marked, on_demand
from tests.strategy import matrix
from tests.strategy.fitting import apart
from tests.strategy.matrix import CONTROLS, LARGEST, SCENARIOS, STRATEGIES
from tests.strategy.scenarios import equal

# Of the largest value of a tensor. In double precision, measured: 4.9e-16.
ROUNDING = dict.fromkeys(SCENARIOS, 1e-14)
# Each microbatch's activations and gradients are rounded to 8 bits by themselves, which are 2**-9 of a number. Measured, after
# three steps: 3.3e-3. Without microbatches there is no difference: see below.
ROUNDING["bf16-mixed"] = 1e-2
WRONG = 0.2  # measured, of the controls: 0.26 and more


QUICK = ["PP2xDP2 ZeRO-3"]
EACH = pytest.mark.parametrize("strategy", marked(STRATEGIES, QUICK))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process saw under a strategy, by scenario."""

    def run(names):
        size, folder = STRATEGIES[names[0]].processes, tmp_path_factory.mktemp("matrix")
        seen = launch_trainings(size, matrix.train, folder / "run", names, folder, prepare=matrix.trace_all)
        return {name: [rank[name] for rank in seen] for name in names}

    return on_demand([["PP2"], ["PP2xDP2 ZeRO-3"], ["DP2"], ["PP2xDP2 ZeRO-1", "PP2xDP2 ZeRO-2"]], run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return matrix.one_device(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """The scenarios on one device, each with something missing or other data: see `CONTROLS`."""
    return matrix.controls(tmp_path_factory.mktemp("wrong"))


def seen_by(strategy, rank, scenario, outcome):
    """What of one device's outcome a process must see: all of it, but the predictions of its own replica's samples only."""
    if scenario != "predict":
        return outcome
    how = STRATEGIES[strategy]
    return {"result": [x[rank * how.replicas // how.processes :: how.replicas] for x in outcome["result"]]}


@pytest.mark.parametrize("scenario", SCENARIOS)
@EACH
def test_as_on_one_device(strategy, scenario, ranks, plain, wrong):
    for rank, outcomes in enumerate(ranks(strategy)):
        found = outcomes[scenario]
        for where, distance in apart(found, seen_by(strategy, rank, scenario, plain[scenario])).items():
            assert distance <= ROUNDING[scenario], (rank, where)
        control = seen_by(strategy, rank, scenario, wrong[scenario])
        assert max(apart(found["result"], control["result"]).values()) > WRONG, (rank, CONTROLS[scenario])


@EACH
def test_all_processes_see_the_same_bits(strategy, ranks):
    first, *others = ranks(strategy)
    for other in others:
        for scenario in SCENARIOS:
            if scenario != "predict":
                assert equal(first[scenario], other[scenario]), scenario


def test_scenarios_are_what_they_are_called(plain, wrong):
    """On one device, and so, where it is equal, everywhere."""
    assert plain["fit+validate"]["dtypes"] == {torch.float64} and plain["bf16-mixed"]["dtypes"] == {torch.bfloat16}
    assert len(plain["fit+validate"]["validations"]) == len(plain["fit+validate"]["epochs"]) == 2
    assert len(plain["predict"]["result"][1]) == 13
    resumed = plain["resume"]
    assert (resumed["steps"], len(resumed["losses"]), len(resumed["validations"])) == (9, 3, 1)
    assert min(plain["clip"]["norms"]) > 10 * LARGEST
    assert (plain["accumulate"]["steps"], wrong["accumulate"]["steps"]) == (4, 6)  # of two epochs of three batches
    stopped, unstopped = plain["early stopping"], wrong["early stopping"]
    values = [float(seen["val_loss"]) for seen in stopped["validations"]]
    assert len(values) == 3 and values[1] == min(values) == stopped["best"]
    assert (stopped["steps"], stopped["stopped"], stopped["waited"]) == (9, 2, 1)
    assert (unstopped["steps"], unstopped["stopped"]) == (24, 0)


@pytest.mark.long
def test_a_pipeline_without_microbatches_rounds_as_one_device_does(ranks, plain):
    """To bfloat16: so the distance of the others is that of microbatches, and nothing else."""
    for rank in ranks("PP2"):
        assert equal(rank["undivided"], plain["bf16-mixed"])
        assert not equal(rank["bf16-mixed"], plain["bf16-mixed"])
