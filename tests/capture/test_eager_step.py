"""A step that runs uncaptured, as one region of a graph."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.capture.eager.eager_step import EagerStep, is_of_none
from lightning_piper.compiler import compile_step
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.update import Update
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.verify.static_check import check

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = (
            nn.Linear(3, 4, bias=False),
            nn.BatchNorm1d(4),
            nn.Parameter(torch.ones(2, dtype=torch.float16)),
        )
        self.tied = self.first.bias

    def training_step(self, batch: object) -> None:
        raise AssertionError("it is not run")


def program(replicas: int, **more: object) -> tuple[piper.Directive, ...]:
    everywhere = list(range(replicas))
    found: list[piper.Directive] = [piper.Place(filter={}, devices=everywhere)]
    return (*found, *([piper.Replicate(filter={}, devices=everywhere, **more)] if replicas > 1 else []))  # type: ignore[arg-type]


def step_of(replicas: int, but: tuple[str, ...] = ()) -> EagerStep:
    net = Net()
    return EagerStep(net, replicas, [name for name, _ in net.named_parameters() if name not in but], CPU)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_are_the_mean_of_the_replicas(replicas):
    """A backward side for each replica: parameter k of replica r has gradients of r + k."""
    steps = [step_of(replicas) for _ in range(replicas)]
    for r, step in enumerate(steps):
        step.backward = lambda r=r, step=step: [
            None
            if name == "scale" or (name == "norm.bias" and r)
            else torch.full_like(step.module.get_parameter(name), r + k)
            for k, name in enumerate(step.trained)
        ]
    compiled = [compile_step(step, program(replicas)) for step in steps]  # type: ignore[arg-type]
    params, buffers = dict(steps[0].module.named_parameters()), dict(steps[0].module.named_buffers())
    transport = LocalTransport(compiled[0].plans)
    executors = [
        Executor(compiled[r].plans[r], steps[r], params, buffers, transport, CPU) for r in range(replicas)
    ]
    for result in run_local(executors, [], seed=0):
        for k, name in enumerate(steps[0].trained):
            grad = result.grads[name]
            assert bool(is_of_none(grad)) == (name == "scale")
            mean = (
                0
                if name == "scale"
                else k + sum(range(replicas)) / replicas
                if name != "norm.bias"
                else k / replicas
            )
            assert grad.dtype == params[name].dtype and torch.allclose(
                grad, torch.full_like(grad, mean), rtol=1e-3
            ), name
        assert result.metrics.numel() == 0


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_sum_says_what_nobody_has_used(dtype, shape):
    """Also where all gradients are zero, of either sign."""
    step = EagerStep(nn.Linear(1, 1), 2, ("weight",), CPU)
    step.params = {"weight": dataclasses.replace(step.params["weight"], spec=TensorSpec(shape, dtype, ()))}
    weight = torch.tensor(0.5, dtype=torch.float32)

    def part(value):
        step.backward = lambda: [None if value is None else torch.full(shape, value, dtype=dtype)]
        return step._backward([weight])[0]

    for values in itertools.product((None, -0.0, 0.0, -2.0, 3.0), repeat=3):
        total = functools.reduce(torch.add, map(part, values))
        assert bool(is_of_none(total)) == (values == (None,) * 3), values
        assert torch.equal(total, torch.full(shape, sum(x or 0 for x in values) / 2, dtype=dtype))


@pytest.mark.parametrize("more", [{}, {"shard_optimizer": True}, {"shard_params": True}])
def test_what_one_rewrite_drops_is_found(more):
    compiled = compile_step(step_of(2), program(2, **more))  # type: ignore[arg-type]
    dag = compiled.dag
    update = next(node for node in dag.of_type(Update))
    check(dag, final=True)
    dag.remove([update])
    with pytest.raises(VerificationError):
        check(dag, final=True)


def test_only_what_is_trained_is_packed():
    whole, part = (compile_step(step_of(2, but), program(2)).dag for but in ((), ("first.weight",)))  # type: ignore[arg-type]
    names = [{name for pack in dag.of_type(Pack) for name in pack.outputs[0].names} for dag in (whole, part)]
    assert names[0] - names[1] == {"first.weight"}


def test_nothing_to_train_is_a_step():
    compiled = compile_step(EagerStep(nn.Module(), 2, (), CPU), program(2))  # type: ignore[arg-type]
    assert not list(compiled.dag.of_type(Update))


def test_it_cannot_be_cut():
    split = piper.Split(filter={}, dim_name="MB", num_microbatches=2)
    with pytest.raises(DirectiveError, match="which runs uncaptured"):
        compile_step(step_of(2), (*program(2), split))  # type: ignore[arg-type]
    stage = dataclasses.replace(program(1)[0], filter={"PP": 1})
    with pytest.raises(DirectiveError):
        compile_step(step_of(1), (stage,))  # type: ignore[arg-type]
