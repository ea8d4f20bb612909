"""On every process, hooks of modules and callbacks are called as often as under DDP, and in the same order."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import distance
from tests.strategy.hooks import STRATEGIES, record, trace_all

PARTS = ["fit", "resumed", "evaluated"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooks")
    return launch_trainings(2, record, folder / "run", folder, prepare=trace_all)


@pytest.mark.parametrize("name", list(STRATEGIES)[1:])
@pytest.mark.parametrize("part", PARTS)
def test_hooks_are_called_as_under_ddp(name, part, ranks):
    for found in ranks:
        assert found[name][part][0] == found["ddp"][part][0]
        assert distance(found["ddp"][part][1], found[name][part][1]) < 1e-14


def test_hooks_of_a_fit_that_fails(ranks):
    for found in ranks:
        calls = found["PP2"]["failed"][0]
        assert calls == found["ddp"]["failed"][0]
        assert "Callback.on_exception" in calls and "Callback.on_fit_end" not in calls


def test_what_was_recorded(ranks):
    """Two epochs of five batches, of which two make a step: three steps an epoch, the last one of one
    batch.
    """
    for found in ranks:
        counts = Counter(found["ddp"]["fit"][0])
        assert (
            counts["Module.backward"]
            == counts["Callback.on_before_backward"]
            == counts["Module.on_after_backward"]
            == 10
        )
        steps = [
            "optimizer_step",
            "on_before_optimizer_step",
            "configure_gradient_clipping",
            "on_before_zero_grad",
        ]
        assert [counts[f"Module.{hook}"] for hook in steps] == [6] * 4
        assert counts["Module.optimizer_zero_grad"] == counts["Callback.on_before_zero_grad"] == 6
        assert counts["Module.lr_scheduler_step"] == 6
        assert (
            counts["Module.on_after_batch_transfer"] == 2 + 10 + 2 * 5
        )  # sanity check, training, a validation in each epoch
        assert (
            counts["Callback.on_sanity_check_start"] == 1
            and counts["Module.on_validation_batch_end"] == 2 + 2 * 5
        )
        assert (
            counts["Callback.on_save_checkpoint"]
            == counts["Module.on_save_checkpoint"]
            == counts["Callback.state_dict"]
            == 2
        )
        assert counts["Module.setup"] == counts["Module.teardown"] == counts["Module.configure_model"] == 1
        evaluated = found["ddp"]["evaluated"][0]
        assert [
            evaluated.count(f"Module.on_{kind}_batch_end") for kind in ("validation", "test", "predict")
        ] == [5] * 3
        resumed = found["ddp"]["resumed"][0]
        assert {"Module.on_load_checkpoint", "Callback.on_load_checkpoint", "Module.load_state_dict"} <= set(
            resumed
        )
