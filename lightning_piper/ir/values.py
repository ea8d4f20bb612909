"""Values that flow along data edges, and their placement on devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_piper.ir.buckets import Bucket


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape, dtype and strides (in elements).

    Strides stay the same on all devices, because kernels depend on strides.

    Attributes:
        runs: (number of runs, number of parts), such as (3, 2) for the weights of queries, keys and values in
            one parameter, divided over two devices. The slowest dimension then consists of equal runs, and
            each part of the tensor has an equal piece of every run. Offsets count all elements of the first
            part, then all elements of the second part. None: offsets count elements in memory order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    runs: tuple[int, int] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
        """Return the spec of a contiguous tensor, with the strides that torch gives a new tensor."""
        stride = [1]
        for size in reversed(shape[1:]):
            stride.append(stride[-1] * max(size, 1))
        return cls(tuple(shape), dtype, tuple(reversed(stride)) if shape else ())

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def dim_order(self) -> tuple[int, ...]:
        """Dimensions from the slowest to the fastest in memory.

        `x.permute(dim_order)` is contiguous if `x` is dense.
        """
        return tuple(sorted(range(len(self.shape)), key=lambda d: (-self.stride[d], d)))

    def part(self, parts: int) -> TensorSpec:
        """Return the spec of one of `parts` equal parts along the slowest dimension, which are contiguous."""
        return self._scaled(lambda size: size // parts)

    def of_parts(self, parts: int) -> TensorSpec:
        """Return the spec of the tensor that consists of `parts` parts like this one."""
        return self._scaled(lambda size: size * parts)

    def _scaled(self, by: Callable[[int], int]) -> TensorSpec:
        slowest = self.dim_order[0]
        runs = None if self.runs is None else (self.runs[0], by(self.runs[1]))
        return replace(
            self,
            shape=tuple(by(size) if d == slowest else size for d, size in enumerate(self.shape)),
            runs=runs,
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


def view_as(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the elements of a one-dimensional tensor with the spec's shape and strides.

    The result is a view of `flat`, or a copy if the spec has several `runs` in several parts. If the spec has
    gaps in its memory, the result has strides without the gaps.
    """
    dim_order = spec.dim_order
    inverse = sorted(range(len(dim_order)), key=dim_order.__getitem__)
    sizes = [spec.shape[d] for d in dim_order]
    if spec.runs is not None:
        runs, parts = spec.runs
        flat = flat.view(parts, runs, -1).transpose(0, 1).reshape(-1)
    view = flat.view(sizes).permute(inverse)
    # The stride of a dimension with one element does not affect memory, but may choose a kernel.
    if any(n > 1 and a != b for n, a, b in zip(spec.shape, view.stride(), spec.stride, strict=True)):
        return view
    return view if view.stride() == spec.stride else flat.as_strided(spec.shape, spec.stride)


def flattened(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Undo `view_as`: return all elements in the order of the spec.

    Returns a view if the elements have this order in memory, otherwise a copy.
    """
    found = tensor.permute(spec.dim_order)
    if spec.runs is not None:
        runs, parts = spec.runs
        found = found.reshape(runs, parts, -1).transpose(0, 1)
    return found.reshape(-1)


# Placements, which say what each member of a node's device group holds. torch.distributed.tensor calls them
# Replicate, Shard and Partial.
@dataclass(frozen=True)
class Replicated:
    """A placement in which every member holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Sharded:
    """A placement in which member i holds the i-th of equal parts along `dim`.

    With several `blocks`, `dim` consists of that many equal runs (such as the heads of each sample, if
    samples and heads are one dimension), and member i holds the i-th part of every run. With `turn` t, member
    i holds part i - t modulo the number of members.
    """

    dim: int
    blocks: int = 1
    turn: int = 0

    def __str__(self) -> str:
        turned = f"+{self.turn}" if self.turn else ""
        return (f"S({self.dim})" if self.blocks == 1 else f"S({self.dim},{self.blocks})") + turned

    def parts(self, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the parts of `whole`, one for each of `count` members in their order. Each part is
        contiguous: a view if `whole` has these elements in this order, otherwise a copy."""
        if self.turn:
            own = replace(self, turn=0).parts(whole, count)
            return [own[(i - self.turn) % count] for i in range(count)]
        if self.blocks == 1:
            return [part.contiguous() for part in whole.chunk(count, self.dim)]
        rows = whole.unflatten(self.dim, (self.blocks, count, -1))
        return [
            rows.select(self.dim + 1, i).flatten(self.dim, self.dim + 1).contiguous() for i in range(count)
        ]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole value, from the parts of all members."""
        if self.turn:
            return replace(self, turn=0).joined(
                [parts[(i + self.turn) % len(parts)] for i in range(len(parts))]
            )
        if self.blocks == 1:
            return torch.cat(list(parts), self.dim)
        rows = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.cat(rows, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Partial:
    """A placement in which the value is the sum of the members' tensors."""

    def __str__(self) -> str:
        return "P(sum)"


Placement = Replicated | Sharded | Partial


def is_shift(before: Placement, after: Placement) -> bool:
    """Return whether a change of placement only makes each member send its part to another member."""
    if not isinstance(before, Sharded) or not isinstance(after, Sharded):
        return False
    return before != after and replace(before, turn=0) == replace(after, turn=0)


@dataclass(frozen=True, order=True)
class Slice:
    """A range [start, stop) of samples of the global batch of a step, or of a replica's local batch."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


class Kind(StrEnum):
    """A value's role. A transfer keeps the kind of the value it carries."""

    ACTIVATION = "activation"
    SAVED = "saved"  # from a forward pass, or from BI, to the backward of the same region
    COTANGENT = "cotangent"  # gradient of an activation
    GRAD = "grad"  # gradients of parameters
    BUFFER = "buffer"  # new values of buffers
    LOSS = "loss"
    LOG = "log"
    RESULT = "result"  # a tensor that a forward-only step returns, named "0", "1", ...
    ARGUMENT = "argument"  # tensor arguments of calls of metric objects
    PARAM = "param"  # parameters in a bucket
    COUNT = "count"  # the sums that denominators of the loss are made of
    WEIGHT = "weight"  # the weight of some samples in a term of the loss or in a logged value
    SEED = "seed"  # the gradient with which the backward pass of a term of the loss begins: the term's weight
    METRICS = "metrics"  # loss and logged values of a device, in one tensor

    __hash__ = str.__hash__  # so that a set or mapping finds a kind by its text


@dataclass(frozen=True)
class Value:
    """An output of a node: a bundle of tensors.

    Attributes:
        kind: The role of the bundle.
        names: As in `regions.Output`.
        tensors: Specs of the tensors that each member holds. During the directives they may be
            `regions.LateSpecs`.
        placement: The placement along `DATA`.
        bucket: The layout of the named parameters (or their gradients) in one flat tensor; None if each is a
            tensor of its own.
        others: Axis -> placement along the other axes of the mesh. Axes along which the value is replicated
            are absent. A parameter that is divided along "ep" is `Sharded(0)` along it. So are the rows that
            are dispatched to experts, although members may have different numbers of rows.
        rounded: Dtype to which a gather has rounded the parameters; None if they are not rounded. The tensors
            have the parameters' own dtype.
    """

    kind: Kind
    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    placement: Placement = field(default_factory=Replicated)
    bucket: Bucket | None = None
    others: tuple[tuple[str, Placement], ...] = ()
    rounded: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def label(self) -> str:
        shown = ",".join(self.names[:2]) + (f",+{len(self.names) - 2}" if len(self.names) > 2 else "")
        return f"{self.kind}:{shown}" if shown else self.kind
