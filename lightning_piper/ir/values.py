"""Values: what flows along data edges, and what each device holds of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_piper.ir.buckets import Bucket


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and strides (in elements) of one tensor. Strides are kept across devices, for they choose kernels.

    Attributes:
        runs: (of how many equal runs, how many parts): the slowest dimension is counted part by part, each of which has a part of
            every run. None: as it lies.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    runs: tuple[int, int] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def dim_order(self) -> tuple[int, ...]:
        """Dimensions from the slowest to the fastest in memory: `x.permute(dim_order)` is contiguous for a dense tensor."""
        return tuple(sorted(range(len(self.shape)), key=lambda d: (-self.stride[d], d)))

    def part(self, parts: int) -> TensorSpec:
        """One of equal parts along the slowest dimension, each a run of what is counted."""
        return self._scaled(lambda size: size // parts)

    def of_parts(self, parts: int) -> TensorSpec:
        """What so many parts like this one make up."""
        return self._scaled(lambda size: size * parts)

    def _scaled(self, by: Callable[[int], int]) -> TensorSpec:
        slowest = self.dim_order[0]
        runs = None if self.runs is None else (self.runs[0], by(self.runs[1]))
        return replace(self, shape=tuple(by(size) if d == slowest else size for d, size in enumerate(self.shape)), runs=runs)

    @property
    def layout(self) -> tuple[int, ...]:
        """`dim_order`, by the name that it had before."""
        warnings.warn("TensorSpec.layout is TensorSpec.dim_order now; layout ends with 0.3", DeprecationWarning, stacklevel=2)
        return self.dim_order

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


def view_as(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One dimension -> the spec's shape and strides; a copy where it is counted by runs. Of a tensor with holes in its memory, the
    strides without the holes."""
    dim_order = spec.dim_order
    inverse = sorted(range(len(dim_order)), key=dim_order.__getitem__)
    sizes = [spec.shape[d] for d in dim_order]
    if spec.runs is not None:
        runs, parts = spec.runs
        flat = flat.view(parts, runs, -1).transpose(0, 1).reshape(-1)
    view = flat.view(sizes).permute(inverse)
    # The stride of a dimension with one element says nothing about memory, but may choose a kernel.
    if any(n > 1 and a != b for n, a, b in zip(spec.shape, view.stride(), spec.stride, strict=True)):
        return view
    return view if view.stride() == spec.stride else flat.as_strided(spec.shape, spec.stride)


def flattened(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The reverse of `view_as`; a copy where the tensor lies otherwise."""
    found = tensor.permute(spec.dim_order)
    if spec.runs is not None:
        runs, parts = spec.runs
        found = found.reshape(runs, parts, -1).transpose(0, 1)
    return found.reshape(-1)


# What each member of a node's device group holds of a value; torch.distributed.tensor's own words.
@dataclass(frozen=True)
class Replicate:
    """Every member holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Member i holds the i-th of equal parts along `dim`; of each of `blocks` equal runs of it, if there are several (heads within
    samples, where both are one dimension). Turned by t, it holds part i - t, counted round: that of a member before it."""

    dim: int
    blocks: int = 1
    turn: int = 0

    def __str__(self) -> str:
        turned = f"+{self.turn}" if self.turn else ""
        return (f"S({self.dim})" if self.blocks == 1 else f"S({self.dim},{self.blocks})") + turned

    def parts(self, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
        """What each of `count` members holds: contiguous."""
        if self.turn:
            own = replace(self, turn=0).parts(whole, count)
            return [own[(i - self.turn) % count] for i in range(count)]
        if self.blocks == 1:
            return [part.contiguous() for part in whole.chunk(count, self.dim)]
        rows = whole.unflatten(self.dim, (self.blocks, count, -1))
        return [rows.select(self.dim + 1, i).flatten(self.dim, self.dim + 1).contiguous() for i in range(count)]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of what members hold."""
        if self.turn:
            return replace(self, turn=0).joined([parts[(i + self.turn) % len(parts)] for i in range(len(parts))])
        if self.blocks == 1:
            return torch.cat(list(parts), self.dim)
        rows = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.cat(rows, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Partial:
    """The value is the sum of what the members hold."""

    def __str__(self) -> str:
        return "P(sum)"


Placement = Replicate | Shard | Partial


def is_shift(before: Placement, after: Placement) -> bool:
    """Does each member send its part, as it is, to one other, when it gets another placement?"""
    if not isinstance(before, Shard) or not isinstance(after, Shard):
        return False
    return before != after and replace(before, turn=0) == replace(after, turn=0)


@dataclass(frozen=True, order=True)
class Slice:
    """Samples [start, stop) of the global batch of one step."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


class Kind(StrEnum):
    """What a value is. Transfers keep the kind of what they carry."""

    ACTIVATION = "activation"
    SAVED = "saved"  # from a forward pass, or from BI, to the backward of the same region
    COTANGENT = "cotangent"  # gradient of an activation
    GRAD = "grad"  # of parameters
    BUFFER = "buffer"  # new values of buffers
    LOSS = "loss"
    LOG = "log"
    RESULT = "result"  # tensors of what a forward-only step returns, by their numbers
    ARGUMENT = "argument"  # tensors that metric objects are updated with
    PARAM = "param"  # parameters in a bucket
    COUNT = "count"  # of what the denominators of a loss count
    WEIGHT = "weight"  # of some samples in a term of the loss, or in a logged value
    SEED = "seed"  # the gradient of a term of the loss, with its weight
    METRICS = "metrics"  # loss and logged values of a device, in one tensor

    __hash__ = str.__hash__  # it is its text, also in sets and mappings


@dataclass(frozen=True)
class Value:
    """One output of a node: a bundle of tensors.

    Attributes:
        kind: what it is.
        names: as in `regions.Output`.
        tensors: specs of what each member holds.
        placement: what the members along `DATA` hold.
        bucket: the named parameters (or their gradients) lie in one flat tensor, in this way; None: each is a tensor.
        others: axis -> placement along the other axes of the mesh, of those along which the value is not replicated. A parameter
            divided along "ep" is `Shard(0)` there, and so are rows on their way to its parts: as many on each as it was sent.
    """

    kind: Kind
    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    placement: Placement = field(default_factory=Replicate)
    bucket: Bucket | None = None
    others: tuple[tuple[str, Placement], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def label(self) -> str:
        shown = ",".join(self.names[:2]) + (f",+{len(self.names) - 2}" if len(self.names) > 2 else "")
        return f"{self.kind}:{shown}" if shown else self.kind
