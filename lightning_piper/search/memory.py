"""What a stage of blocks holds on one device, in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_piper.errors import SimulationError
from lightning_piper.limits import shown
from lightning_piper.search.workload import Block

# What the allocator keeps and cannot use, as a share of everything: an assumption, not a measurement. torch's caching allocator
# rounds what is more than 1 MiB up to a multiple of 2 MiB, and cannot join what lies apart.
FRAGMENTATION = 0.05
IN_TRANSIT = 2  # messages of a kind that are there at once: one is worked on while another one travels


class StageMemory(NamedTuple):
    """Bytes on one device.

    Attributes:
        params: its parameters, and those that are gathered to be read.
        gradients, states: of the parameters, and of the optimizer.
        saved: what forward passes keep for backward passes.
        buffers: what travels between stages.
        margin: what memory holds more of than it can use.
    """

    params: int
    gradients: int
    states: int
    saved: int
    buffers: int
    margin: int

    @property
    def total(self) -> int:
        return sum(self)


def stage_memory(
    blocks: Sequence[Block], samples: int, in_flight: int, *, given: float = 0, waiting: int = 0, tensor: int = 1, experts: int = 1,
    replicas: int = 1, level: int = 0, states: float = 2.0,
) -> StageMemory:  # fmt: skip
    """What a device holds when it holds most.

    Args:
        blocks: of the stage.
        samples: of a microbatch.
        in_flight: microbatches of which F is done and B, or BI, is not.
        given: bytes that come from the stage before, of a microbatch.
        waiting: further microbatches, of which BI is done and BW is not.
        tensor, experts: members of these axes, which have parts of `Block.divided` and `Block.experts`.
        replicas: devices between which ZeRO divides.
        level: of ZeRO: 1 divides the optimizer's states, 2 gradients as well, 3 parameters as well, gathered for two blocks.
        states: bytes of the optimizer's state for one of parameters.

    Raises:
        SimulationError: nothing is known of work on so many samples and members, or there is no such level.
    """
    if level not in (0, 1, 2, 3):
        raise SimulationError(f"stage_memory(level={shown(level)}): give 0, 1, 2 or 3")
    works = [block.at(samples, tensor) for block in blocks]
    missing = [block.name for block, work in zip(blocks, works, strict=True) if work is None]
    if missing:
        raise SimulationError(f"nothing is known of {missing[0]!r} on {tensor} members of a tensor axis; give its work")
    of_block = [params_of(block, tensor, experts) for block in blocks]
    whole = sum({name: nbytes for params in of_block for name, nbytes in params.items()}.values())
    shared = [math.ceil(whole / replicas) if level >= n else whole for n in (1, 2, 3)]
    gathered = sum(sorted((sum(params.values()) for params in of_block), reverse=True)[:2]) if level == 3 and replicas > 1 else 0
    saved = sum(in_flight * work.saved + waiting * work.saved_for_weights for work in works if work is not None)
    handed_on = works[-1].output if works and works[-1] is not None else 0
    found = StageMemory(
        shared[2] + min(gathered, whole), shared[1], math.ceil(states * shared[0]), math.ceil(saved),
        math.ceil(IN_TRANSIT * (given + handed_on)), 0,
    )  # fmt: skip
    return found._replace(margin=math.ceil(FRAGMENTATION * found.total))


def params_of(block: Block, tensor: int = 1, experts: int = 1) -> dict[str, int]:
    """Bytes of each parameter of a block that one member of a tensor axis and an expert axis has."""
    found = {}
    for name, nbytes in block.params.items():
        parts = (tensor if name in block.divided else 1) * (experts if name in block.experts else 1)
        found[name] = math.ceil(nbytes / parts)
    return found
