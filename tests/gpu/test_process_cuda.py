"""Plans on two processes with one GPU each, which communicate by NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_piper.capture import capture
from lightning_piper.plan import compile_plans
from lightning_piper.runtime import Executor, ProcessTransport
from lightning_piper.verify.interpreter import interpret
from tests.distributed.processes import LIMIT, launch
from tests.models import fresh, leaves_of
from tests.plan.programs import dag_of, one_f_one_b, place, split

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def step_on_gpu(rank: int) -> Any:
    """For each gradient of a step, whether it equals the gradient that the interpreter computes on this GPU."""
    cuda = torch.device("cuda", rank)
    torch.cuda.set_device(cuda)
    module, batch = fresh("mlp")
    module, leaves = module.to(cuda), [x.to(cuda) for x in leaves_of(batch)]
    step = capture(module, tuple(leaves), cuda)
    dag = dag_of(step, place(step, 2) + split(4) + one_f_one_b(2, 4))
    plans = compile_plans(dag)
    tensors = {n: x.detach() for n, x in module.named_parameters()}
    transport = ProcessTransport(plans, [0, 1], cuda, timeout=LIMIT)
    executor = Executor(plans[rank], step, tensors, tensors, transport, cuda)
    equal = {}
    for seed in range(5):
        expected = interpret(dag, tensors, leaves, seed)
        result = executor.step(leaves, seed)
        equal.update({name: torch.equal(grad, expected.grads[name]) for name, grad in result.grads.items()})
    transport.close()
    return equal


def test_a_pipeline_over_nccl(tmp_path: Path) -> None:
    first, second = launch(2, step_on_gpu, tmp_path)
    assert {**first, **second} == dict.fromkeys(
        ("first.weight", "first.bias", "second.weight", "second.bias"), True
    )
