"""What each device of a compiled program needs, from its plan: not an estimate of stages, but what stands in the graph."""

from __future__ import annotations

from lightning_piper.compiler import Compiled
from lightning_piper.simulate import simulate


def bytes_needed(compiled: Compiled, states: float) -> dict[int, int]:
    """Bytes of each device: its parameters, or its shards of them, the optimizer's states, and the peak of the step's values, their
    gradients included.

    Args:
        states: bytes of the optimizer's state for one of parameters that get gradients.
    """
    figures = simulate(compiled.dag, compiled.plans).devices
    found = {}
    for device, plan in compiled.plans.items():
        sharded = {name for bucket in plan.shards for name in bucket.names}
        params = trained = 0.0
        for bucket, kept in plan.shards.items():
            shard = bucket.whole.nbytes * bucket.shard / bucket.numel
            params += bucket.whole.nbytes if kept else shard
            trained += shard if compiled.step.params[bucket.names[0]].requires_grad else 0  # a bucket has either kind
        for name in compiled.params_on(device) - sharded:
            nbytes = compiled.dag.spec_of(name).nbytes
            params += nbytes
            trained += nbytes if compiled.step.params[name].requires_grad and name not in compiled.dag.hosted else 0
        found[device] = int(params + states * trained) + figures[device].peak_bytes
    return found
