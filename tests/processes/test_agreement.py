"""What must be the same in all processes, and what all of them raise when one fails. Runs without other
processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_piper.errors import PiperError
from lightning_piper.processes.agreement import _checksum
from lightning_piper.processes.settings import Watched, always_alike, check_alike, settings_of
from lightning_piper.processes.world import World, together


class Second(World):
    """The world of rank 1 of two; rank 0 contributes `said`."""

    def __init__(self, said: Any) -> None:
        super().__init__(1, 2, torch.device("cpu"))
        self.said = said

    def gather(self, value: Any) -> list[Any]:
        return [self.said, value]


def test_all_raise_what_one_has_met():
    assert together(Second((3, None)), "saving a.ckpt", lambda: 4) == [3, 4]
    with pytest.raises(PiperError, match="disk full") as error:
        together(Second((None, (PiperError, "disk full"))), "saving a.ckpt", lambda: 4)
    assert error.value.rank == 0
    with pytest.raises(PiperError, match=r"saving a\.ckpt failed on rank 1: KeyError: 'b'") as error:
        together(Second((3, None)), "saving a.ckpt", lambda: {}["b"])
    assert error.value.rank == 1 and isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "other, says",
    [
        (
            lambda p: (torch.optim.Adam(p, 0.1), 1.0),
            "class of the optimizer is torch.optim.sgd.SGD on rank 0, and .*Adam on rank 1",
        ),
        (
            lambda p: (torch.optim.SGD([{"params": p, "lr": 0.2}], 0.1), 1.0),
            "'lr' of the optimizer's parameter group 0 is 0.1 on",
        ),
        (
            lambda p: (torch.optim.SGD(p, 0.1), 0.5),
            "factor with which backward multiplied the last loss is 1.0 on rank 0, and 0.5 on",
        ),
    ],
    ids=["class", "group", "factor"],
)
def test_processes_that_train_in_other_ways(other, says):
    params = list(nn.Linear(2, 2).parameters())
    one = settings_of(torch.optim.SGD(params, 0.1), 1.0)
    check_alike([one, settings_of(torch.optim.SGD(params, 0.1), 1.0)])
    with pytest.raises(PiperError, match=says):
        check_alike([one, settings_of(*other(params))])


def test_settings_are_computed_again_only_when_an_option_has_changed():
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), 0.1)
    watched, (group,) = Watched(optimizer), optimizer.param_groups

    def current(factor: float = 1.0) -> bool:
        return watched(factor) == settings_of(optimizer, factor)

    first = watched(1.0)
    assert watched(1.0) is first and current()
    for key, value in [
        ("lr", 0.2),
        ("lr", 1),
        ("lr", 1.0),
        ("betas", (0.9, 0.5)),
        ("amsgrad", True),
        ("new", [1, 2]),
    ]:
        group[key] = value
        assert watched(1.0) is not first and current(), key
        first = watched(1.0)
    group["new"].append(3)  # the same list with another content
    assert watched(1.0) is not first and current()
    assert current(0.5) and current(1.0)


def test_replicas_that_update_their_own_parameters_may_have_options_of_their_own():
    params = list(nn.Linear(2, 2).parameters())
    one = settings_of(torch.optim.SGD(params, 0.1), 1.0)
    other = settings_of(torch.optim.SGD(params, 0.2), 1.0)
    assert (
        check_alike([one, other], apart=True)
        == "the optimizer's default 'lr' is 0.1 on rank 0, and 0.2 on rank 1"
    )
    assert check_alike([one, one], apart=True) is None and always_alike(one) == always_alike(other)
    for bad in (
        settings_of(torch.optim.SGD(params, 0.2), 0.5),
        settings_of(torch.optim.Adam(params, 0.1), 1.0),
    ):
        assert always_alike(one) != always_alike(bad)
        with pytest.raises(PiperError, match=r"(factor|class) .* on rank 0, and .* on rank 1"):
            check_alike([one, bad], apart=True)


def test_replicas_count_once():
    world = World(2, 4, torch.device("cpu"), replicas=(0, 1, 0, 1))
    assert (world.count, world.replica, world.first_ranks) == (2, 0, (0, 1))
    assert (World(2, 4, torch.device("cpu")).count, World(2, 4, torch.device("cpu")).first_ranks) == (1, (0,))


def test_one_process_warns():
    with pytest.warns(UserWarning, match="once"):
        World(0, 2, torch.device("cpu")).warn("once")
    World(1, 2, torch.device("cpu")).warn("never")  # pytest makes an error of it


@pytest.mark.parametrize("make", [
    lambda x: torch.from_numpy(x.numpy()[:0]),
    lambda x: x[:1].expand(1, 1)[0],
    lambda x: x[0].expand(1),
    lambda x: torch.complex(x, x).conj(),
    lambda x: torch._neg_view(x),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.reshape(2, 3).t(),
], ids=["empty", "one", "expanded", "conjugated", "negated", "bfloat16", "transposed"])  # fmt: skip
def test_any_tensor_of_a_batch_has_a_checksum(make):
    x = torch.arange(6.0)
    assert _checksum([make(x)], 0) == _checksum([make(x).clone()], 0)
    if make(x).numel():
        assert _checksum([make(x)], 0) != _checksum([make(x + 1)], 0)
