"""Averages of the weights over processes are those of one device, or they are refused."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.groups import grouped, marked, on_demand
from tests.strategy.averaged import BY_HAND, PROGRAMS, TRIALS, run_all, trace_all, work
from tests.strategy.test_options import differences

QUICK = [("ZeRO-3", "ema"), ("PP2", "swa, sharded checkpoint")]
# The trials take turns among the programs: each program has three of the trials, and each trial has three of
# the programs.
JOBS = [
    (program, name)
    for i, program in enumerate(PROGRAMS)
    for j, name in enumerate(TRIALS)
    if (i + j) % 2 == 0 or (program, name) in QUICK
]
OWN = [(program, name) for program in PROGRAMS for name in BY_HAND]
WORDS = {
    "by norms": "WeightAveraging must average each element of the parameters independently",
    "statistics anew": "StochasticWeightAveraging of a module with batch norms",
    "unfreezing": "BackboneFinetuning, which unfreezes parameters at epoch 1",
}
AS_IT_IS = (
    "statistics anew",
    "unfreezing",
)  # steps that run as they are where nothing but replicas and shards is asked for
QUICK_OWN = [
    ("DP2", "inside"),
    ("DP2", "unfreezing"),
    ("DP2", "statistics anew"),
    ("ZeRO-3", "shadow"),
    ("PP2", "by norms"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process has seen in a job."""

    def run(jobs):
        folder = tmp_path_factory.mktemp("averages")
        seen = launch_trainings(2, work, folder / "run", jobs, folder, prepare=trace_all)
        return {job: [rank[job] for rank in seen] for job in jobs}

    return on_demand(grouped([*JOBS, *OWN], [*QUICK, *QUICK_OWN], 9), run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What one device has seen in a trial."""

    def run(names):
        with torch.random.fork_rng():
            found = run_all([(None, name) for name in names], tmp_path_factory.mktemp("plain"))
        return {name: seen for (_, name), seen in found.items()}

    return on_demand([[name] for name in [*TRIALS, *BY_HAND]], run)


@pytest.mark.parametrize("program, name", marked(JOBS, QUICK))
def test_lightnings_callbacks_as_on_one_device(program, name, ranks, plain):
    for found in ranks((program, name)):
        assert differences(plain(name), found) == []


@pytest.mark.parametrize("program", marked(PROGRAMS, ["ZeRO-3"]))
def test_lightnings_callbacks_in_one_process(program, plain, tmp_path):
    name = "ema"
    (found,) = run_all([(program, name)], tmp_path, local=True).values()
    assert differences(plain(name), found) == []


def test_averages_make_a_difference(plain):
    found = plain("ema")
    saved = found["step=5"]
    assert differences(saved["state_dict"], saved["current_model_state"]) != []
    assert differences(found["values"], plain("equal weights")["values"]) != []
    assert len(set(found["validations"])) == 3  # the sanity check, and two epochs


@pytest.mark.parametrize("program, name", marked(OWN, QUICK_OWN))
def test_averages_by_hand(program, name, ranks, plain):
    """Replicas have all that one device has, and so has a step that runs as it is; where a process does not,
    it is said.
    """
    for found in ranks((program, name)):
        if program == "DP2" or (name in AS_IT_IS and program.startswith("ZeRO")):
            assert differences(plain(name), found) == []
        elif name in WORDS:
            assert WORDS[name] in found["said"]
        else:
            assert re.search(
                "the values of '.*' cannot be read or copied here, because this process does not have all of "
                "them",
                found["said"],
            )
