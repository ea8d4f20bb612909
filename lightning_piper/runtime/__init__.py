"""Executes plans. Knows nothing of directives: a plan's instructions, the captured code and a transport are all it needs.

Several processes, one logical device each (`ranks[i]` is the process of logical device `i`):

    plans = compile_plans(dag)                                       # on every rank: all plans
    transport = ProcessTransport(plans, ranks=[0, 1], device=torch.device("cpu"), timeout=timedelta(minutes=5))
    executor = Executor(plans[d], dag.step, params, buffers, transport, torch.device("cpu"))
    result = executor.step(leaves, seed=0, scale=1.0)                # StepResult
    transport.connect(other_plans)                                   # on every rank, e.g. for a smaller last batch
    transport.close()                                                # on every rank, at the end

All devices in one process:

    transport = LocalTransport(plans)                                # one for each set of plans
    executors = [Executor(plans[d], dag.step, params, buffers, transport, device) for d in sorted(plans)]
    results = run_local(executors, leaves, seed=0, scale=1.0)        # list[StepResult], one an executor

`params` and `buffers` map canonical names to tensors; only those that the plan's chunks use are looked up. They are bound once:
changing them in place (an optimizer, `load_state_dict`) is seen, replacing them needs a new executor. Where a plan has shards of
parameters, `Executor(..., shards=shards_of(plan, params, device))` holds them. `leaves` are the
tensors of the global batch, in the order of `StepCode.batch_specs`, on the executor's device.

`StepResult.grads`: parameter name -> gradient, for the parameters updated on this device; nothing else refers to these
tensors. Of parameters in shards it has this device's local shard, in one dimension; `joined(plans, results)` puts them together.
`StepResult.metrics`: float64 vector, places as in `ops.metrics.metric_names`. The module's buffers have their new
values when `step` returns. A failing instruction raises `ExecutionError`.
"""

from lightning_piper.runtime.executor import Executor, StepResult
from lightning_piper.runtime.gradient_buffer import GradientBuffer
from lightning_piper.runtime.local import LocalTransport, run_local
from lightning_piper.runtime.process import ProcessTransport
from lightning_piper.runtime.riding import OtherNotes
from lightning_piper.runtime.shards import joined, local_shards_of, shards_of

__all__ = [
    "Executor",
    "GradientBuffer",
    "LocalTransport",
    "OtherNotes",
    "ProcessTransport",
    "StepResult",
    "joined",
    "local_shards_of",
    "run_local",
    "shards_of",
]
