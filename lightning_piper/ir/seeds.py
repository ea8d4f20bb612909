"""Seeds of chunks that draw random numbers.

A seed depends on the step, region and samples, not on the placement.
"""

from __future__ import annotations

from lightning_piper.ir.nodes import Chunk

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """Run one round of splitmix64 (Steele, Lea, Flood 2014). It gives unrelated outputs for close inputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def seed_of(step_seed: int, region: int, kind: str, start: int) -> int:
    """Return the 63-bit seed of a pass of a region for the samples that begin at `start`.

    BI draws the same numbers as B. BW does not draw random numbers.
    """
    seed = _mix(step_seed)
    for part in (region, ord(kind[0]), start):
        seed = _mix(seed ^ part)
    return seed >> 1


def chunk_seed(step_seed: int, chunk: Chunk, first: int = 0) -> int:
    """Return the seed of `chunk` in the replica whose local batch begins with sample `first`."""
    return seed_of(step_seed, chunk.region, chunk.kind, first + chunk.slice.start)
