"""What a search divides: a chain of blocks, and what each one costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from lightning_piper.simulate.durations import Number


class Work(NamedTuple):
    """One block's work on one microbatch, on one device.

    Attributes:
        forward, backward_input, backward_weights: seconds of the passes F, BI and BW; B takes the sum of the last two.
        saved: bytes that F keeps, until BI (or B) is done.
        saved_for_weights: bytes that are kept until BW is done: of `saved`, and of what BI makes.
        output: bytes handed on to the next block; the gradient that comes back has as many.
        exchanged: bytes of the sums along the tensor axis within a forward pass; a backward pass has as many.
        apart: seconds more that BW takes where it is a pass of its own: work that B does once for both of its parts.
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
    """A part of the model that no border between stages cuts.

    Attributes:
        name: of its module.
        work: what it costs, by samples of the microbatch and number of members of the tensor axis.
        params: bytes of each parameter, by name; a name that two blocks have is one parameter, tied.
        divided: parameters of which members of the tensor axis have parts.
        experts: parameters of which members of an expert axis have parts.
        routed: bytes that one sample sends to experts, and gets back from them, within a forward pass.
        packed: seconds to lay gradients of all parameters into buckets, for sums over replicas.
        added: seconds to add gradients of all parameters to those of the microbatches before, on one device.
        updated: seconds that the optimizer takes for all parameters on one device. A parameter that several blocks use counts
            with the first one.
        updated_in_parts: the same for pieces of them, as replicas have that share states: all pieces together.
        frozen: parameters that get no gradients: there are no sums, and no states, of them.
        packed_alone: as `packed`, if there is one microbatch: of the gradients that its pass does not write there itself.
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
    packed_alone: Number = 0

    def at(self, samples: int, tensor: int = 1) -> Work | None:
        """The work on `samples` samples; on a line through the two nearest numbers that are known, in proportion if one is, and no
        less than in proportion below both: few samples are not faster than many. None if nothing is known of so many members."""
        if (samples, tensor) in self.work:
            return self.work[samples, tensor]
        known = sorted((n for n, members in self.work if members == tensor), key=lambda n: (abs(n - samples), n))[:2]
        if not known:
            return None
        if len(known) == 1:
            return Work(*(x * samples / known[0] for x in self.work[known[0], tensor]))
        (low, a), (high, b) = sorted((n, self.work[n, tensor]) for n in known)
        least = Fraction(min(samples, low), low) if samples < low else 0
        return Work(*(max(x + (y - x) * (samples - low) / (high - low), x * least) for x, y in zip(a, b, strict=True)))


@dataclass(frozen=True)
class Workload:
    """A training step that is to be divided.

    Attributes:
        blocks: in the order in which the forward pass runs them.
        samples: of one step, on all devices.
        states: bytes of the optimizer's state for one byte of parameters that get gradients; 2 for Adam.
        least: samples of a microbatch, at least: of fewer, the step is another one, or none.
        least_divided: the same by number of members of the tensor axis, where these want more.
        meets: samples look at each other, so microbatches would compute something else; replicas do as data parallelism does.
    """

    blocks: tuple[Block, ...]
    samples: int
    states: float = 2.0
    least: int = 1
    meets: bool = False
    least_divided: Mapping[int, int] = field(default_factory=dict)
