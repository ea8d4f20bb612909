"""What an executor accepts and what it returns."""

from __future__ import annotations

import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_piper import annotate
from lightning_piper.capture import capture
from lightning_piper.errors import ExecutionError
from lightning_piper.plan import compile_plans
from lightning_piper.plan.instructions import Run
from lightning_piper.runtime import Executor, LocalTransport
from lightning_piper.runtime import chunks as chunk_binding
from tests.models import CASES, Captured, Case, captured
from tests.plan.programs import dag_of, pipeline, place, plans_of, split
from tests.reference import differences
from tests.runtime.steps import CPU, Rig, reference, rig


def single(model: Captured, leaves: Any = None, **given: Any) -> Executor:
    plans = compile_plans(dag_of(model.step, []))
    tensors = given.get("tensors", model.tensors)
    return Executor(plans[0], model.step, tensors, tensors, LocalTransport(plans), CPU)


def of_module(module: L.LightningModule, batch: Any) -> Rig:
    """The executors for a module that `tests.models` does not have."""
    step = capture(module, batch)
    tensors = {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    leaves = [batch] if isinstance(batch, torch.Tensor) else list(batch)
    model = Captured(Case(type(module)), module, batch, step, tensors, leaves)
    return rig(model, dag_of(step, place(step, 2)))


# Inputs


def test_a_device_needs_only_the_parameters_of_its_stage() -> None:
    model, plans = captured("mlp"), plans_of("mlp", 2, 2)
    own = {name: x for name, x in model.tensors.items() if name.startswith("second")}
    Executor(plans[1], model.step, own, {}, LocalTransport(plans), CPU)
    with pytest.raises(
        ExecutionError,
        match=r"device 0: run %\d+ F.* reads parameter 'first.\w+', which this device does not have",
    ):
        Executor(plans[0], model.step, own, {}, LocalTransport(plans), CPU)


def test_a_batch_of_another_shape_is_refused() -> None:
    executor = single(captured("mlp"))
    with pytest.raises(
        ExecutionError, match=r"tensor 1 of the batch is float32\[4, 3\], .* captured with float32\[4,2\]"
    ):
        executor.step([torch.randn(4, 4), torch.randn(4, 3)], seed=0)
    with pytest.raises(ExecutionError, match="the batch has 1 tensor, but the step was captured with 2"):
        executor.step([torch.randn(4, 4)], seed=0)


def test_a_batch_that_is_not_contiguous_gives_the_same() -> None:
    model = captured("mlp")
    executor = single(model)
    expected = executor.step(model.leaves, seed=0)
    found = executor.step([x.t().contiguous().t() for x in model.leaves], seed=0)
    assert all(torch.equal(found.grads[name], x) for name, x in expected.grads.items())


def test_parameters_changed_in_place_are_seen() -> None:
    model = captured("mlp")
    tensors = {name: x.clone() for name, x in model.tensors.items()}
    executor = single(model, tensors=tensors)
    before = executor.step(model.leaves, seed=0)
    tensors["first.weight"].add_(1.0)
    assert not torch.equal(before.metrics, executor.step(model.leaves, seed=0).metrics)


@pytest.mark.parametrize("scale", [1024.0, 0.5])
def test_the_loss_scale_reaches_gradients_and_nothing_else(scale: float) -> None:
    # A power of two scales without rounding.
    devices = rig(captured("gpt"), pipeline("gpt", 3, 2))
    plain, scaled = devices.step(), devices.step(scale=scale)
    for a, b in zip(plain, scaled, strict=True):
        assert all(torch.equal(b.grads[name], x * scale) for name, x in a.grads.items())
        assert torch.equal(a.metrics, b.metrics)


# Results


@pytest.mark.parametrize("name", CASES)
def test_gradients_share_memory_with_nothing(name: str) -> None:
    model = captured(name)
    devices = rig(model, pipeline(name, 2, 1))
    results = devices.step()
    given = [x.untyped_storage().data_ptr() for x in [*devices.tensors.values(), *model.leaves]]
    grads = [x for result in results for x in result.grads.values()]
    owned = [x.untyped_storage().data_ptr() for x in grads]
    assert len({*given, *owned}) == len(set(given)) + len(owned)
    kept = [x.clone() for x in grads]
    devices.step(seed=5)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))


