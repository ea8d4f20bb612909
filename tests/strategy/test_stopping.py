"""A gradient that is NaN or infinite ends a training before the update, with the first operation that made
it. What trains under DDP still trains."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_piper as piper
from tests.distributed.processes import launch
from tests.strategy import stopping
from tests.strategy.fitting import local
from tests.strategy.stopping import PROGRAMS, Cleaning, Ignored, InBackward, Kept, Manual, Net, Watching, fit

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Piper could not capture training_step", "the loss or a gradient mixes", "the batch norm of")
]

LINE = r"\S+stopping\.py:\d+ \("
FORWARD = rf"aten\.log in F\[PP=0(,MB=2)?\] \({LINE}h = torch\.log"
BACKWARD = rf"aten\.mul\.Tensor in B\[PP=0(,MB=2)?\] \({LINE}h = torch\.sqrt.*from the infinity of aten\.div"
STRATEGIES = {
    "stages": lambda **options: local(**options),
    "one": lambda **options: piper.PiperStrategy(**options),
    "uncaptured": lambda **options: piper.PiperStrategy(capture="never", **options),
    "compiled": lambda **options: local(compile=True, **options),
    "simulated": lambda **options: piper.PiperStrategy(PROGRAMS["stages"], transport="simulated", **options),
}


@pytest.fixture(autouse=True)
def without_process_group():
    """End the process group that a fit in this process leaves."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def stopped(strategy, module, **options):
    """The error of a fit, after a check that the parameters are those of before the update."""
    kept, trainers = Kept(), []
    module.on_train_start = lambda: trainers.append(module.trainer)
    with pytest.raises(piper.ExecutionError) as raised:
        fit(strategy, module, callbacks=[kept], **options)
    assert kept.stayed(trainers[0])
    return str(raised.value), kept


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_nan_in_the_loss_stops_before_the_update(kind):
    error, kept = stopped(STRATEGIES[kind](), Net())
    assert "in step 2." in error and error.endswith("[PIPER-X006]")
    if kind == "uncaptured":
        assert re.search(rf"first cause: aten\.log \({LINE}h = torch", error), error
    else:
        assert re.search(f"first cause: {FORWARD}", error), error
        assert kept.buffers_stayed()  # the batch would have poisoned them


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_nan_in_a_gradient_alone_stops_before_the_update(kind):
    error, _ = stopped(STRATEGIES[kind](), InBackward())
    assert re.search("in the backward pass makes a NaN" if kind == "uncaptured" else BACKWARD, error), error


@pytest.mark.parametrize("kind", STRATEGIES)
def test_without_the_check_the_training_goes_on_as_under_ddp(kind):
    module = Net()
    assert fit(STRATEGIES[kind](stop_on_nan=False), module).global_step == 4
    assert module.second.weight.isnan().all()


@pytest.mark.parametrize("kind", ["stages", "one", "uncaptured"])
@pytest.mark.parametrize("module", [Watching, Cleaning, Ignored])
def test_code_that_handles_a_nan_itself_trains(kind, module):
    if kind == "stages" and module is Watching:
        pytest.skip("a branch on the loss is not captured")
    trained = module()
    plain = copy.deepcopy(trained)
    fit(STRATEGIES[kind](), trained)
    fit("auto", plain)
    for (name, x), y in zip(trained.named_parameters(), plain.parameters(), strict=True):
        assert x.isfinite().all(), name
        # With several microbatches, the batch norms and the mean over labels differ.
        assert kind == "stages" or torch.allclose(x, y, atol=1e-5), name


@pytest.mark.parametrize(
    ("strategy", "module", "options"),
    [
        ("stages", InBackward, {"gradient_clip_val": 0.5}),
        ("stages", InBackward, {"accumulate_grad_batches": 3}),
        ("one", Manual, {}),
    ],
)
def test_clipping_accumulation_and_manual_optimization(strategy, module, options):
    found = module()
    steps = "0" if "accumulate_grad_batches" in options else "2"
    with pytest.raises(piper.ExecutionError, match=rf"in step {steps}\. .*PIPER-X006"):
        fit(STRATEGIES[strategy](), found, **options)
    assert all(x.isfinite().all() for x in found.parameters())


def test_a_nan_in_the_batch_or_in_a_parameter_is_named():
    class Poisoned(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                batch[0][4, 3] = math.nan

    class Broken(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.second.weight.data[0, 2] = math.nan

    with pytest.raises(
        piper.ExecutionError, match=r"first cause: tensor 0 of the batch has a NaN at \[4, 3\]"
    ):
        fit(STRATEGIES["one"](), Poisoned())
    with pytest.raises(piper.ExecutionError, match=r"first cause: 'second\.weight' has a NaN at \[0, 2\]"):
        fit(STRATEGIES["one"](), Broken())


def test_infinite_masks_are_no_cause():
    class Masked(Net):
        def training_step(self, batch, batch_idx):
            x, switch, y = batch
            h = self.second(self.first(x).masked_fill(x[:, :6] > 1.0, -math.inf).softmax(1))
            return (torch.exp(h - 1000 * switch.clamp(max=0)) - y).square().mean()

    with pytest.raises(piper.ExecutionError, match=r"from the infinity of aten\.exp in F"):
        fit(STRATEGIES["one"](), Masked())


def test_a_loss_scale_skips_such_an_update_itself():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module = InBackward()
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    assert fit(STRATEGIES["one"](), module, plugins=[plugin]).global_step == 4
    assert scaler.get_scale() < 4.0 and all(x.isfinite().all() for x in module.parameters())


@pytest.mark.parametrize(
    ("program", "kind", "options"),
    [
        ("stages", "forward", {}),
        ("stages", "backward", {}),
        ("stages", "backward", {"gradient_clip_val": 0.5}),
        ("replicas", "forward", {}),
        ("zero2", "backward", {}),
    ],
)
def test_all_processes_stop_with_the_same_cause(program, kind, options, tmp_path):
    ended = launch(2, stopping.train, tmp_path, program, kind, "auto", options, joined=False)
    assert all(end["stayed"] for end in ended), ended
    said = [str(end["error"]) for end in ended]
    assert said[0] == said[1] and re.search(FORWARD if kind == "forward" else BACKWARD, said[0]), said


def test_processes_that_run_uncaptured_stop_together(tmp_path):
    ended = launch(2, stopping.train, tmp_path, "replicas", "forward", "never", joined=False)
    assert all("first cause: aten.log (" in str(end["error"]) for end in ended), ended
