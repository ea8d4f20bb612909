"""Which optimizers can update parts of parameters, and what their state consists of."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn, optim

import lightning_piper as piper
from lightning_piper.degrees import requested_degrees
from lightning_piper.holdings.elementwise import (
    NotElementwise,
    Untried,
    goes_in_parts,
    remade,
    sees_others,
    state_keys,
)
from lightning_piper.holdings.optimizer import _refusal
from lightning_piper.holdings.optimizer_trial import reduced
from tests.models import MLP
from tests.strategy import optimizers as own

CPU = torch.device("cpu")
SHAPES = ((6, 4, 3, 3), (200, 150), (5, 3), (7,), (), (1,))


def lookahead(params):
    return own.Lookahead(optim.AdamW(params))


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
    "Lion": (own.Lion, {}),
    "Adan": (own.Adan, {}),
    "Lookahead": (lookahead, {}),
    "own setting": (own.Optional, {}),
    "an argument": (own.Argued, {"schedule": None}),
    "a mark that no parameter has": (own.Chosen, {}),
}
NORMED = {
    "Lamb": own.Lamb,
    "Lars": own.Lars,
    "gradients centralised": own.Centralised,
    "projected": own.Projected,
    "state in blocks": own.InBlocks,
    "long steps cut": own.Bounded,
    "short steps lifted": own.Lifted,
    "after the tenth step": own.WarmedUp,
    "after the steps of a setting": own.WarmedUpFor,
    "nothing without a gradient": own.Skipping,
    "large matrices factored": own.Factored,
}
BAD = {
    **{
        name: (kind, {}, "got (other values|another state '.*') than the whole parameter")
        for name, kind in NORMED.items()
    },
    "Adafactor": (
        optim.Adafactor,
        {},
        "on a parameter of shape .*, two shards that were updated alone got .* than the whole parameter",
    ),
    "all together": (own.Distant, {}, "got other values"),
}
TOGETHER = {"clipped": own.Clipping, "by the distance": own.Distant, "matrices clipped": own.OfMatrices}


def made(kind, options, shapes=SHAPES):
    return kind([nn.Parameter(torch.zeros(shape)) for shape in shapes], **options)


def chosen(optimizer):
    return [group["params"] for group in optimizer.param_groups]


def keys_of(optimizer):
    return state_keys(optimizer, chosen(optimizer), CPU)


@pytest.mark.parametrize("name", GOOD)
def test_element_by_element(name):
    optimizer = made(*GOOD[name])
    before = torch.random.get_rng_state()
    keys = keys_of(optimizer)
    assert torch.equal(before, torch.random.get_rng_state())
    assert "step" not in keys.cut
    if name.startswith("Adam") and name != "Adamax":
        assert keys.cut == {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if name == "Adam" else set())
        assert keys.once == {"step"}
    assert not optimizer.state or name == "Adagrad"  # left as it is
    assert not any(p.any() for p in chosen(optimizer)[0])


@pytest.mark.parametrize("name", BAD)
def test_whole_parameters(name):
    kind, options, words = BAD[name]
    with pytest.raises(NotElementwise, match=words):
        keys_of(made(kind, options))


def test_a_trial_does_not_reach_settings_above_its_limit():
    """Negative control: docs/limits.md says so."""
    keys_of(made(own.WarmedUpFor, {"warmup_steps": 101}))


@pytest.mark.parametrize("kind, shape", [(own.FactoredFrom, (300, 260)), (own.NormedFrom, (200_000,))])
def test_large_parameters_are_tried_at_the_size_that_decides(kind, shape):
    with pytest.raises(NotElementwise, match="got other values"):
        keys_of(made(kind, {}, shapes=(shape, (5, 3))))


@pytest.mark.parametrize(
    "kind, shape",
    [(own.FactoredFrom, (300, 250)), (own.NormedFrom, (49_999,)), (own.InPieces, (300, 260))],
)
def test_large_parameters_below_that_size_count_by_element(kind, shape):
    """Negative control, and an optimizer with other operations for large parameters that give the same result."""
    keys_of(made(kind, {}, shapes=(shape, (5, 3))))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="newer torch")
def test_matrices():
    muon = made(optim.Muon, {}, shapes=((5, 3),))
    with pytest.raises(Untried, match=r"on shards with .*2D"):
        keys_of(muon)
    assert not sees_others(muon, chosen(muon), CPU)


@pytest.mark.parametrize(
    "kind, shape",
    [
        (own.Centralised, (5, 3)),
        (own.Projected, (70,)),
        (own.InBlocks, (80, 50)),
        (own.Factored, (300, 90)),
        (own.Lars, (7,)),
    ],
)
def test_the_shapes_of_the_parameters_decide(kind, shape):
    """Negative control: what such an optimizer does not look at, it treats element by element."""
    keys_of(made(kind, {}, shapes=(shape,)))


def test_marks_decide():
    optimizer = made(own.Chosen, {}, shapes=((5, 3), (5, 3)))
    chosen(optimizer)[0][1].normalized = True
    with pytest.raises(NotElementwise, match="got other values") as caught:
        keys_of(optimizer)
    assert caught.value.param is chosen(optimizer)[0][1]


def test_groups_are_tried_with_their_options():
    matrix, vector = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7))
    optimizer = optim.SGD([{"params": [matrix], "momentum": 0.9}, {"params": [vector]}], lr=0.1)
    assert "momentum_buffer" in state_keys(optimizer, [[matrix], []], CPU).cut
    assert "momentum_buffer" not in state_keys(optimizer, [[], [vector]], CPU).cut


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lookahead", "Adafactor", *NORMED])
def test_parameter_by_parameter(name):
    kind, options = {**GOOD, "Adafactor": (optim.Adafactor, {})}.get(name) or (NORMED[name], {})
    optimizer = made(kind, options)
    assert not sees_others(optimizer, chosen(optimizer), CPU)


@pytest.mark.parametrize("name", TOGETHER)
def test_all_parameters_together(name):
    optimizer = made(TOGETHER[name], {})
    assert (
        sees_others(optimizer, chosen(optimizer), CPU)
        == "updates a parameter differently if it has other parameters as well"
    )


def test_noise_is_drawn_for_one_parameter_after_another():
    optimizer = made(own.Noisy, {"lr": 0.1})
    assert sees_others(optimizer, chosen(optimizer), CPU).startswith("draws random numbers")


class Counting(optim.SGD):
    """An optimizer whose learning rate falls with the number of steps that its parameter groups have counted."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return loss


