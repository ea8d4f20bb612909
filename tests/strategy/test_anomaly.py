"""Under `Trainer(detect_anomaly=True)`, a module without NaNs trains as on one device, and a NaN in a
backward pass ends all processes.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import lightning_piper as piper
from tests.distributed.processes import run_ranks
from tests.strategy.anomaly import Net, fit, train
from tests.strategy.fitting import PROGRAM, local

STRATEGIES = {
    "stages": lambda: local(),
    "compiled": lambda: local(compile=True),
    "simulated": lambda: piper.PiperStrategy(list(PROGRAM), transport="simulated"),
    "whole": lambda: local([piper.Place(filter={}, devices=[0])], capture="always"),
}
TOLERANCE = 1e-5  # for float32, because microbatches are summed in another order
NAMED = r"B\[PP=0(,MB=2)?\].* the gradient of first\.\w+ has a NaN.* begins at \S+anomaly\.py:\d+"

pytestmark = pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_healthy_module_trains_as_on_one_device(kind):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fit(STRATEGIES[kind]())
    wanted = fit("auto")
    assert found.global_step == wanted.global_step == 4
    for name, value in wanted.lightning_module.state_dict().items():
        torch.testing.assert_close(
            found.lightning_module.state_dict()[name], value, rtol=TOLERANCE, atol=TOLERANCE
        )
    assert not [each for each in told if "captured" in str(each.message)]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_nan_in_a_backward_pass_is_named(kind):
    with pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
        fit("auto", fails=True)
    with pytest.raises(piper.ExecutionError, match=NAMED):
        fit(STRATEGIES[kind](), fails=True)


def test_without_anomaly_mode_nobody_asks():
    torch.manual_seed(0)
    module = Net()
    fit(local(stop_on_nan=False), fails=True, module=module, detect_anomaly=False)
    assert module.first.weight.isnan().any()


@pytest.mark.parametrize("program", ["stages", "replicas", "auto"])
def test_all_processes_end_with_the_cause(program, tmp_path):
    """Of stages, one has the NaN, and the other one knows."""
    ended = run_ranks(2, train, tmp_path, program, joined=False)
    for end in ended:
        assert isinstance(end.result, piper.ExecutionError), end.said[-4000:]
        assert re.search(NAMED, str(end.result)), end.result
    if program == "stages":
        assert str(ended[1].result).startswith(
            "The first process to fail was rank 0: ExecutionError: device 0: "
        )


def test_a_step_that_runs_as_it_is(tmp_path):
    for end in run_ranks(2, train, tmp_path, "replicas", "never", joined=False):
        assert isinstance(end.result, RuntimeError) and "'MulBackward0' returned nan values" in str(
            end.result
        )
