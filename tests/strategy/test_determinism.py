"""`verify="determinism"` finds a step whose runs give different bits, and names the first operation."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist

import lightning_piper as piper
from tests.distributed.processes import launch
from tests.strategy import flaky
from tests.strategy.fitting import local
from tests.strategy.flaky import PROGRAMS, Buffered, Hidden, Net, Stateful, fit

LINE = r"\(\S+flaky\.py:\d+ \(h = flaky"
pytestmark = pytest.mark.filterwarnings("ignore:Piper could not capture training_step")
STRATEGIES = {
    "stages": local,
    "uncaptured": lambda **options: piper.PiperStrategy(capture="never", **options),
    "compiled": lambda **options: local(compile=True, **options),
    "simulated": lambda **options: piper.PiperStrategy(PROGRAMS["stages"], transport="simulated", **options),
}
KINDS = [
    "stages",
    "uncaptured",
    *(pytest.param(x, marks=pytest.mark.long) for x in ("compiled", "simulated")),
]


@pytest.fixture(autouse=True)
def without_process_group():
    """End the process group that a fit in this process leaves."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def stopped(kind, module, step=2, **options):
    with pytest.raises(piper.ExecutionError) as raised:
        fit(STRATEGIES[kind](verify="determinism"), module, **options)
    error = str(raised.value)
    assert error.endswith("[PIPER-X007]") and f"two runs of step {step} gave different bits" in error
    return error


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_operation_with_different_bits_is_named(kind):
    error = stopped(kind, Net("forward"))
    where = rf"flaky {LINE}" if kind == "uncaptured" else rf"flaky in F\[PP=0(,MB=0)?\] {LINE}"
    assert re.search(rf"read the same values and returned different ones is piper_tests[:.]+{where}", error)
    assert ("If it draws random numbers, seed them" in error) == (kind == "uncaptured")


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_of_the_backward_pass_is_named(kind):
    error = stopped(kind, Net("backward"))
    assert "in the gradient of 'first.weight'" in error
    where = "in the backward pass" if kind == "uncaptured" else r"in B\[PP=0(,MB=\d)?\]"
    assert re.search(rf"different ones is piper_tests[:.]+flaky_backward {where}", error)


@pytest.mark.parametrize("kind", ["stages", "uncaptured"])
def test_a_buffer_whose_bits_differ_is_an_error(kind):
    assert "in buffer 'mean'" in stopped(kind, Buffered("forward"))


@pytest.mark.parametrize("module", [Net(), Hidden("forward")], ids=["equal", "unused"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits_train_as_without_the_check(kind, module):
    _, losses = fit(STRATEGIES[kind](verify="determinism"), module)
    _, plain = fit(STRATEGIES[kind](), type(module)(""))
    assert len(losses) == 4 and all(map(torch.equal, losses, plain))


@pytest.mark.parametrize("kind", ["stages", "uncaptured"])
def test_without_the_check_different_bits_train(kind):
    assert fit(STRATEGIES[kind](), Net("forward"))[0].global_step == 4


def test_batches_of_an_accumulation_are_compared():
    assert "flaky_backward" in stopped("stages", Net("backward"), step=1, accumulate_grad_batches=2)


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_processes_name_the_operation_of_one(tmp_path, program):
    found = launch(2, flaky.train, tmp_path, program, "backward")
    assert found[0] == found[1] and "flaky_backward" in found[0]
    assert f"on rank {0 if program == 'stages' else 1}. The optimizer" in found[0]


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_processes_with_equal_bits_train(tmp_path, program):
    assert launch(2, flaky.train, tmp_path, program, "") == [None, None]


def test_manual_optimization_is_refused():
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(piper.PiperError, match=r"manual optimization .* twice"):
        fit(piper.PiperStrategy(verify="determinism"), module)


@pytest.mark.parametrize("state", flaky.STATES)
def test_state_that_a_step_changes_is_not_a_difference(state):
    """An uncaptured step that draws and counts in Python trains as without the check, and logs once."""
    one, other = Stateful(state), Stateful(state)
    found, _ = fit(STRATEGIES["uncaptured"](verify="determinism"), one)
    drawn = one.drawn()
    plain, _ = fit(STRATEGIES["uncaptured"](), other)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    assert found.callback_metrics == plain.callback_metrics and found.callback_metrics["batches"] == 4
    assert one.count == other.count == 4 and len(one.outputs) == 4 and torch.equal(one.total, other.total)
    assert drawn == other.drawn()


class Unseeded(Net):
    """Draws other numbers in each run, which Trainer(deterministic=True) would not change."""

    def training_step(self, batch, batch_idx):
        draw = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
        return super().training_step(batch, batch_idx) * torch.rand((), generator=draw)


def test_an_operation_that_draws_other_numbers_is_named():
    error = stopped("uncaptured", Unseeded(), step=0)
    assert re.search(
        r"different ones is aten.rand.*If it draws random numbers, seed them\. Otherwise, replace", error
    )


def test_a_number_that_is_not_a_state_is_named():
    error = stopped("uncaptured", Stateful("time"), step=0)
    assert re.search(
        r"operation that read different values is aten.mul\.Tensor \(\S+flaky\.py:\d+ \(h = h", error
    )
    assert "Let no code of the step depend on the time or on unseeded random numbers [PIPER-X007]" in error


def test_a_logged_value_is_compared():
    error = stopped("uncaptured", Stateful("logged"), step=0)
    assert "different bits in the logged value 'noise'. " in error
