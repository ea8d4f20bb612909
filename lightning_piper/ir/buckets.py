"""Buckets: parameters, or their gradients, one after another in one flat tensor.

A bucket is one message, so tensors that are communicated together are adjacent in memory. A bucket sharded
over R members gives each member one R-th of the flat tensor, even if a cut goes through a parameter
(Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020).

Parameters may first be divided along another axis of the mesh: each device then has one of several equal
parts along a dimension. A bucket then holds such parts. It is sharded along the data axis, over the devices
that have the same parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from lightning_piper.ir.mesh import DATA, GROUPS, Mesh
from lightning_piper.ir.owners import Owners
from lightning_piper.ir.values import Partial, Placement, Sharded, TensorSpec, view_as

if TYPE_CHECKING:
    from lightning_piper.ir.regions import ParamInfo

# Offsets of tensors and sizes of shards are multiples of this many elements. torch aligns its own tensors to
# 64 bytes. Buckets align at least as much, because alignment chooses kernels and thereby bits. The alignment
# is in elements, not in bytes, so that shards of gradients and of parameters match in every dtype.
ALIGNMENT = 64


@dataclass(frozen=True)
class Bucket:
    """A flat tensor of parameters, or of their gradients, one after another.

    Attributes:
        names: Names of the parameters, in their order in the flat tensor.
        tensors: Specs of the parameters, or of their parts. Each tensor keeps its own memory order, so that
            its view in the bucket has its own strides.
        mesh: The mesh along whose `DATA` axis the flat tensor is sharded; the padding makes the shards equal. With an
            axis `GROUPS`, each group along it has all shards, and gradients are also terms of a sum along it.
        dtype: Dtype of the flat tensor. It may differ from the dtype of the gradients that are summed in it.
        along: The other mesh axes along which the parameters are divided, so that the tensors are parts.
            Along the remaining axes, all group ranks have the same parts.
        owners: For each tensor, the member that has it whole, so that no shard ends within a tensor. None: all
            shards are equal parts of the flat tensor.
    """

    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    mesh: Mesh
    dtype: torch.dtype
    owners: tuple[int, ...] | None = None
    along: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.mesh.shape, self.dtype))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor, in elements."""
        if self.owners is None:
            return tuple(itertools.accumulate(self._sizes, initial=0))[:-1]
        filled = [0] * self.members
        offsets = []
        for member, size in zip(self.owners, self._sizes, strict=True):
            offsets.append(member * self.shard + filled[member])
            filled[member] += size
        return tuple(offsets)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """The padded size of each tensor, in elements."""
        return tuple(map(_padded, self.tensors))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges (start, stop) of elements that do not belong to a tensor, in ascending order."""
        ranges = sorted(
            (start, start + spec.numel) for start, spec in zip(self.offsets, self.tensors, strict=True)
        )
        edges = zip(
            [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), self.numel], strict=True
        )
        return tuple((end, start) for end, start in edges if end < start)

    @cached_property
    def shard(self) -> int:
        """The number of elements of one member's shard. All shards have the same size, with padding."""
        if self.owners is not None:
            filled = [0] * self.members
            for owner, size in zip(self.owners, self._sizes, strict=True):
                filled[owner] += size
            return max(filled)
        used = self.offsets[-1] + self.tensors[-1].numel
        return -(-used // (self.members * ALIGNMENT)) * ALIGNMENT

    @property
    def numel(self) -> int:
        return self.shard * self.members

    @property
    def whole(self) -> TensorSpec:
        """Spec of the flat tensor."""
        return TensorSpec((self.numel,), self.dtype, (1,))

    @property
    def part(self) -> TensorSpec:
        """Spec of one member's shard."""
        return TensorSpec((self.shard,), self.dtype, (1,))

    @cached_property
    def members(self) -> int:
        """Number of shards."""
        return self.mesh.size(DATA)

    @property
    def groups(self) -> int:
        """Number of groups that each have all shards."""
        return self.mesh.size(GROUPS)

    @property
    def terms(self) -> int:
        """Number of group ranks that have terms of the sum of a gradient."""
        return self.groups * self.members

    @property
    def others(self) -> tuple[tuple[str, Placement], ...]:
        """The placements along `along`, in the form of `Value.others`."""
        return tuple((axis, Sharded(0)) for axis in self.along)

    @property
    def others_before_groups(self) -> tuple[tuple[str, Placement], ...]:
        """`others` of a shard of gradients that the groups have not summed yet."""
        return (*self.others, (GROUPS, Partial())) if self.groups > 1 else self.others

    @property
    def degree(self) -> int:
        """The number of parts into which each parameter is divided."""
        return math.prod(map(self.mesh.size, self.along))

    @property
    def wholes(self) -> tuple[TensorSpec, ...]:
        """Specs of the undivided parameters."""
        return tuple(spec.of_parts(self.degree) if self.degree > 1 else spec for spec in self.tensors)

    @property
    def whole_tensors(self) -> bool:
        """Whether each shard consists of undivided parameters."""
        return self.owners is not None and self.degree == 1

    def part_of(self, replica: int) -> int:
        """Return the index of the part of each parameter that group rank `replica` has."""
        return self.mesh.part(replica, self.along)

    def shard_group(self, replica: int) -> tuple[int, ...]:
        """Return the group ranks that divide the bucket with group rank `replica`, in the order of their
        shards."""
        return self.mesh.line(DATA, replica)

    def same_shard(self, replica: int) -> tuple[int, ...]:
        """Return the group ranks that have the same shard as group rank `replica`, one of each group."""
        return self.mesh.line(GROUPS, replica) if self.groups > 1 else (replica,)

    def is_summed_along(self, mesh: Mesh) -> bool:
        """Return whether the group ranks that have terms of this bucket's sums are the lines of `mesh` along `DATA`, and
        the bucket's parameters are divided as along `mesh`."""
        if self.groups == 1:
            return self.mesh == mesh
        blocks = self.mesh.blocks((GROUPS, DATA))
        return set(map(frozenset, blocks)) == set(map(frozenset, mesh.lines(DATA))) and all(
            self.mesh.part(block[0], self.along) == mesh.part(block[0], self.along) for block in blocks
        )

    def member(self, replica: int) -> int:
        """Return the index of the shard that group rank `replica` has."""
        return self.shard_group(replica).index(replica)

    def own(self, name: str, whole: torch.Tensor, replica: int) -> torch.Tensor:
        """Return the part of a parameter that group rank `replica` has (see `cut`)."""
        return self.cut(name, whole, self.part_of(replica))

    def cut(self, name: str, whole: torch.Tensor, part: int) -> torch.Tensor:
        """Return one part of a parameter: a copy if the parameter has `TensorSpec.runs`, otherwise a view. If
        the bucket has whole parameters, return the parameter."""
        if self.degree == 1:
            return whole
        placement = self.placement_of(name)
        if placement.blocks > 1:
            return placement.parts(whole, self.degree)[part]
        return whole.chunk(self.degree, placement.dim)[part]

    def placement_of(self, name: str) -> Sharded:
        """Return how a parameter is divided: along its slowest dimension, so that parts are contiguous."""
        spec = self.tensors[self.names.index(name)]
        return Sharded(spec.dim_order[0], 1 if spec.runs is None else spec.runs[0])

    def local_shards(self, replica: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield (name, `start`, `stop`, `offset`) for each parameter with elements in the shard of group rank
        `replica`.

        Elements `start:stop` of the undivided parameter begin at element `offset` of the shard. They are
        counted in memory order, or part by part if the spec has `TensorSpec.runs`.
        """
        first = self.member(replica) * self.shard
        last, part = first + self.shard, self.part_of(replica)
        for name, spec, begin in zip(self.names, self.tensors, self.offsets, strict=True):
            start, stop = max(first, begin), min(last, begin + spec.numel)
            if start < stop:
                before = part * spec.numel - begin
                yield name, start + before, stop + before, start - first

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialized flat tensor with zeros in the gaps."""
        return self.without_gaps(torch.empty(self.numel, dtype=self.dtype, device=device))

    def whole_with(self, held: torch.Tensor, replica: int) -> torch.Tensor:
        """Return a flat tensor of the bucket that contains `held`, the shard of group rank `replica`, and is 0 elsewhere.
        Return `held` itself if it is the whole flat tensor."""
        if held.numel() == self.numel:
            return held
        flat = held.new_zeros(self.numel)
        flat.chunk(self.members)[self.member(replica)].copy_(held)
        return flat

    def without_gaps(self, flat: torch.Tensor) -> torch.Tensor:
        """Zero the gaps of a flat tensor in place, and return it."""
        for start, stop in self.gaps:
            flat[start:stop].zero_()
        return flat

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the tensors in `flat`, with the strides of their specs."""
        first = flat.storage_offset()
        return tuple([flat.as_strided(shape, stride, first + start) for shape, stride, start in self._layout])

    @cached_property
    def _layout(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, strides and offset of each tensor."""
        strides = (view_as(torch.empty(spec.numel, device="meta"), spec).stride() for spec in self.tensors)
        return tuple(
            (s.shape, stride, start)
            for s, stride, start in zip(self.tensors, strides, self.offsets, strict=True)
        )

    def in_dtype(self, dtype: torch.dtype) -> Bucket:
        """Return a bucket of the same parameters, at the same offsets, with another dtype."""
        return replace(self, dtype=dtype)


@torch.no_grad()
def packed(bucket: Bucket, tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Copy tensors (parts, if the bucket holds parts) by their names into a new flat tensor."""
    return packed_among(bucket, bucket.names, tensors, device)


@torch.no_grad()
def packed_among(
    bucket: Bucket, names: Iterable[str], tensors: Mapping[str, torch.Tensor], device: torch.device | str
) -> torch.Tensor:
    """Copy the tensors `names` into a new flat tensor, with zeros in the places of the bucket's other
    tensors."""
    flat, own = bucket.empty(device), frozenset(names)
    for name, view in zip(bucket.names, bucket.views(flat), strict=True):
        if name in own:
            view.copy_(tensors[name])
        else:
            view.zero_()
    return flat


def packed_params(
    bucket: Bucket, params: Mapping[str, torch.Tensor], replica: int, device: torch.device | str
) -> torch.Tensor:
    """Copy the parts that group rank `replica` has of the parameters into a new flat tensor. `params` maps
    names to undivided parameters."""
    return packed(bucket, {name: bucket.own(name, params[name], replica) for name in bucket.names}, device)


def buckets_of(
    params: Sequence[ParamInfo],
    size: int,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    owners: Owners | None = None,
    along: tuple[str, ...] = (),
) -> list[Bucket]:
    """Return new buckets of parameters, in the order of each bucket's first parameter; empty without
    parameters. Parameters of one bucket have the same dtype and keep their order.

    Args:
        params: The parameters to assign. If they are divided, their specs are the specs of parts.
        size: A bucket gets no further parameter once it has this many bytes. With `owners`, a parameter counts for at
            most the share of one member, and a last bucket with fewer bytes joins the bucket before it. So all
            members have about as many elements of a bucket, if there are enough parameters.
        mesh, along: As in `Bucket`.
        dtype: Dtype of the flat tensors; None for the parameters' own dtype.
        owners: Chooses the member that has each parameter whole. None: shards cut through parameters.
    """
    share = -(-size // mesh.size(DATA))
    found: list[list[ParamInfo]] = []
    lists_of: dict[torch.dtype, list[list[ParamInfo]]] = {}
    filled: dict[torch.dtype, int] = {}  # bytes that count for the last list of a dtype
    for info in params:
        own = info.spec.dtype
        if filled.get(own, size) >= size:
            found.append([])
            lists_of.setdefault(own, []).append(found[-1])
            filled[own] = 0
        lists_of[own][-1].append(info)
        filled[own] += info.spec.nbytes if owners is None else min(info.spec.nbytes, share)
    for own, lists in lists_of.items():
        if owners is not None and filled[own] < size and len(lists) > 1:
            lists[-2].extend(lists[-1])
            lists[-1].clear()
    buckets = []
    for each in filter(None, found):
        specs = tuple(p.spec for p in each)
        chosen = None if owners is None else owners.assign(specs, tuple(map(_padded, specs)))
        kind = dtype or specs[0].dtype
        buckets.append(Bucket(tuple(p.name for p in each), specs, mesh, kind, chosen, along))
    return buckets


def _padded(spec: TensorSpec) -> int:
    """Return the number of elements of a tensor, with padding."""
    return -(-spec.numel // ALIGNMENT) * ALIGNMENT
