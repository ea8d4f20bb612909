"""What each device of a compiled program needs, from its plan: not an estimate of stages, but what stands in the graph."""

from __future__ import annotations

from lightning_piper.compiler import Compiled
from lightning_piper.ir.nodes import Chunk
from lightning_piper.runtime.process import MOST as LENT
from lightning_piper.simulate import simulate

ROUGHLY = 8  # times what passes hand out (activations that they save, gradients), which passes on their way hardly make


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


def needed_by_replicas(compiled: Compiled, states: float, processes: bool, room: int) -> int:
    """Bytes that each of the replicas of a whole step needs: in the step, or in the update after it. If far less than the room is
    needed, the plan is not followed, because that takes as long as to run the step once without data: then it is a rough number.

    Args:
        states: as for `bytes_needed`.
        processes: on a CPU, which keep room in which they sum gradients, and where an update makes two tensors as large as a
            parameter.
        room: bytes that there are.
    """
    specs = compiled.step.params.values()
    trained = [x.spec.nbytes for x in specs if x.requires_grad]
    held = sum(x.spec.nbytes for x in specs) + (1 + states) * sum(trained)
    update = int(held) + (2 * max(trained, default=0) if processes else 0)
    lent = min(sum(trained), LENT) if processes else 0
    dag = compiled.dag
    handed_out = sum(x.nbytes for chunk in dag.of_type(Chunk) for tensors in dag.code_of(chunk).outputs for x in tensors)
    rough = update + lent + ROUGHLY * handed_out
    if rough <= room:
        return rough
    return max(max(bytes_needed(compiled, states).values()), update) + lent
