"""Which optimizers can be given pieces of parameters, and what their state consists of."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from lightning_piper.strategy.elementwise import NotElementwise, remade, sees_others, state_keys
from tests.strategy.optimizers import Argued, Clipping, Lamb, Noisy, Optional

CPU = torch.device("cpu")
GOOD = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {"amsgrad": True}),
    "Adam foreach": (optim.Adam, {"foreach": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW fused": (optim.AdamW, {"fused": True}),
    "AdamW tensor lr": (optim.AdamW, {"lr": torch.tensor(0.0)}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.3}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adadelta": (optim.Adadelta, {}),
    "Rprop": (optim.Rprop, {}),
    "ASGD": (optim.ASGD, {}),
    "own setting": (Optional, {}),
}
BAD = {
    "LBFGS": (optim.LBFGS, {}, "closure"),
    "Adafactor": (optim.Adafactor, {}, "differs between a whole parameter and its pieces"),
    "SparseAdam": (optim.SparseAdam, {}, "fails with"),
    "Lamb": (Lamb, {}, "the parameter differs"),
    "Argued": (Argued, {"schedule": None}, "missing 1 required positional argument: 'schedule'"),
}
if hasattr(optim, "Muon"):
    BAD["Muon"] = (optim.Muon, {}, "Muon only supports 2D")


def made(kind, options):
    return kind([nn.Parameter(torch.zeros(3, 4))], **options)


def options_of(optimizer):
    return {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


@pytest.mark.parametrize("name", GOOD)
def test_element_by_element(name):
    optimizer = made(*GOOD[name])
    before = torch.random.get_rng_state()
    keys = state_keys(optimizer, options_of(optimizer), CPU)
    assert torch.equal(before, torch.random.get_rng_state())
    assert "step" not in keys.cut
    if name.startswith("Adam") and name != "Adamax":
        assert keys.cut == {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if name == "Adam" else set())
        assert keys.once == {"step"}
    assert not optimizer.state or name == "Adagrad"  # left as it is


@pytest.mark.parametrize("name", BAD)
def test_whole_parameters(name):
    kind, options, words = BAD[name]
    optimizer = made(kind, options)
    with pytest.raises(NotElementwise, match=words):
        state_keys(optimizer, options_of(optimizer), CPU)


ALONE = {**GOOD, "Adafactor": BAD["Adafactor"][:2], "Lamb": BAD["Lamb"][:2], "noisy": (Noisy, {"lr": 0.1})}
if "Muon" in BAD:
    ALONE["Muon"] = BAD["Muon"][:2]


@pytest.mark.parametrize("name", ALONE)
def test_parameter_by_parameter(name):
    optimizer = made(*ALONE[name])
    assert not sees_others(optimizer, options_of(optimizer), CPU)


def test_all_parameters_together():
    optimizer = made(Clipping, {})
    assert sees_others(optimizer, options_of(optimizer), CPU)


def test_settings_beside_the_defaults_count():
    optimizer = made(Optional, {})
    optimizer.normalised = True
    with pytest.raises(NotElementwise, match="the parameter differs"):
        state_keys(optimizer, options_of(optimizer), CPU)


def test_a_schedule_that_begins_with_zero_hides_nothing():
    optimizer = made(Lamb, {})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    with pytest.raises(NotElementwise, match="the parameter differs"):
        state_keys(optimizer, options_of(optimizer), CPU)


def test_a_copy_has_what_the_constructor_makes():
    optimizer = made(optim.Adagrad, {"initial_accumulator_value": 0.3})
    piece = nn.Parameter(torch.zeros(5))
    copy = remade(optimizer, [{**options_of(optimizer), "params": [piece]}])
    assert torch.equal(copy.state[piece]["sum"], torch.full((5,), 0.3))


def test_scalars_of_parameters_without_dimensions():
    """The sum of one number has the shape of a count of steps."""
    optimizer = made(optim.AdamW, {})
    keys = state_keys(optimizer, options_of(optimizer), CPU)
    assert keys.is_cut("exp_avg", torch.tensor(1.0), ()) and not keys.is_cut("step", torch.tensor(1.0), ())
    assert keys.is_cut("exp_avg", torch.ones(1), (1,)) and not keys.is_cut("step", torch.tensor(1.0), (1,))
