"""Buckets: parameters, or their gradients, that lie one after another in one flat tensor.

What is communicated together lies together: a bucket is one message. Sharded over R members, each has one R-th of the flat tensor,
wherever that cuts through the parameters (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models, 2020).

Parameters may be divided along another axis of the mesh first: a device has one of equal parts along a dimension. Then a
bucket holds such parts, and is sharded along the axis of data, over those who have the same one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.values import Shard, TensorSpec, view_as

if TYPE_CHECKING:
    from lightning_piper.ir.regions import ParamInfo

# Elements to which each tensor and shard is aligned. At least the 64 bytes to which torch aligns the tensors that it makes, for
# alignment chooses kernels, and so bits; and the same in every dtype, so that shards of gradients and of parameters match.
ALIGNMENT = 64


@dataclass(frozen=True)
class Bucket:
    """Parameters, or their gradients, one after another in one flat tensor.

    Attributes:
        names: of the parameters, in the order in which they lie.
        tensors: their specs (of their parts). Each is laid out in the order of its own memory, so that its view has its own
            strides.
        mesh: the flat tensor is sharded along `DATA`, and padded until the shards are equal.
        dtype: of the flat tensor; gradients may be summed in another dtype than theirs.
        along: the other axes of the mesh along which the parameters are divided, so that the tensors are parts of them; along the
            rest of them, all places have the same.
        by_parameter: no shard ends within a tensor: each member has some tensors, whole, about as many elements as the others.
    """

    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    mesh: Mesh
    dtype: torch.dtype
    by_parameter: bool = False
    along: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.mesh.shape, self.dtype))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, in elements."""
        if not self.by_parameter:
            return tuple(itertools.accumulate(self._sizes, initial=0))[:-1]
        filled = [0] * self.members
        offsets = []
        for member, size in zip(self._owners, self._sizes, strict=True):
            offsets.append(member * self.shard + filled[member])
            filled[member] += size
        return tuple(offsets)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Elements that each tensor takes."""
        return tuple(-(-spec.numel // ALIGNMENT) * ALIGNMENT for spec in self.tensors)

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        """The member that has each tensor, where it has all of it: the largest first, to whoever has least."""
        filled, owners = [0] * self.members, [0] * len(self.tensors)
        for i in sorted(range(len(self.tensors)), key=lambda i: (-self._sizes[i], i)):
            owners[i] = min(range(self.members), key=filled.__getitem__)
            filled[owners[i]] += self._sizes[i]
        return tuple(owners)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of elements that belong to no tensor."""
        ranges = sorted((start, start + spec.numel) for start, spec in zip(self.offsets, self.tensors, strict=True))
        edges = zip([0, *(end for _, end in ranges)], [*(start for start, _ in ranges), self.numel], strict=True)
        return tuple((end, start) for end, start in edges if end < start)

    @cached_property
    def shard(self) -> int:
        """Elements of one member's part."""
        if self.by_parameter:
            pairs = list(zip(self._owners, self._sizes, strict=True))
            return max(sum(size for owner, size in pairs if owner == member) for member in range(self.members))
        used = self.offsets[-1] + self.tensors[-1].numel
        return -(-used // (self.members * ALIGNMENT)) * ALIGNMENT

    @property
    def numel(self) -> int:
        return self.shard * self.members

    @property
    def whole(self) -> TensorSpec:
        """The flat tensor."""
        return TensorSpec((self.numel,), self.dtype, (1,))

    @property
    def part(self) -> TensorSpec:
        """One member's shard of it."""
        return TensorSpec((self.shard,), self.dtype, (1,))

    @cached_property
    def members(self) -> int:
        """Number of shards."""
        return self.mesh.size(DATA)

    @property
    def others(self) -> tuple[tuple[str, Shard], ...]:
        """As in `Value.others`."""
        return tuple((axis, Shard(0)) for axis in self.along)

    @property
    def degree(self) -> int:
        """Parts into which each parameter is divided."""
        return math.prod(map(self.mesh.size, self.along))

    @property
    def wholes(self) -> tuple[TensorSpec, ...]:
        """Specs of the whole parameters."""
        return tuple(spec.of_parts(self.degree) if self.degree > 1 else spec for spec in self.tensors)

    @property
    def whole_tensors(self) -> bool:
        """Does a shard have whole parameters?"""
        return self.by_parameter and self.degree == 1

    def part_of(self, replica: int) -> int:
        """Which part of the parameters a replica has."""
        return self.mesh.part(replica, self.along)

    def shard_group(self, replica: int) -> tuple[int, ...]:
        """The replicas over which the bucket is sharded that this one has a shard of, in the order of the shards."""
        return self.mesh.line(DATA, replica)

    def member(self, replica: int) -> int:
        """Which shard a replica has."""
        return self.shard_group(replica).index(replica)

    def own(self, name: str, whole: torch.Tensor, replica: int) -> torch.Tensor:
        """What a replica has of a parameter: a view of it."""
        return self.cut(name, whole, self.part_of(replica))

    def cut(self, name: str, whole: torch.Tensor, part: int) -> torch.Tensor:
        """A part of a parameter; a view of it, if it is not one of runs."""
        if self.degree == 1:
            return whole
        placement = self.placement_of(name)
        if placement.blocks > 1:
            return placement.parts(whole, self.degree)[part]
        return whole.chunk(self.degree, placement.dim)[part]

    def placement_of(self, name: str) -> Shard:
        """How a parameter is divided: along the slowest dimension in memory, so that a part is a run of elements."""
        spec = self.tensors[self.names.index(name)]
        return Shard(spec.dim_order[0], 1 if spec.runs is None else spec.runs[0])

    def local_shards(self, replica: int) -> Iterator[tuple[str, int, int, int]]:
        """What a replica's shard holds: name, and elements `start:stop` of that parameter (in the order of its memory), which
        lie in the shard from `offset` on."""
        first = self.member(replica) * self.shard
        last, part = first + self.shard, self.part_of(replica)
        for name, spec, begin in zip(self.names, self.tensors, self.offsets, strict=True):
            start, stop = max(first, begin), min(last, begin + spec.numel)
            if start < stop:
                before = part * spec.numel - begin
                yield name, start + before, stop + before, start - first

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A flat tensor without content, but for zeros in the gaps."""
        return self.without_gaps(torch.empty(self.numel, dtype=self.dtype, device=device))

    def without_gaps(self, flat: torch.Tensor) -> torch.Tensor:
        """The flat tensor, with zeros in the gaps."""
        for start, stop in self.gaps:
            flat[start:stop].zero_()
        return flat

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors in `flat`, with the strides of their specs."""
        first = flat.storage_offset()
        return tuple(flat.as_strided(shape, stride, first + start) for shape, stride, start in self._layout)

    @cached_property
    def _layout(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, stride and beginning of each tensor."""
        strides = (view_as(torch.empty(spec.numel, device="meta"), spec).stride() for spec in self.tensors)
        return tuple((s.shape, stride, start) for s, stride, start in zip(self.tensors, strides, self.offsets, strict=True))

    def in_dtype(self, dtype: torch.dtype) -> Bucket:
        """The same parameters, at the same places of a flat tensor of another dtype."""
        return replace(self, dtype=dtype)


@torch.no_grad()
def packed(bucket: Bucket, tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """The named tensors (parts, where the bucket holds parts) in a new flat tensor of a bucket."""
    flat = bucket.empty(device)
    for name, view in zip(bucket.names, bucket.views(flat), strict=True):
        view.copy_(tensors[name])
    return flat


def packed_params(bucket: Bucket, params: Mapping[str, torch.Tensor], replica: int, device: torch.device | str) -> torch.Tensor:
    """A bucket of whole parameters, as a replica has it: with its parts of them."""
    return packed(bucket, {name: bucket.own(name, params[name], replica) for name in bucket.names}, device)


def buckets_of(
    params: Sequence[ParamInfo],
    size: int,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    by_parameter: bool = False,
    along: tuple[str, ...] = (),
) -> list[Bucket]:
    """Parameters in buckets: of one dtype, in order, each closed as soon as it has `size` bytes.

    Args:
        params: that are to lie in buckets; parts of them, where the mesh divides them.
        size: bytes.
        mesh, by_parameter, along: as in `Bucket`.
        dtype: of the flat tensors; None for the parameters' own.
    """
    found: list[list[ParamInfo]] = []
    open_: dict[torch.dtype, tuple[list[ParamInfo], int]] = {}
    for info in params:
        bucket, filled = open_.get(info.spec.dtype, ([], size))
        if filled >= size:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(info)
        open_[info.spec.dtype] = (bucket, filled + info.spec.nbytes)
    return [
        Bucket(tuple(p.name for p in each), tuple(p.spec for p in each), mesh, dtype or each[0].spec.dtype, by_parameter, along)
        for each in found
    ]
