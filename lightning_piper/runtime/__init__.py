"""Executes plans. The package needs a plan's instructions, the captured code and a transport. It does not use
directives.

With several processes, each process runs one logical device (`ranks[i]` is the rank of logical device `i`)::

    plans = compile_plans(dag)                                       # on every rank: all plans
    transport = ProcessTransport(plans, ranks=[0, 1], device=torch.device("cpu"), timeout=timedelta(minutes=5))
    executor = Executor(plans[d], dag.step, params, buffers, transport, torch.device("cpu"))
    result = executor.step(leaves, seed=0, scale=1.0)                # StepResult
    transport.connect(other_plans)                                   # on every rank, e.g. for a smaller last batch
    transport.close()                                                # on every rank, at the end

With all devices in one process::

    transport = LocalTransport(plans)                                # one for each set of plans
    executors = [Executor(plans[d], dag.step, params, buffers, transport, device) for d in sorted(plans)]
    results = run_local(executors, leaves, seed=0, scale=1.0)        # list[StepResult], one for each executor

`params` and `buffers` map canonical names to tensors. An executor looks up only the tensors that its plan's
chunks use, and binds them once. The executor sees changes in place (by an optimizer or `load_state_dict`). If
a tensor is replaced, make a new executor. If a plan has shards of parameters, pass the shards as
`Executor(..., shards=shards_of(plan, params, device))`. `leaves` are the tensors of the global batch, in the
order of `StepCode.batch_specs`, on the executor's device.

`StepResult.grads` maps the names of the parameters that this device updates to their gradients. Nothing else
refers to these tensors. The gradient of a sharded parameter is one-dimensional and covers this device's local
shard; `joined(plans, results)` joins the gradients of shards to whole gradients. `StepResult.metrics` is a
float64 vector in the order of `ops.metrics.metric_names`. When `step` returns, the module's buffers have
their new values. An instruction that fails raises `ExecutionError`.
"""

from lightning_piper.runtime.executor import Executor, StepResult
from lightning_piper.runtime.gradient_buffer import GradientBuffer
from lightning_piper.runtime.local_transport import LocalTransport, run_local
from lightning_piper.runtime.piggyback import DigestMismatch
from lightning_piper.runtime.process import ProcessTransport
from lightning_piper.runtime.shards import joined, local_shards_of, shards_of

__all__ = [
    "DigestMismatch",
    "Executor",
    "GradientBuffer",
    "LocalTransport",
    "ProcessTransport",
    "StepResult",
    "joined",
    "local_shards_of",
    "run_local",
    "shards_of",
]
