"""Gradients that a device accumulates locally. With the last batch of an accumulation, the replicas sum these
gradients.

One executor may keep a gradient and another executor sum it, because each batch size has an executor. For
streams, this is safe. A gradient's memory is recorded on the stream of the sum when it is made, and all
executors share that stream, because streams with the same name are the same stream (`accelerators`).
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from lightning_piper.plan.instructions import Collective, Keep
from lightning_piper.plan.no_sync_plan import BufferKey
from lightning_piper.runtime.transport import Bound, Slots

GradientBuffer = MutableMapping[BufferKey, torch.Tensor]


def bind_keep(instruction: Keep, key: BufferKey, slots: Slots, buffer: GradientBuffer) -> Bound:
    """Return the function for a step without the sum over replicas. It adds this device's term to the kept
    gradient."""
    slot = instruction.reads[0].slot

    def keep() -> None:
        (flat,) = slots[slot]
        slots[slot] = None
        if key in buffer:
            buffer[key].add_(flat)
        else:
            buffer[key] = flat

    return keep


def bind_add_accumulated(
    instruction: Collective, key: BufferKey, slots: Slots, buffer: GradientBuffer
) -> Bound:
    """Return the function that adds the kept gradient, if there is one, to this device's term, before the sum
    over replicas. It removes the kept gradient from the buffer."""
    slot = instruction.reads[0].slot

    def merge() -> None:
        kept = buffer.pop(key, None)
        if kept is not None:
            slots[slot][0].add_(kept)

    return merge
