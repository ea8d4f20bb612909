"""Every optimizer of torch, and optimizers as users write them, train, save and resume as under DDP and as on
one device.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import optim

import lightning_piper as piper
from tests.distributed.processes import launch_trainings
from tests.strategy.optimizer_table import OVER_PROCESSES, TABLE, differences, fit, train


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    return launch_trainings(2, train, folder, folder)


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_two_processes_have_the_bits_of_ddp(name, ranks):
    for found in ranks:
        assert differences(*found[name]) == []


@pytest.mark.filterwarnings("ignore:Piper could not capture")
@pytest.mark.parametrize("name", TABLE)
def test_one_device_has_the_bits_of_lightning(name, tmp_path):
    wanted = fit(TABLE[name], lambda: "auto", tmp_path / "plain")
    assert differences(wanted, fit(TABLE[name], piper.PiperStrategy, tmp_path / "piper")) == []


def test_all_optimizers_of_torch_are_in_the_table():
    found = {name for name, x in vars(optim).items() if isinstance(x, type)} - {"Optimizer"}
    assert "Adam" in found <= TABLE.keys()


def test_another_optimizer_differs(tmp_path):
    one, other = (fit(TABLE[name], lambda: "auto", tmp_path / name) for name in ("SGD", "SGD, groups"))
    found = differences(one, other)
    assert {text.split("/")[2].split(":")[0] for text in found} == {"state_dict", "optimizer_states"}


def test_a_form_of_its_own_is_not_saved_in_ranges(tmp_path):
    with pytest.raises(piper.PiperError, match=r"Lookahead.state_dict\(\) does not have 'state'"):
        fit(TABLE["Lookahead"], partial(piper.PiperStrategy, checkpoint="sharded"), tmp_path)
