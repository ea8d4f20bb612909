"""A module and its optimizer through a sharded checkpoint, saved in one layout and loaded into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.checkpoint.sharded_checkpoint import open_checkpoint, save
from lightning_piper.checkpoint.state import (
    HeldTensors,
    Loading,
    module_state,
    optimizer_state,
    reference,
    referenced,
    resolved,
    tensor_ranges_of,
)
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import Known
from lightning_piper.holdings.optimizer import ShardedOptimizer, parameter_names_in
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World
from tests.strategy.fitting import same, values
from tests.strategy.models import make
from tests.strategy.scenarios import equal
from tests.strategy.sharded import dp2

CHANGES: dict[str, Callable[[nn.Parameter, dict[str, Any]], object]] = {
    "other memory": lambda p, state: setattr(p, "data", p.data.clone()),
    "a new state": lambda p, state: state.update(exp_avg=state["exp_avg"].clone()),
    "exchanged states": lambda p, state: state.update(
        exp_avg=state["exp_avg_sq"], exp_avg_sq=state["exp_avg"]
    ),
    "no entry": lambda p, state: state.clear(),
}
ALONE = World(0, 1, torch.device("cpu"))


class Held:
    """A module and its optimizer, as one process holds them under a program after `steps` steps with random
    gradients.
    """

    def __init__(self, program: Any, seed: int, steps: int) -> None:
        self.module, loader = make("mlp")
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        self.compiled = piper.compile(self.module, next(iter(loader)), program)
        optimizer = self.module.configure_optimizers()["optimizer"]
        names = parameter_names_in(optimizer, self.module)
        self.own = Ownership(self.module, self.compiled, ALONE)
        self.own.distribute(0, Known())
        self.optimizer = ShardedOptimizer(optimizer, names, self.own, self.compiled, ALONE)
        for _ in range(steps):
            for p in self.module.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    def save(self, path: Any) -> None:
        state = module_state(self.module, self.compiled.step.canonical)
        content = {"state_dict": state, "optimizer_states": [optimizer_state(self.optimizer)]}
        save(
            path,
            tensor_ranges_of(self.module, self.own, self.optimizer, referenced(content), running=True),
            content,
            ALONE,
        )


def test_from_one_layout_into_another(tmp_path):
    one, other = Held(dp2(3), seed=1, steps=2), Held(piper.schedules.gpipe(2, 2), seed=2, steps=1)
    one.save(tmp_path / "a.ckpt")
    assert not same(values(one.module), values(other.module))
    loading = Loading(open_checkpoint(str(tmp_path / "a.ckpt"), ALONE), ALONE)
    loading.module(other.module, loading.content["state_dict"], True, None)
    assert same(values(one.module), values(other.module))
    assert not equal(one.optimizer.full_state(), other.optimizer.full_state())
    loading.optimizer(loading.content["optimizer_states"][0], other.optimizer, other.own.tensor_map)
    assert equal(one.optimizer.full_state(), other.optimizer.full_state())


def test_another_module_is_refused(tmp_path):
    Held(dp2(3), seed=1, steps=0).save(tmp_path / "a.ckpt")
    loading = Loading(open_checkpoint(str(tmp_path / "a.ckpt"), ALONE), ALONE)
    with pytest.raises(
        PiperError,
        match=r"different module than this Linear: the checkpoint does not have \['weight', 'bias'\], and the module does not have",
    ):
        loading.module(nn.Linear(2, 2), loading.content["state_dict"], True, None)


def test_references_stand_for_tensors_wherever_they_are():
    content = {
        "a": reference("x"),
        "b": [1, {"c": reference("y")}],
        "d": {"lightning_piper.tensor": "x", "more": 1},
    }
    assert referenced(content) == {"x", "y"}
    found = resolved(content, {"x": torch.ones(2), "y": torch.zeros(1)})
    assert torch.equal(found["a"], torch.ones(2)) and torch.equal(found["b"][1]["c"], torch.zeros(1))
    assert found["d"] == {"lightning_piper.tensor": "x", "more": 1}, "a dict with more in it is the user's"


def held() -> tuple[HeldTensors, nn.Parameter, dict[str, Any]]:
    """Return the tensors of a process that has two replicas, a parameter, and the optimizer's state of it."""
    one = Held(dp2(3), seed=1, steps=1)
    p = next(iter(one.own.owned_params.values()))
    return HeldTensors(0, one.own, one.optimizer), p, one.optimizer.optimizer.state[p]


def contents(tensors: HeldTensors) -> dict[str, list[float]]:
    tensors.look()
    return {x.key: x.tensor.tolist() for x in tensors.ranges}


def test_ranges_follow_changed_values_without_being_made_again():
    tensors, p, state = held()
    state["own"] = 1000
    before, ranges, memory = contents(tensors), tensors.ranges, tensors.steady_memory
    p.data.add_(1.0)
    state["own"] += 1
    assert contents(tensors) != before
    assert tensors.ranges is ranges and tensors.steady_memory == memory


@pytest.mark.parametrize("change", CHANGES)
def test_ranges_are_made_again(change):
    tensors, p, state = held()
    tensors.look()
    ranges = tensors.ranges
    CHANGES[change](p, state)
    p.data.add_(1.0)
    again = HeldTensors(0, tensors._ownership, tensors._optimizer)
    assert contents(tensors) == contents(again) and tensors.steady_memory == again.steady_memory
    assert tensors.ranges is not ranges


def test_elements_with_gaps_are_copied_at_each_look():
    tensors, p, _ = held()
    p.data = torch.stack([p.data, p.data], dim=-1)[..., 0]
    before = contents(tensors)
    p.data.add_(1.0)
    assert contents(tensors) != before
