"""Steps that cannot be captured run uncaptured: on one device as in a Trainer without the strategy, and in
replicas as with DDP.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import lightning_piper as piper
from tests.distributed.processes import launch_trainings
from tests.groups import marked
from tests.strategy.uncaptured import KINDS, SEEDED, fit, train, train_seeded

# The gradient of a bias before a batch norm is only rounding, and Adam divides it by its size.
NEAR = {"BatchNorm": 1e-7}
LATER = ("Later", "File", "changed in an accumulation")  # kinds whose first losses are those of all replicas


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uncaptured")
    return launch_trainings(2, train, folder / "run", folder)


@pytest.mark.parametrize("kind", [*KINDS, "accumulated", "changed in an accumulation"])
def test_replicas_train_as_with_ddp(kind, ranks):
    for rank in ranks:
        own, peer = rank[kind]["replicas"], rank[kind]["ddp"]
        near = NEAR.get(kind, 1e-12)
        assert own["seen"].keys() == peer["seen"].keys() and own["states"] == peer["states"]
        for name, value in peer["seen"].items():
            assert abs(own["seen"][name] - value) <= near, name
        for part in ("values", "saved"):
            assert own[part].keys() == peer[part].keys()
            for name, value in peer[part].items():
                # Between two steps each replica has the statistics of its own batches.
                if part == "saved" or "running" not in name or rank is ranks[0]:
                    assert torch.allclose(own[part][name], value, rtol=0, atol=near), name
    if kind not in LATER:
        assert all(
            abs(a - b) <= near
            for rank in ranks
            for a, b in zip(*(rank[kind][x]["losses"] for x in ("replicas", "ddp")), strict=True)
        )
    assert ranks[0]["Net"]["replicas"]["losses"] != ranks[1]["Net"]["replicas"]["losses"]


def test_replicas_stay_equal_to_the_bit(ranks):
    for kind in ("Net", "Gan"):
        peer = ranks[0][kind]["ddp"]["values"]
        assert all(
            torch.equal(
                ranks[1][kind]["replicas"]["values"][name], ranks[0][kind]["replicas"]["values"][name]
            )
            for name in peer
        )


def test_it_is_told_once(ranks):
    for kind in KINDS:
        found = ranks[0][kind]["replicas"]["warned"]
        assert found and not ranks[1][kind]["replicas"]["warned"]
        assert all(found.count(text) <= 2 for text in found)  # two fits
    said = next(
        text
        for text in ranks[0]["Net"]["replicas"]["warned"]
        if text.startswith("Piper could not capture training_step")
    )
    assert "uncaptured.py:" in said and "if loss.item() > 0.9" in said and "the step is not checked" in said
    assert not ranks[0]["never"]["replicas"]["warned"]


def test_without_any_capture_it_is_the_same(ranks):
    never, peer = ranks[0]["never"]["replicas"]["values"], ranks[0]["Later"]["ddp"]["values"]
    assert all(torch.allclose(never[name], value, rtol=0, atol=1e-12) for name, value in peer.items())


@pytest.mark.parametrize("kind, words", [
    ("stages", "training_step cannot run uncaptured instead, like DDP, because the program does more than "
               "replicate the whole step"),
    ("always", "if loss.item() > 0.9"),
])  # fmt: skip
def test_what_may_not_is_refused_by_all(kind, words, ranks):
    assert all(words in rank["refused"][kind] for rank in ranks)


@pytest.mark.parametrize("kind", marked(KINDS, [*KINDS][::2]))
def test_one_device_trains_as_without_the_strategy(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fit(kind, lambda: "auto", 1, tmp_path / "plain")
        own = fit(kind, lambda: piper.PiperStrategy(transport="local"), 1, tmp_path / "own")
    assert bool(own["warned"]) == (
        kind not in ("Lbfgs", "Ranked")
    )  # whose step is captured, where one process does all of it
    assert own["seen"] == plain["seen"]
    assert own["losses"] == plain["losses"]
    for part in ("values", "saved"):
        assert all(torch.equal(own[part][name], value) for name, value in plain[part].items())


@pytest.mark.long
def test_seeded_bugs_show(tmp_path):
    ranks = launch_trainings(2, train_seeded, tmp_path / "run", tmp_path)
    for what, (kind, *_) in SEEDED.items():
        assert any("error" in rank[what] or far(rank[what], rank[kind]) > 1e-6 for rank in ranks), what


def far(one, other):
    """The largest difference of parameters, buffers, logged values and losses."""
    values = [(one["values"][name] - x).abs().max() for name, x in other["values"].items()]
    losses = [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)]
    return max(
        *map(float, values), *losses, *(abs(one["seen"][name] - x) for name, x in other["seen"].items())
    )
