"""On CUDA, plans that run on several streams give bit for bit what the reference interpreter gives on one
stream.
"""

from __future__ import annotations

import pytest
import torch

from lightning_piper.capture import capture
from lightning_piper.plan import compile_plans
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.verify.interpreter import interpret
from tests.models import CASES, fresh, leaves_of
from tests.plan.programs import dag_of, one_f_one_b, place, split
from tests.reference import differences
from tests.runtime.steps import outcome_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("name", ["mlp", "residual", "losses", "logs", "dropout", "exact"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_pipeline_on_one_gpu(name: str, devices: int) -> None:
    cuda = torch.device("cuda", 0)
    module, batch = fresh(name)
    module, leaves = module.to(cuda), [x.to(cuda) for x in leaves_of(batch)]
    step = capture(
        module, batch if isinstance(batch, torch.Tensor) else tuple(leaves), cuda, CASES[name].context
    )
    program = place(step, devices) + split(2) + (one_f_one_b(devices, 2) if name != "residual" else [])
    dag = dag_of(step, program)
    tensors = {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    plans = compile_plans(dag)
    transport = LocalTransport(plans)
    executors = [Executor(plans[d], step, tensors, tensors, transport, cuda) for d in sorted(plans)]
    for seed in range(20):
        expected = interpret(dag, tensors, leaves, seed)
        found = outcome_of(dag, run_local(executors, leaves, seed), {})
        found = type(found)({k: v.cpu() for k, v in found.metrics.items()}, found.grads, {})
        assert differences(expected, found) == []
        for grad in found.grads.values():  # in place, at once: the step's streams are behind the caller's
            grad.zero_()


def test_a_wrong_batch_gives_other_numbers() -> None:
    cuda = torch.device("cuda", 0)
    module, batch = fresh("mlp")
    module, leaves = module.to(cuda), [x.to(cuda) for x in leaves_of(batch)]
    step = capture(module, tuple(leaves), cuda)
    dag = dag_of(step, place(step, 2) + split(2))
    tensors = {n: x.detach() for n, x in module.named_parameters()}
    plans = compile_plans(dag)
    transport = LocalTransport(plans)
    executors = [Executor(plans[d], step, tensors, tensors, transport, cuda) for d in sorted(plans)]
    expected = interpret(dag, tensors, leaves)
    found = outcome_of(dag, run_local(executors, [leaves[0] + 1, leaves[1]], 0), {})
    found = type(found)({k: v.cpu() for k, v in found.metrics.items()}, found.grads, {})
    assert set(expected.grads) <= set(differences(expected, found))