@pytest.mark.parametrize(
    "kind, parts",
    [
        *(
            (own.Lion, True),
            (optim.AdamW, True),
            (partial(optim.SGD, momentum=0.9), True),
            (own.Lamb, True),
            (optim.Muon, True),
        ),
        *((own.Clipping, False), (Counting, False), (own.Lookahead, False), (optim.LBFGS, False)),
    ],
)
def test_part_by_part(kind, parts):
    optimizer = made(lookahead if kind is own.Lookahead else kind, {}, shapes=((5, 3), (6, 4)))
    assert goes_in_parts(optimizer, chosen(optimizer), CPU) == parts


@pytest.mark.parametrize("kind, options, words", [
    (own.Unmade, {"schedule": None}, "cannot pickle 'generator' object"),
    (optim.SparseAdam, {}, "SparseAdam does not support dense gradients"),
    (optim.LBFGS, {}, "runs the closure more than once"),
])  # fmt: skip
def test_what_cannot_be_tried_is_not_taken_for_good(kind, options, words):
    optimizer = made(kind, options)
    for tried in (keys_of, lambda x: sees_others(x, chosen(x), CPU)):
        with pytest.raises(Untried, match=words) as caught:
            tried(optimizer)
        assert "Correct the cause, or use" in caught.value.unchecked


def test_settings_beside_the_defaults_count():
    optimizer = made(own.Optional, {})
    optimizer.normalized = True
    with pytest.raises(NotElementwise, match="got other values"):
        keys_of(optimizer)


def test_a_schedule_that_begins_with_zero_hides_nothing():
    """Nor does it make the copy of an optimizer step the original."""
    for kind, options, words in ((own.Lamb, {}, "got other values"), (own.Argued, {"schedule": None}, None)):
        optimizer = made(kind, options)
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
        assert optimizer.param_groups[0]["lr"] == 0.0
        if words is None:
            keys_of(optimizer)
        else:
            with pytest.raises(NotElementwise, match=words):
                keys_of(optimizer)
        assert not optimizer.state


def test_a_copy_has_what_the_constructor_makes():
    optimizer = made(optim.Adagrad, {"initial_accumulator_value": 0.3})
    piece = nn.Parameter(torch.zeros(5))
    copy = remade(
        optimizer,
        [{**{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}, "params": [piece]}],
    )
    assert torch.equal(copy.state[piece]["sum"], torch.full((5,), 0.3))


class Still(optim.SGD):
    """Changes nothing."""

    def step(self, closure=None):
        return None if closure is None else closure()


@pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
def test_numbers_alone_are_tried(shape):
    """No gradient is at right angles to a number, except zero and rounding, which move nothing."""
    params = [nn.Parameter(torch.ones(shape, dtype=torch.float64))]
    state_keys(optim.SGD(params, lr=1e-3), [params], CPU)
    with pytest.raises(Untried, match="its steps changed none of the parameters"):
        state_keys(Still(params), [params], CPU)


def test_scalars_of_parameters_without_dimensions():
    """The sum of one number has the shape of a count of steps."""
    keys = keys_of(made(optim.AdamW, {}))
    assert keys.is_cut("exp_avg", torch.tensor(1.0), ()) and not keys.is_cut("step", torch.tensor(1.0), ())
    assert keys.is_cut("exp_avg", torch.ones(1), (1,)) and not keys.is_cut("step", torch.tensor(1.0), (1,))


@pytest.mark.parametrize("shape, small", [
    ((50257, 768), (128, 128)), ((64, 64, 3, 3), (64, 32, 2, 2)), ((512, 256, 7, 7), (128, 128, 2, 2)),
    ((8, 1000, 4000), (2, 128, 128)),
    ((100_000,), (8192,)), ((5000,), (5000,)), ((1, 7), (1, 7)), ((), ()),
])  # fmt: skip
def test_reduced_shapes(shape, small):
    assert reduced(shape) == small


@pytest.mark.parametrize(
    "made_by_degrees, said, unsaid",
    [
        (True, r"^PiperStrategy\(dp=2, zero=1\): Lamb .*But this program leaves every process only a shard", "directive"),
        (False, r"^PiperStrategy: Lamb .*But directive 1 \(replicate\) leaves every process only a shard", "zero"),
    ],
)  # fmt: skip
def test_the_message_names_what_the_user_has_written(made_by_degrees, said, unsaid):
    degrees = requested_degrees("zero1", dp=2)
    program = (degrees.program() if made_by_degrees else degrees.directives()).directives
    compiled = piper.compile(MLP(), (torch.ones(4, 4), torch.ones(4, 2)), program)
    name = next(iter(compiled.step.params))
    text = _refusal("Lamb", NotElementwise("its norm"), name, compiled)
    assert re.search(said, text) and unsaid not in text.replace("zero=1", "")
