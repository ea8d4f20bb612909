"""State outside of the module: what a step changes in its batch, attributes of parameters, settings of torch,
and the number of processes.
"""

from __future__ import annotations

import pytest

import lightning_piper as piper
from tests.distributed.processes import launch_trainings
from tests.strategy.outside_state import CHANGES, EQUAL, SIZES, Net, apart, fit, shared, train_in_stages


def far(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_batch_is_named(name):
    step, where = CHANGES[name]
    one, _ = fit(Net(step), "auto")
    found, said = fit(Net(step), piper.PiperStrategy())
    assert far(found, one) == 0.0
    assert [text for text in said if f"training_step changes its batch (batch{where})" in text], said


@pytest.mark.parametrize("name", EQUAL)
def test_other_state_gives_the_values_of_one_device_and_no_warning_of_the_batch(name):
    one, _ = fit(EQUAL[name](), "auto")
    found, said = fit(EQUAL[name](), piper.PiperStrategy())
    assert far(found, one) == 0.0
    assert not any("changes its batch" in text for text in said)
    if name != "no change":  # the state matters
        assert far(one, fit(EQUAL["no change"](), "auto")[0]) > 1e-3


def test_a_change_of_memory_that_tensors_of_the_batch_share_is_refused():
    with pytest.raises(
        piper.PiperError, match=r"writes into batch\['x'\], which shares memory with batch\['view'\]"
    ):
        fit(shared(), piper.PiperStrategy())


def test_views_that_share_no_element_may_be_written():
    one, _ = fit(apart(), "auto")
    found, _ = fit(apart(), piper.PiperStrategy())
    assert far(found, one) == 0.0
    assert far(one, fit(shared(), "auto")[0]) > 1e-3  # the write matters


def test_stages_name_a_read_of_the_number_of_processes(tmp_path):
    found, _ = launch_trainings(2, train_in_stages, tmp_path / "run", tmp_path)  # rank 0 warns
    for name in SIZES:
        (said,) = [text for text in found[name] if "It counts 2 processes" in text]
        assert f"training_step reads {'self.' if name.startswith('trainer') else ''}{name}." in said
    assert found["nothing"] == []
