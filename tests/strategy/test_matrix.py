"""Every strategy with everything that people do with a Trainer. Each process sees what a plain Trainer on one
device sees that gets the batches of all replicas together.
"""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.distributed.processes import launch_trainings
from tests.groups import marked, on_demand
from tests.strategy import matrix
from tests.strategy.fitting import apart
from tests.strategy.matrix import CONTROLS, KINDS, LARGEST, ROWS, SCENARIOS
from tests.strategy.scenarios import equal

# Relative to the largest value of a tensor. In double precision, 1.0e-15 was measured.
ROUNDING = dict.fromkeys(SCENARIOS, 1e-14)
# Each microbatch's activations and gradients are rounded to 8 bits separately, which is a relative error of
# 2**-9. After three steps, 3.3e-3 was measured, and 5.3e-3 for two networks against each other. Without
# microbatches there is no difference: see below.
ROUNDING["bf16-mixed"] = 1e-2
WRONG = 0.2  # at least 0.21 was measured for the controls
OWN = 0.05  # for one replica's samples in place of all; at least 0.072 was measured
LOGS = ("logged", "epochs", "validations")

QUICK = ["PP2xDP2 ZeRO-3", "two optimizers, DP2 ZeRO-1"]
EACH = pytest.mark.parametrize("row", marked(ROWS, QUICK))
UNCAPTURED = [name for name, row in ROWS.items() if not KINDS[row.kind].captured]
JOBS = [(name, scenario) for name, row in ROWS.items() for scenario in matrix.scenarios(row.kind)]
LAUNCHES = [
    ["PP2"],
    ["PP2xDP2 ZeRO-3"],
    ["DP2"],
    ["PP2xDP2 ZeRO-1", "PP2xDP2 ZeRO-2"],
    ["two optimizers, DP2 ZeRO-1"],
    *([name for name in UNCAPTURED if ROWS[name].kind == kind and name not in QUICK] for kind in KINDS),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process has seen in a row, by scenario."""

    def run(names):
        size, folder = ROWS[names[0]].processes, tmp_path_factory.mktemp("matrix")
        seen = launch_trainings(size, matrix.train, folder / "run", names, folder, prepare=matrix.trace_all)
        return {name: [rank[name] for rank in seen] for name in names}

    return on_demand(LAUNCHES, run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return on_demand(
        [[kind] for kind in KINDS],
        lambda kinds: {k: matrix.one_device(k, tmp_path_factory.mktemp("plain")) for k in kinds},
    )


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """The scenarios on one device, each with something missing or with other data: see `CONTROLS`."""
    return on_demand(
        [[kind] for kind in KINDS],
        lambda kinds: {k: matrix.controls(k, tmp_path_factory.mktemp("wrong")) for k in kinds},
    )


def seen_by(row, rank, scenario, outcome):
    """The part of one device's outcome that a process must see: everything, except that predictions are only
    those of its own replica's samples.
    """
    if scenario != "predict":
        return outcome
    return {"result": [x[rank * row.replicas // row.processes :: row.replicas] for x in outcome["result"]]}


def shared(row, outcome):
    """The part that all processes must see alike. In a fit whose step runs uncaptured, this excludes losses
    and values logged without `sync_dist`, which belong to each replica's own samples.
    """
    if KINDS[row.kind].captured or "losses" not in outcome:
        return outcome
    logs = {part: [{k: x for k, x in each.items() if k != "root"} for each in outcome[part]] for part in LOGS}
    return {k: x for k, x in outcome.items() if k != "losses"} | logs


@pytest.mark.parametrize(("row", "scenario"), marked(JOBS, [job for job in JOBS if job[0] in QUICK]))
def test_as_on_one_device(row, scenario, ranks, plain, wrong):
    row, outcomes = ROWS[row], ranks(row)
    for rank, outcome in enumerate(outcomes):
        found = shared(row, outcome[scenario])
        for where, distance in apart(
            found, shared(row, seen_by(row, rank, scenario, plain(row.kind)[scenario]))
        ).items():
            assert distance <= ROUNDING[scenario], (rank, where)
        control = seen_by(row, rank, scenario, wrong(row.kind)[scenario])
        assert max(apart(found["result"], control["result"]).values()) > WRONG, (rank, CONTROLS[scenario])


@EACH
def test_all_processes_see_the_same_bits(row, ranks):
    first, *others = ranks(row)
    row = ROWS[row]
    for other in others:
        for scenario in matrix.scenarios(row.kind):
            if scenario != "predict":
                assert equal(shared(row, first[scenario]), shared(row, other[scenario])), scenario


@EACH
def test_training_steps_run_as_their_kind_says(row, ranks):
    """Those that are not captured as they are, which rank 0 tells."""
    told = "\n".join(ranks(row)[0]["told"])
    assert ("Piper could not capture training_step, so it runs uncaptured in every process" in told) != KINDS[
        ROWS[row].kind
    ].captured


@pytest.mark.parametrize("row", marked(UNCAPTURED, QUICK))
def test_losses_of_replicas_have_the_mean_of_one_device(row, ranks, plain):
    """Batches of all replicas are of one size, and losses means over samples. Each replica has those of its
    own samples; so are the roots of losses, which validations log without `sync_dist`.
    """
    one, outcomes = plain(ROWS[row].kind), ranks(row)
    for scenario in matrix.scenarios(ROWS[row].kind):
        if "losses" not in one[scenario]:
            continue
        own, wanted = [outcome[scenario]["losses"] for outcome in outcomes], one[scenario]["losses"]
        means = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
        assert max(apart(means, wanted).values()) <= ROUNDING[scenario], scenario
        for losses, outcome in zip(own, outcomes, strict=True):
            assert max(apart(losses, wanted).values()) > OWN, scenario
            assert apart(outcome[scenario]["validations"], one[scenario]["validations"])["/0/root"] > OWN, (
                scenario
            )


@pytest.mark.parametrize(
    ("kind", "scenario"), [(name, scenario) for name, kind in KINDS.items() for scenario in kind.without]
)
def test_what_a_kind_is_without_is_refused_by_lightning(kind, scenario, tmp_path):
    with pytest.raises(MisconfigurationException, match=KINDS[kind].without[scenario]):
        SCENARIOS[scenario](matrix.Run(matrix.ONE_DEVICE[kind], tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_scenarios_are_what_they_are_called(kind, plain, wrong):
    """On one device, and so, where it is equal, everywhere."""
    steps = 2 if kind == "two optimizers" else 1  # of each batch
    plain, wrong = plain(kind), wrong(kind)
    assert plain["fit+validate"]["dtypes"] == {torch.float64} and plain["bf16-mixed"]["dtypes"] == {
        torch.bfloat16
    }
    assert len(plain["fit+validate"]["validations"]) == len(plain["fit+validate"]["epochs"]) == 2
    assert len(plain["predict"]["result"][1]) == 13
    resumed = plain["resume"]
    assert (resumed["steps"], len(resumed["losses"]), len(resumed["validations"])) == (9 * steps, 3, 1)
    if "clip" in plain:
        assert min(plain["clip"]["norms"]) > 8 * LARGEST
    if "accumulate" in plain:
        assert (plain["accumulate"]["steps"], wrong["accumulate"]["steps"]) == (
            4,
            6,
        )  # of two epochs of three batches
    stopped, unstopped = plain["early stopping"], wrong["early stopping"]
    values = [float(seen["val_loss"]) for seen in stopped["validations"]]
    epochs = len(values)
    assert epochs < 8 and values[-2] == min(values) == stopped["best"]
    assert (stopped["steps"], stopped["stopped"], stopped["waited"]) == (3 * steps * epochs, epochs - 1, 1)
    assert (unstopped["steps"], unstopped["stopped"]) == (24 * steps, 0)


def test_modules_are_what_they_are_called(plain):
    """Samples of each replica have several numbers of rounds; of two schedules, one has a step at each batch,
    one each epoch.
    """
    looks = [1 + sum(float(x.abs().max()) - k / 2 > 1 for k in range(9)) for x, _ in matrix.data(20, 0)]
    assert all(len(set(looks[replica::2])) >= 3 for replica in (0, 1)) and looks[::2] != looks[1::2]
    last = plain("two optimizers")["resume"]["logged"][-1]
    for name, times in (("maker", 9), ("judge", 2)):
        assert float(last[f"train_rate_of_{name}_step"]) == pytest.approx(0.02 * 0.98**times, rel=1e-12)


@pytest.mark.long
def test_a_pipeline_without_microbatches_rounds_as_one_device_does(ranks, plain):
    """To bfloat16: so the distance of the others is that of microbatches, and nothing else."""
    for rank in ranks("PP2"):
        assert equal(rank["undivided"], plain("captured")["bf16-mixed"])
        assert not equal(rank["bf16-mixed"], plain("captured")["bf16-mixed"])
