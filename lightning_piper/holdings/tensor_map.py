"""Which process holds which elements of which parameter and buffer.

A *holder group* is a set of processes that have one tensor between them: every one all of it, or each a local shard, where a
directive shards it. A parameter that stages on different devices share has several holder groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.values import TensorSpec, view_as
from lightning_piper.ops.gather import Parameters
from lightning_piper.processes.world import RANK_ZERO

Range = tuple[int, int]  # elements start:stop of a tensor, in the order of its memory


@dataclass(frozen=True)
class HolderGroup:
    """Processes that have one tensor between them.

    Attributes:
        ranges: rank -> what it holds, by ascending rank. Ranks that hold nothing are absent.
        bucket: in which the tensor is sharded; None if every rank holds all of it.
    """

    ranges: Mapping[int, Range]
    bucket: Bucket | None = None

    @property
    def canonical_holders(self) -> Mapping[int, Range]:
        """The ranks that have each element exactly once: of those that have the same ones, the first."""
        first: dict[Range, int] = {}
        for rank, elements in self.ranges.items():
            first.setdefault(elements, rank)
        return {rank: elements for elements, rank in first.items()}


@dataclass(frozen=True)
class LocalShard:
    """Elements of a parameter, a buffer, or a tensor of the optimizer's state that belongs to a parameter.

    Attributes:
        name: canonical name of the parameter or buffer.
        shape, dtype: of the whole tensor.
        start, stop: which of its elements, in the order of the parameter's memory.
        tensor: one dimension, `stop - start` elements.
        key: of the optimizer's state; empty for the parameter or buffer itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    tensor: torch.Tensor
    key: str = ""


class TensorMap:
    """Which process holds which elements of which parameter and buffer.

    Attributes:
        holder_groups: canonical name -> its holder groups. The first one is canonical: its values go into checkpoints and norms.
        unused: names of what no training program has changed so far. Every process holds it, for hooks or other steps.
        specs: canonical name -> spec of the whole tensor.
    """

    def __init__(self, compiled: Compiled, size: int) -> None:
        """For `size` processes, of which rank i is logical device i; one process holds everything."""
        self._size = size
        self.specs: dict[str, TensorSpec] = {name: info.spec for name, info in compiled.step.params.items()}
        self.specs |= compiled.step.buffers
        self._params = compiled.step.params
        self.holder_groups: dict[str, tuple[HolderGroup, ...]] = {}
        self.unused: set[str] = set()
        if size == 1:
            self.holder_groups = {name: (HolderGroup({RANK_ZERO: (0, spec.numel)}),) for name, spec in self.specs.items()}
            return
        sharded, covered = _sharded(compiled)
        used: dict[str, list[int]] = {}
        for device in sorted(compiled.plans):
            for name in compiled.params_on(device) | compiled.buffers_on(device):
                if (device, name) not in covered:
                    used.setdefault(name, []).append(device)
        for name in self.specs:
            holder_groups = sharded.get(name, [])
            if name not in used and not holder_groups:
                used[name] = list(range(size))
                self.unused.add(name)
            if name in used:
                holder_groups = [*holder_groups, self._whole_on(used[name], name)]
            self.holder_groups[name] = tuple(sorted(holder_groups, key=lambda group: min(group.ranges, default=size)))

    def claim(self, compiled: Compiled, changes: Callable[[str, int], bool]) -> set[str]:
        """A training program comes that may be the first to change something. What some processes alone change is theirs from now
        on. Returns its names.

        Args:
            changes: does the program change a tensor of this name on a device that uses it?
        """
        claimed = set()
        for name in sorted(self.unused):
            users = [d for d in sorted(compiled.plans) if name in compiled.params_on(d) | compiled.buffers_on(d)]
            if not any(changes(name, device) for device in users):
                continue
            self.unused.discard(name)
            if len(users) < self._size:
                claimed.add(name)
                self.holder_groups = {**self.holder_groups, name: (self._whole_on(users, name),)}
        return claimed

    def _whole_on(self, ranks: Sequence[int], name: str) -> HolderGroup:
        return HolderGroup(dict.fromkeys(ranks, (0, self.specs[name].numel)))

    def held(self, name: str, rank: int) -> Range | None:
        """The elements that a process holds; None if it holds none."""
        return next((group.ranges[rank] for group in self.holder_groups[name] if rank in group.ranges), None)

    def whole(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """All elements of a tensor, in one dimension -> the tensor as the module has it."""
        return self._params[name].whole(flat) if name in self._params else view_as(flat, self.specs[name])

    def holds_whole(self, name: str, rank: int) -> bool:
        return any(group.bucket is None and rank in group.ranges for group in self.holder_groups[name])

    def is_sharded(self, name: str) -> bool:
        """Does any process hold a shard instead of the whole?"""
        return any(group.bucket is not None for group in self.holder_groups[name])

    @property
    def is_replicated(self) -> bool:
        """Does every process hold everything whole?"""
        return all(
            any(group.bucket is None and len(group.ranges) == self._size for group in groups)
            for groups in self.holder_groups.values()
        )

    def canonical_range(self, name: str, rank: int) -> Range | None:
        """The elements that a process has as a member of the canonical group: those of `canonical_holders`, or a replica of
        them."""
        return self.holder_groups[name][0].ranges.get(rank)

    def canonical_holders(self, name: str) -> Mapping[int, Range]:
        """Rank -> the elements of which it is the canonical holder; each element once."""
        return self.holder_groups[name][0].canonical_holders


def _sharded(compiled: Compiled) -> tuple[dict[str, list[HolderGroup]], set[tuple[int, str]]]:
    """The holder groups of what is sharded, and all (device, name) of which the device has at most a shard."""
    holder_groups: dict[str, list[HolderGroup]] = {}
    covered: set[tuple[int, str]] = set()
    for bucket, devices in buckets_of_parameters(compiled):
        ranges: dict[str, dict[int, Range]] = {name: {} for name in bucket.names}
        for device in sorted(devices):
            for name, start, stop, _ in bucket.local_shards(compiled.plans.place_of(device)):
                ranges[name][device] = (start, stop)
        for name, found in ranges.items():
            twice = [device for device in devices if (device, name) in covered]
            if twice:
                raise PiperError(
                    f"parameter {name!r} lies in two buckets of device {twice[0]}; give the directives that shard it the same "
                    "bucket_size"
                )
            covered.update((device, name) for device in devices)
            holder_groups.setdefault(name, []).append(HolderGroup(found, None if bucket.whole_tensors else bucket))
    return holder_groups, covered


def buckets_of_parameters(compiled: Compiled) -> Iterator[tuple[Bucket, tuple[int, ...]]]:
    """Every bucket of which devices have shards, with the devices that have all of it together."""
    for node in compiled.dag.of_type(Parameters):
        bucket = node.outputs[0].bucket
        assert bucket is not None
        yield bucket, node.devices
