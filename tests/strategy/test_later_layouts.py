"""Steps whose layout changes after the first batch, in stages or under ZeRO: modules, norms of gradients,
optimizers and checkpoints are those of one device.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.strategy.later_layouts import (
    ALL_GRADIENTS,
    FROZEN,
    QUICK,
    QUICK_SHARDED,
    RESUMED,
    ROWS,
    SHARDED,
    STALE,
    WAYS,
    fit,
    train,
    train_more,
)

ROUNDING = 1e-12  # 2e-15 measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("later_layouts")


@pytest.fixture(scope="module")
def ranks(folder):
    return launch_trainings(2, train, folder / "run", folder / "two")


@pytest.fixture(scope="module")
def more_ranks(folder):
    return launch_trainings(2, train_more, folder / "run_more", folder / "two")


def far(a, b):
    assert a.keys() == b.keys()
    return max((float((a[key].double() - b[key].double()).abs().max()) for key in a), default=0.0)


def assert_checkpoints_are_alike(one, two):
    names = sorted(path.name for path in one.iterdir())
    assert names and names == sorted(path.name for path in two.iterdir())
    for name in names:
        a, b = (torch.load(path / name, weights_only=False) for path in (one, two))
        assert far(a["state_dict"], b["state_dict"]) < ROUNDING, name
        states, others = (found["optimizer_states"][0]["state"] for found in (a, b))
        assert states.keys() == others.keys() and all(far(states[i], others[i]) < ROUNDING for i in states), (
            name
        )


@pytest.mark.parametrize(("kind", "way"), QUICK)
def test_it_trains_as_on_one_device(kind, way, ranks, folder):
    one = fit(kind, "auto", folder / "one" / kind / way, **WAYS[way])
    assert all(far(rank[kind, way], one) < ROUNDING for rank in ranks)
    assert_checkpoints_are_alike(folder / "one" / kind / way, folder / "two" / kind / way)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "way"), ROWS)
def test_other_kinds_train_as_on_one_device(kind, way, more_ranks, folder):
    test_it_trains_as_on_one_device(kind, way, more_ranks, folder)


@pytest.mark.parametrize(("kind", "way", "stage"), QUICK_SHARDED)
def test_it_trains_as_on_one_device_under_zero(kind, way, stage, ranks, folder):
    one = fit(kind, "auto", folder / "one" / kind / f"{way} {stage}", **WAYS[way])
    assert all(far(rank[kind, way, stage], one) < ROUNDING for rank in ranks)
    assert_checkpoints_are_alike(*(folder / each / kind / f"{way} {stage}" for each in ("one", "two")))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "way", "stage"), SHARDED)
def test_other_kinds_train_as_on_one_device_under_zero(kind, way, stage, more_ranks, folder):
    test_it_trains_as_on_one_device_under_zero(kind, way, stage, more_ranks, folder)


def test_a_zero_gradient_would_show(ranks, folder):
    """AdamW changes a parameter that gets a zero gradient, and leaves a parameter without a gradient as it
    is.
    """
    one = fit("TakesTurns", "auto", folder / "one" / "all gradients", **WAYS["accumulated"])
    assert all(far(rank[ALL_GRADIENTS], one) > 1e-3 for rank in ranks)


def test_a_layer_frozen_between_accumulated_batches_gets_their_mean(ranks, folder):
    """The optimizer still updates it with the gradient of the batches before."""
    one = fit("FreezesBetween", "auto", folder / "one" / "frozen", accumulate_grad_batches=2)
    assert all(far(rank[FROZEN], one) < ROUNDING for rank in ranks)


@pytest.mark.long
@pytest.mark.parametrize(("checkpoint", "step"), RESUMED)
def test_it_resumes_on_either_side_of_the_change(checkpoint, step, more_ranks, folder):
    """Also in the middle of an epoch: a fit that resumes continues as if nothing had ended it."""
    one = fit("JoinsBoth", "auto", folder / "one" / f"{checkpoint} {step}")
    assert all(far(rank[checkpoint, step], one) < ROUNDING for rank in more_ranks)


def test_a_stage_that_gets_no_gradients_has_other_values(ranks, folder):
    one = fit("Unties", "auto", folder / "one" / "stale")
    assert all(far(rank[STALE], one) > 1e-3 for rank in ranks)
