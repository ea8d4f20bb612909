"""The input of a search: a chain of blocks, and the costs of each block. You may write a `Workload` yourself,
for example with costs that you have measured in a different way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from lightning_piper.simulate.durations import Number


class Work(NamedTuple):
    """A block's work on one microbatch, on one device.

    Attributes:
        forward, backward_input, backward_weights: Seconds of the passes F, BI and BW. B takes the sum of the
            last two.
        saved: Bytes that F saves until BI (or B) is done.
        saved_for_weights: Bytes that are kept until BW is done: some of the bytes in `saved`, and the values
            that BI makes for BW.
        output: Bytes of the activations passed to the next block, which are also the bytes of their gradient.
        exchanged: Bytes of the sums along the tensor axis in a forward pass. A backward pass sums as many
            bytes.
        apart: Additional seconds of BW if BI and BW are separate passes: work that both do, and that B does
            once.
    """

    forward: Number
    backward_input: Number
    backward_weights: Number
    saved: Number
    saved_for_weights: Number
    output: Number
    exchanged: Number = 0
    apart: Number = 0


@dataclass(frozen=True)
class Block:
    """A part of the model that a search does not divide over stages, such as a layer.

    Attributes:
        name: Name of its module.
        work: (samples of the microbatch, devices along the tensor axis) -> the block's work.
        params: Name of a parameter -> bytes. A name that several blocks have is one tied parameter.
        divided: Parameters that are sharded along the tensor axis.
        experts: Parameters that are sharded along an expert axis.
        routed: Bytes of the rows of one sample that a forward pass sends to experts, plus the bytes that it
            gets back.
        packed: Seconds to copy the gradients of all parameters into buckets, in which replicas sum them.
        added: Seconds to add the gradients of all parameters to the sums from earlier microbatches, on one
            device.
        updated: Seconds of the optimizer for all parameters on one device. A parameter that several blocks
            use counts with the first block.
        updated_in_parts: Like `updated`, if replicas shard the optimizer's state: the seconds of all shards
            together.
        frozen: Parameters that get no gradients, and so need neither sums nor optimizer states.
        packed_one_microbatch: Like `packed` with one microbatch: only gradients that the pass does not
            write into the bucket directly.
    """

    name: str
    work: Mapping[tuple[int, int], Work]
    params: Mapping[str, int]
    divided: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    routed: Number = 0
    packed: Number = 0
    added: Number = 0
    updated: Number = 0
    updated_in_parts: Number = 0
    frozen: frozenset[str] = frozenset()
    packed_one_microbatch: Number = 0

    def at(self, samples: int, tensor: int = 1) -> Work | None:
        """Return the work on `samples` samples, or None if no work is known for this size of the tensor axis.

        If the work on this number of samples is not known, the function interpolates or extrapolates it
        linearly from the two nearest known numbers of samples. If only one number is known, the work is
        proportional to the samples. Below the smaller one of the two numbers, the result is at least
        proportional to the samples. The reason is that a small microbatch does not take less time per sample
        than a large one.
        """
        if (samples, tensor) in self.work:
            return self.work[samples, tensor]
        known = sorted(
            (n for n, members in self.work if members == tensor), key=lambda n: (abs(n - samples), n)
        )[:2]
        if not known:
            return None
        if len(known) == 1:
            return Work(*(x * samples / known[0] for x in self.work[known[0], tensor]))
        (low, a), (high, b) = sorted((n, self.work[n, tensor]) for n in known)
        least = Fraction(min(samples, low), low) if samples < low else 0
        return Work(
            *(max(x + (y - x) * (samples - low) / (high - low), x * least) for x, y in zip(a, b, strict=True))
        )


@dataclass(frozen=True, repr=False)
class Workload:
    """A training step for a search to divide.

    Attributes:
        blocks: The blocks in the order in which the forward pass runs them.
        samples: Samples of one step, on all devices.
        states: Bytes of optimizer state for each byte of trained parameters; 2 for Adam.
        least: Smallest number of samples of a microbatch. With fewer samples the step cannot be traced, or
            has different operations.
        least_divided: Number of devices along the tensor axis -> a value that is larger than `least` and
            replaces it.
        meets: Whether microbatches may change the result of the step, for example because it mixes samples.
            Replicas are still possible, because DDP also changes the result in this way.
    """

    blocks: tuple[Block, ...]
    samples: int
    states: float = 2.0
    least: int = 1
    meets: bool = False
    least_divided: Mapping[int, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Workload of {len(self.blocks)} blocks and {self.samples} samples>"
