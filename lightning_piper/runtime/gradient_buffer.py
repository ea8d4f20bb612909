"""Gradients that are kept from batch to batch while they are accumulated, and summed over the replicas with the last one.

The executor that sums them may not be the one that kept them: each size of a batch has its own. Their memory is recorded on the
stream of the sum when they are made, and that is the same stream in all of them: streams of one name are one (`accelerators`).
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from lightning_piper.plan.instructions import Collective, Keep
from lightning_piper.plan.not_last import BufferKey
from lightning_piper.runtime.transport import Bound, Slots

GradientBuffer = MutableMapping[BufferKey, torch.Tensor]


def bind_keep(instruction: Keep, key: BufferKey, slots: Slots, buffer: GradientBuffer) -> Bound:
    """Instead of the sum over replicas: keep this device's term, added to what is kept already."""
    slot = instruction.reads[0].slot

    def keep() -> None:
        (flat,) = slots[slot]
        slots[slot] = None
        if key in buffer:
            buffer[key].add_(flat)
        else:
            buffer[key] = flat

    return keep


def bind_add_accumulated(instruction: Collective, key: BufferKey, slots: Slots, buffer: GradientBuffer) -> Bound:
    """Before the sum over replicas: add what was kept to this device's term."""
    slot = instruction.reads[0].slot

    def merge() -> None:
        kept = buffer.pop(key, None)
        if kept is not None:
            slots[slot][0].add_(kept)

    return merge
