"""Placeholders for values of other processes: they refuse computations in which torch would use a wrong
value.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_piper.errors import PiperError
from lightning_piper.holdings.copies import averages_each_element
from lightning_piper.holdings.gradient_injection import GradientInjection
from lightning_piper.holdings.placeholders import Placeholder, _writes, check_values, stand_in


def elsewhere(sharded: bool = False) -> torch.Tensor:
    return stand_in(nn.Parameter(torch.ones(3, device="meta")), "weight", sharded, torch.device("cpu"))


READS = {
    "added": lambda x, p: x.add_(p, alpha=0.1),
    "added by keyword": lambda x, p: x.add_(other=p, alpha=0.1),
    "in lists by keyword": lambda x, p: torch._foreach_add_([x, x], other=[x, p.data]),
    "in lists, all by keyword": lambda x, p: torch._foreach_add_(other=[p.data], self=[x]),
    "copied by keyword": lambda x, p: torch.clone(input=p),
    "what was made of it": lambda x, p: x.add_(p.detach() * 2),
    "its data": lambda x, p: x.sub_(p.data),
    "by an operator": lambda x, p: x.__iadd__(p),
    "in lists": lambda x, p: torch._foreach_add_([x, x], [x, p.data]),
    "copied": lambda x, p: x.copy_(p),
    "into a new tensor": lambda x, p: x + p,
    "interpolated": lambda x, p: x.lerp_(p, 0.1),
    "at places": lambda x, p: x.__setitem__(slice(1), p.detach()[:1]),
    "together": lambda x, p: torch.cat([x, p]),
    "as a number": lambda x, p: p.detach().norm().item(),
    "as an array": lambda x, p: p.detach().numpy(),
    "compared": lambda x, p: torch.equal(p, p),
    "copied with what has it": lambda x, p: copy.deepcopy([p]),
    "copied by itself": lambda x, p: copy.copy(p),
    "kept": lambda x, p: {"weight": p.data.clone()},
    "as a type": lambda x, p: x.type_as(p),
    "as a place": lambda x, p: x.to(p.detach()),
    "in a file": lambda x, p: torch.save({"weight": p.detach()}, io.BytesIO()),
    "in a file of all": lambda x, p: torch.save(p, io.BytesIO()),
    "pickled": lambda x, p: pickle.dumps(p.data),
    "in a checkpoint": lambda x, p: check_values({"state": [x, (p.detach(),)]}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_is_refused(read):
    with torch.no_grad(), pytest.raises(PiperError, match="'weight' cannot be read or copied here"):
        read(torch.ones(3), elsewhere())


@pytest.mark.parametrize(
    "read, operation, advice",
    [
        (lambda x, p: nn.functional.linear(x, p.detach()), "linear", "inside of `with piper.whole_module"),
        (lambda x, p: p.clone(), "clone", "EMAWeightAveraging"),
        (lambda x, p: x.add_(p), "", "EMAWeightAveraging"),
        (lambda x, p: torch.save(p, io.BytesIO()), "", "inside of `with piper.whole_module"),
        (lambda x, p: check_values({"mine": p}), "", "has put this tensor into the checkpoint"),
        (lambda x, p: x.to(p), "to", "Pass parameter.device and parameter.dtype"),
        (lambda x, p: (captured_loss() + p.sum()).backward(), "backward", "the loss in training_step"),
    ],
    ids=["linear", "clone", "average", "save", "checkpoint", "move", "penalty"],
)
def test_the_error_names_the_line_and_what_to_do_instead(read, operation, advice):
    with pytest.raises(PiperError) as caught:
        read(torch.ones(3), elsewhere())
    told = str(caught.value)
    assert f"PiperStrategy: {operation + ' at ' if operation else ''}{__file__}:" in told and advice in told
    assert "training_step" not in told or "training_step" in advice


def captured_loss() -> torch.Tensor:
    weight = torch.ones(3, requires_grad=True)
    injection = GradientInjection({"a": weight}, torch.device("cpu"))
    return injection.loss(torch.tensor(1.0), {"a": torch.ones(3)})


def test_torch_would_leave_it_out():
    x = torch.ones(3)
    assert torch.equal(x.add_(torch.ones(3, device="meta")), torch.ones(3))


@torch.no_grad()
def test_writing_and_looking_at_its_shape_are_not():
    p, x = elsewhere(), torch.ones(3)
    for _ in (p.copy_(x), p.mul_(x), p.lerp_(x, 0.1), p.data.add_(x)):
        assert isinstance(_, Placeholder) and p.is_meta
    assert p.shape == x.shape and torch.equal(x.view_as(p), x) and isinstance(p, nn.Parameter)
    buffer = stand_in(torch.ones(2, device="meta"), "buffer", False, torch.device("cpu"))
    assert type(buffer) is Placeholder and not isinstance(buffer, nn.Parameter)


@torch.no_grad()
def test_replacing_its_values_is_left_to_the_process_that_has_them():
    p, shard = elsewhere(), elsewhere(sharded=True)
    p.data = torch.ones(3)
    p.data = p.data * 2
    assert p.is_meta
    with pytest.raises(PiperError, match="'weight' are sharded over the processes, and cannot be replaced"):
        shard.data = torch.ones(3)


def test_what_is_made_beside_it_is_of_this_process():
    p = elsewhere()
    for device in (p.device, p.data.device, (p.detach() * 2).device):
        average = torch.ones(3).to(device) + torch.zeros(p.shape, device=device)
        assert type(average) is torch.Tensor and torch.equal(average, torch.ones(3))
    assert torch.ones(3).to(torch.zeros_like(torch.ones(3, device="meta")).device).is_meta, (
        "as torch would do it"
    )


@torch.no_grad()
def test_writes_into_what_is_sharded_are_counted():
    for write in (lambda p: p.lerp_(torch.ones(3), 0.1), lambda p: p.data.mul_(2), lambda p: p.zero_()):
        p = elsewhere(sharded=True)
        before = p._version
        write(p)
        assert p._version > before


@torch.no_grad()
@pytest.mark.parametrize("dtype, read", [(torch.bool, lambda p: ~p), (torch.int64, lambda p: [4, 5][p])])
def test_an_operator_that_writes_nothing_is_no_write(dtype, read):
    """The names of `__invert__` and `__index__` begin like those of augmented assignments."""
    p = stand_in(torch.ones((), dtype=dtype, device="meta"), "weight", False, torch.device("cpu"))
    before = p._version
    with pytest.raises(PiperError, match="'weight'") if dtype == torch.int64 else contextlib.nullcontext():
        assert isinstance(read(p), Placeholder)
    assert p._version == before
    p |= p
    assert p._version > before


def test_every_augmented_assignment_of_a_tensor_is_a_write():
    operators = {name for name in dir(torch.Tensor) if name.startswith("__i") and name.endswith("__")}
    others = {"__init__", "__init_subclass__", "__int__", "__index__", "__invert__", "__iter__"}
    assert operators - others == {name for name in operators if _writes(name)}


def averaging(**functions):
    def update(average, current):
        made = AveragedModel(average, **functions)
        made.module = average
        made.n_averaged += 2
        made.update_parameters(current)

    return update


@pytest.mark.parametrize("functions, good", [
    ({}, True),
    ({"avg_fn": get_ema_avg_fn(0.9)}, True),
    ({"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, True),
    ({"avg_fn": lambda a, p, n: p / p.norm()}, False),
    ({"avg_fn": lambda a, p, n: torch.where(p.norm() > a.norm(), p, a)}, False),
    ({"avg_fn": lambda a, p, n: a.lerp(p, 0.1) if p.ndim > 1 else p}, False),
    ({"multi_avg_fn": lambda a, p, n: torch._foreach_mul_(a, sum(x.sum() for x in p))}, False),
])  # fmt: skip
def test_what_averages_each_element_is_told(functions, good):
    assert averages_each_element(averaging(**functions)) == good
