"""In validation, test and prediction over processes, every process sees what a plain Trainer on one device
sees.

The model is in double precision; the sums of torchmetrics' metrics are not.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tests.distributed.processes import launch_trainings
from tests.groups import marked, on_demand
from tests.strategy import evaluated
from tests.strategy.evaluated import PROGRAMS, Named, data, net
from tests.strategy.fitting import apart
from tests.strategy.scenarios import equal

NAMES, QUICK = list(PROGRAMS), ("pp2", "dp2")
EACH = pytest.mark.parametrize("name", marked(NAMES, QUICK))
REPLICATED = [name for name in NAMES if PROGRAMS[name][1] > 1]
ROUNDING = 1e-14  # measured: 5e-16 of the largest value
IN_METRICS = 2e-6  # measured: 5e-7, from sums in single precision


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process has seen, by program."""

    def run(names):
        processes, folder = 4 if names == ["pp2_zero3"] else 2, tmp_path_factory.mktemp(names[0])
        seen = launch_trainings(
            processes, evaluated.train, folder / "run", names, folder, processes, prepare=evaluated.trace_all
        )
        return {name: [rank[name] for rank in seen] for name in names}

    return on_demand([["pp2", "dp2"], ["dualpipe"], ["pp2_zero3"]], run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with torch.random.fork_rng():
        return evaluated.one_device(tmp_path_factory.mktemp("plain"))


def assert_near(found, wanted):
    for where, distance in apart(found, wanted).items():
        assert distance <= (IN_METRICS if "mean_" in where else ROUNDING), where


def without(outcome, *keys):
    return {key: value for key, value in outcome.items() if key not in keys}


OWN = ("outputs", "held", "saved")  # values that differ between processes


@EACH
def test_evaluation_without_a_fit(name, ranks, plain):
    for rank in ranks(name):
        assert_near(without(rank["fresh"], *OWN), without(plain["fresh"], *OWN))
        assert equal(rank["fresh"]["values"], plain["fresh"]["values"])


@EACH
def test_everything_that_decides_by_a_validated_value(name, ranks, plain):
    wanted = plain["fitted"]
    assert (
        wanted["stopped"] < 40
        and len(set(wanted["rates"])) > 2
        and wanted["best"] != f"step={wanted['stopped']}.ckpt"
    )
    assert wanted["after"] != wanted["of_best"]
    for rank in ranks(name):
        assert_near(rank["fitted"], wanted)
        with pytest.raises(AssertionError):
            assert_near(rank["fitted"]["after"], rank["fitted"]["of_best"])


@EACH
def test_all_processes_log_the_same_bits(name, ranks):
    first, *others = ranks(name)
    for other in others:
        for scenario in ("fresh", "fitted", "repeated"):
            assert equal(without(first[scenario], *OWN), without(other[scenario], *OWN))


@EACH
def test_what_a_step_returns_reaches_every_process_of_its_replica(name, ranks, plain):
    """A pipeline has the very bits; of a replica, what the module makes of its batches."""
    module, replicas = net(dropout=0.5).eval(), PROGRAMS[name][1]
    module.on_validation_start()
    for rank, seen in enumerate(ranks(name)):
        replica = rank * replicas // len(ranks(name))
        wanted = []
        for seed, size in enumerate((22, 16)):
            share = Subset(data(size, seed), range(replica, size, replicas))
            with torch.no_grad():
                wanted += [module(x) for x, _ in DataLoader(share, batch_size=8 // replicas)]
        assert equal(seen["fresh"]["outputs"][:5], wanted)
        if replicas == 1:
            assert equal(seen["fresh"]["outputs"], plain["fresh"]["outputs"])
        assert not torch.equal(wanted[0], wanted[1])


@EACH
def test_predictions_are_those_of_the_replicas_own_samples(name, ranks):
    """No sample is repeated, though one replica has more of them, and one batch more, than the other."""
    module, replicas = net().eval(), PROGRAMS[name][1]
    for rank, seen in enumerate(ranks(name)):
        replica = rank * replicas // len(ranks(name))
        for found, size in zip(
            [*seen["predicted"]["predictions"], seen["predicted"]["small"]], (21, 9, 2), strict=True
        ):
            share = Subset(Named(size, size), range(replica, size, replicas))
            with torch.no_grad():
                wanted = [[y, module(x), names] for x, y, names in DataLoader(share, batch_size=4)]
            assert equal([list(batch) for batch in found], wanted)
    counts = [sum(len(y) for y, _, _ in seen["predicted"]["predictions"][0]) for seen in ranks(name)]
    assert sorted(set(counts)) == ([21] if replicas == 1 else [10, 11])


def test_last_batches_of_different_sizes_count_by_their_samples(ranks, plain):
    for rank in ranks("dp2"):
        assert_near(rank["uneven"], plain["uneven"])


@pytest.mark.parametrize("name", marked(REPLICATED, QUICK))
def test_an_uneven_share_repeats_samples_as_lightnings_sampler_does(name, ranks, plain):
    for rank in ranks(name):
        assert_near(rank["repeated"], plain["repeated"])
    with pytest.raises(AssertionError):
        assert_near(ranks("pp2")[0]["repeated"], plain["repeated"])


FIRST, SECOND = [f"first.0.{x}" for x in ("weight", "bias")], [f"second.1.{x}" for x in ("weight", "bias")]


@pytest.mark.parametrize(
    "name, held",
    [
        ("pp2", [FIRST, SECOND]),
        ("dp2", [FIRST + SECOND] * 2),
        pytest.param("pp2_zero3", [[]] * 4, marks=pytest.mark.long),
    ],
)
def test_each_process_holds_its_part_and_saves_the_whole(name, held, ranks, plain):
    for rank, own in zip(ranks(name), held, strict=True):
        assert rank["fresh"]["held"] == [*own, "unused.weight", "unused.bias"]
    assert equal(ranks(name)[0]["fresh"]["saved"], plain["fresh"]["saved"])


@pytest.mark.parametrize("what, words", [
    ("metric", "validation_step computes with the result of self.mean_output"),
    ("unused alone", "no error"),
    ("unused in a fit", "no error"),
    ("moved in a fit", "uses first.0.bias, first.0.weight on device 1, but training_step does not use them "
                       "there, so this device does not hold them"),
    ("untagged", "no place of the program selects a region of this step"),
    ("values", "drew different batches (different values) in evaluation step 0"),
    ("state", "the Python values that evaluation step 1 reads differ between the processes"),
    ("length", "the processes have [2, 4] batches"),
    ("nothing", "no error"),
])  # fmt: skip
def test_processes_refuse_together(what, words, ranks):
    for rank in ranks("pp2"):
        assert words in rank["refused"][what]
