"""Memory of each device of a compiled program, computed from its plan instead of estimated.

A search rejects a program whose plan needs more memory than the devices have. `session.available_memory`
checks whether replicas of a whole step fit.
"""

from __future__ import annotations

from lightning_piper.compiler import Compiled
from lightning_piper.ir.nodes import Chunk
from lightning_piper.runtime.process import MOST as LENT
from lightning_piper.simulate import simulate

# `needed_by_replicas` estimates the peak of a step as this multiple of the bytes of all passes' outputs
# (saved activations, gradients). The exact peak is hardly ever larger.
ROUGHLY = 8


def bytes_needed(compiled: Compiled, states: float) -> dict[int, int]:
    """Return device -> the bytes that it needs in a step.

    These are the bytes of its parameters (shards, unless the device keeps a bucket gathered), of its
    optimizer states, and of the peak of the step, which includes gradients. Parameters with states in host
    memory have no states here.

    Args:
        compiled: The compiled program.
        states: Bytes of optimizer state for each byte of trained parameters.
    """
    figures = simulate(compiled.dag, compiled.plans).devices
    found = {}
    for device, plan in compiled.plans.items():
        sharded = {name for bucket in plan.shards for name in bucket.names}
        params = trained = 0.0
        for bucket, kept in plan.shards.items():
            shard = bucket.whole.nbytes * bucket.shard / bucket.numel
            params += bucket.whole.nbytes if kept else shard
            # All parameters of a bucket are trained, or none.
            trained += shard if compiled.step.params[bucket.names[0]].requires_grad else 0
        for name in compiled.params_on(device) - sharded:
            nbytes = compiled.dag.spec_of(name).nbytes
            params += nbytes
            trained += (
                nbytes if compiled.step.params[name].requires_grad and name not in compiled.dag.hosted else 0
            )
        found[device] = int(params + states * trained) + figures[device].peak_bytes
    return found


def needed_by_replicas(compiled: Compiled, states: float, processes: bool, room: int) -> int:
    """Return the bytes that each replica of an unpipelined step needs: the larger number of the step and of
    the update after it.

    The function returns a rough number if this number fits in `room`, and the exact number otherwise. The
    exact number takes more time, because `bytes_needed` simulates the plan.

    Args:
        compiled: The compiled step, in which each device is a replica.
        states: Bytes of optimizer state for each byte of trained parameters.
        processes: Whether replicas are processes on a CPU. Such processes keep a buffer in which they sum
            gradients, and their updates make two tensors as large as a parameter.
        `room`: Bytes that are available.
    """
    specs = compiled.step.params.values()
    trained = [x.spec.nbytes for x in specs if x.requires_grad]
    held = sum(x.spec.nbytes for x in specs) + (1 + states) * sum(trained)
    update = int(held) + (2 * max(trained, default=0) if processes else 0)
    lent = min(sum(trained), LENT) if processes else 0
    dag = compiled.dag
    handed_out = sum(
        x.nbytes for chunk in dag.of_type(Chunk) for tensors in dag.code_of(chunk).outputs for x in tensors
    )
    rough = update + lent + ROUGHLY * handed_out
    if rough <= room:
        return rough
    return max(max(bytes_needed(compiled, states).values()), update) + lent