class Aliases(L.LightningModule):
    """A module for which the graph returns one tensor as the gradient of both `a` and `b`, and an expanded
    scalar as that of `c`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP", 0):
            h = batch + self.a + self.b
        with annotate("PP", 1):
            return h.square().sum() + self.c.sum()


def test_gradients_that_are_one_tensor_in_the_graph_are_handed_out_as_several() -> None:
    torch.manual_seed(0)
    module = Aliases()
    devices = of_module(module, torch.randn(4))
    grads = {name: x for result in devices.step() for name, x in result.grads.items()}
    assert torch.equal(grads["a"], grads["b"])
    grads["a"].mul_(0.0)
    assert grads["b"].abs().sum() > 0
    grads["c"].mul_(torch.arange(4.0))  # an expanded scalar could not be changed in place
    assert torch.equal(grads["c"], torch.arange(4.0))


class Swap(L.LightningModule):
    """Two buffers, each of which takes the other's old value."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("old", torch.zeros(3))
        self.register_buffer("new", torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP", 0):
            loss = (batch * self.w).sum()
        with torch.no_grad():
            old = self.old.clone()
            self.old.copy_(self.new)
            self.new.copy_(old)
        return loss


def test_a_buffer_may_take_another_ones_old_value() -> None:
    devices = of_module(Swap(), torch.randn(3))
    for expected in (1.0, 0.0):
        devices.step()
        assert torch.equal(devices.tensors["old"], torch.full((3,), expected))
        assert torch.equal(devices.tensors["new"], torch.full((3,), 1 - expected))


def test_buffers_follow_the_microbatches_over_several_steps() -> None:
    model, dag = captured("conv"), pipeline("conv", 2, 4)
    devices = rig(model, dag)
    assert differences(reference(model, dag), devices.outcome()) == []
    counts = {name: int(x) for name, x in devices.tensors.items() if "num_batches" in name}
    assert set(counts.values()) == {1}  # for the whole batch
    devices.step()
    assert {int(devices.tensors[name]) for name in counts} == {2}


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_every_reduction_of_logged_values(microbatches: int) -> None:
    model, dag = captured("logs"), pipeline("logs", 2, microbatches)
    assert differences(reference(model, dag), rig(model, dag).outcome()) == []


# Memory


def test_nothing_is_left_in_the_slots() -> None:
    devices = rig(captured("gpt"), pipeline("gpt", 3, 3))
    devices.step()
    for executor in devices.executors:
        assert executor._slots[: executor.plan.slots] == [None] * executor.plan.slots


def test_gradients_live_as_long_as_the_caller_keeps_them() -> None:
    devices = rig(captured("gpt"), pipeline("gpt", 3, 3))
    results = devices.step()
    grads = [weakref.ref(x) for result in results for x in result.grads.values()]
    assert all(x() is not None for x in grads)
    del results
    assert all(x() is None for x in grads)


def test_a_stage_holds_as_many_activations_as_its_depth_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B bounds what is alive; without an order everything is."""
    alive: dict[bool, int] = {}
    for ordered in (True, False):
        made: list[weakref.ref[torch.Tensor]] = []
        most = 0
        bind = chunk_binding._bind_code

        def counting(run: Any, *args: Any, bind: Any = bind, made: Any = made) -> Any:
            def counted(inputs: list[torch.Tensor]) -> Any:
                nonlocal most
                outputs = run(inputs)
                assert inputs == []
                made.extend(weakref.ref(x) for x in outputs)
                most = max(most, sum(x() is not None for x in made))
                return outputs

            return bind(counted, *args)

        with monkeypatch.context() as patch:
            patch.setattr(chunk_binding, "_bind_code", counting)
            devices = rig(captured("mlp"), pipeline("mlp", 2, 4, ordered))
        results = devices.step()
        alive[ordered] = most
        left = sum(x() is not None for x in made)
        del results
        assert left == 0  # sums are new tensors, metrics too
    assert alive[True] < alive[False]


def test_a_chunk_keeps_none_of_its_inputs_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = chunk_binding._bind_code
    inputs: list[weakref.ref[torch.Tensor]] = []

    def watching(run: Any, *args: Any) -> Any:
        def watched(tensors: list[torch.Tensor]) -> Any:
            first = len(inputs)
            inputs.extend(weakref.ref(x) for x in tensors)
            outputs = run(tensors)
            kept = {id(x) for x in outputs}
            freed.append(sum(x() is None or id(x()) in kept for x in inputs[first:]))
            return outputs

        return bind(watched, *args)

    freed: list[int] = []
    monkeypatch.setattr(chunk_binding, "_bind_code", watching)
    model = captured("mlp")
    devices = rig(model, dag_of(model.step, place(model.step, 1) + split(2)))
    devices.step()
    backward = [
        i
        for i, x in enumerate(devices.executors[0].plan.instructions)
        if isinstance(x, Run) and x.key[1] == "B"
    ]
    assert len(backward) == 4 and len(freed) == 8
    runs = [x for x in devices.executors[0].plan.instructions if isinstance(x, Run)]
    assert all(count > 0 for count, run in zip(freed, runs, strict=True) if run.key[1] == "B")
