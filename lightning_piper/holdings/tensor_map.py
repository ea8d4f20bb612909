"""Which process holds which elements of which parameter and buffer.

A *holder group* is a set of processes that together have one tensor. Each process has the whole tensor, or a
local shard if a directive shards the tensor. A parameter that stages on different devices share has several
holder groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import Place, tensor_at
from lightning_piper.ir.buckets import Bucket, packed
from lightning_piper.ir.values import TensorSpec, view_as
from lightning_piper.ops.communication.gather import Parameters
from lightning_piper.processes.world import RANK_ZERO

Range = tuple[int, int]  # elements start:stop of a tensor, in the order of its memory


@dataclass(frozen=True)
class HolderGroup:
    """A group of processes that together have one tensor.

    Attributes:
        ranges: Rank -> the elements that it holds, by ascending rank. Ranks that hold nothing are absent.
        bucket: The bucket in which the tensor is sharded; None if every rank holds all of it.
    """

    ranges: Mapping[int, Range]
    bucket: Bucket | None = None

    @property
    def canonical_holders(self) -> Mapping[int, Range]:
        """Rank -> elements. Together, these ranks have each element exactly once. Of several ranks with the
        same elements, only the first is in the result. For example, of replicas that hold a whole tensor,
        only the first is: `{0: (0, 12)}`."""
        first: dict[Range, int] = {}
        for rank, elements in self.ranges.items():
            first.setdefault(elements, rank)
        return {rank: elements for elements, rank in first.items()}


@dataclass(frozen=True)
class LocalShard:
    """Elements of a parameter, a buffer, or a tensor of the optimizer's state that belongs to a parameter.

    Attributes:
        name: Canonical name of the parameter or buffer.
        shape: Shape of the whole tensor.
        dtype: Dtype of the whole tensor.
        start: Index of the first of these elements in the whole tensor, in the order of the parameter's
            memory.
        stop: Index after the last of these elements.
        tensor: The elements in one dimension: `stop - start` numbers.
        key: Key of the optimizer's state; empty for the parameter or buffer itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    tensor: torch.Tensor
    key: str = ""


class TensorMap:
    """A map from parameters and buffers to the processes that hold their elements.

    Attributes:
        holder_groups: Canonical name -> its holder groups. The first one is canonical: its values go into
            checkpoints and norms.
        unused: Names of tensors that no device of the program uses, and that no later training program has
            changed. Every process holds these tensors, because hooks or other steps may use them.
        specs: Canonical name -> spec of the whole tensor.
        canonical: Each name of a parameter or buffer -> its canonical name.
    """

    def __init__(self, compiled: Compiled, size: int) -> None:
        """Map the tensors of a program to `size` processes. Rank i is logical device i. A single process
        holds everything."""
        self._size = size
        self.specs: dict[str, TensorSpec] = {name: info.spec for name, info in compiled.step.params.items()}
        self.specs |= compiled.step.buffers
        self._params, self.canonical = compiled.step.params, compiled.step.canonical
        self.holder_groups: dict[str, tuple[HolderGroup, ...]] = {}
        self.unused: set[str] = set()
        if size == 1:
            self.holder_groups = {
                name: (HolderGroup({RANK_ZERO: (0, spec.numel)}),) for name, spec in self.specs.items()
            }
            return
        sharded, covered = _sharded(compiled)
        used: dict[str, list[int]] = {}  # name -> the devices that use the tensor and hold it whole
        for device in sorted(compiled.plans):
            for name in compiled.params_on(device) | compiled.buffers_on(device):
                if (device, name) not in covered:
                    used.setdefault(name, []).append(device)
        for name in self.specs:
            holder_groups = sharded.get(name, [])
            if name not in used and not holder_groups:  # no device uses the tensor, so all hold it
                used[name] = list(range(size))
                self.unused.add(name)
            if name in used:
                holder_groups = [*holder_groups, self._whole_on(used[name], name)]
            self.holder_groups[name] = tuple(
                sorted(holder_groups, key=lambda group: min(group.ranges, default=size))
            )

    def restrict(self, compiled: Compiled, changes: Callable[[str, int], bool]) -> set[str]:
        """Remove from `unused` the tensors that a training program changes on any device. If only some
        processes use such a tensor, only these processes hold it from now on.

        Args:
            compiled: The training program.
            changes: Gets the name of a tensor and a device that uses it. Returns whether the program changes
                the tensor there.

        Returns:
            The names of the tensors that some processes no longer hold.
        """
        restricted = set()
        for name in sorted(self.unused):
            users = [
                d for d in sorted(compiled.plans) if name in compiled.params_on(d) | compiled.buffers_on(d)
            ]
            if not any(changes(name, device) for device in users):
                continue
            self.unused.discard(name)
            if len(users) < self._size:
                restricted.add(name)
                self.holder_groups = {**self.holder_groups, name: (self._whole_on(users, name),)}
        return restricted

    def _whole_on(self, ranks: Sequence[int], name: str) -> HolderGroup:
        return HolderGroup(dict.fromkeys(ranks, (0, self.specs[name].numel)))

    def held(self, name: str, rank: int) -> Range | None:
        """Return the range of elements of a tensor that a process holds; None if it holds no elements. If the
        process is in several holder groups, this is its range in the first."""
        return next((group.ranges[rank] for group in self.holder_groups[name] if rank in group.ranges), None)

    def whole(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat`, all elements of a parameter or buffer in one dimension, with the module's shape and
        strides."""
        return self._params[name].whole(flat) if name in self._params else view_as(flat, self.specs[name])

    def joined(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return name -> whole value, from the elements in one dimension that count on each process, by rank."""
        found: dict[str, torch.Tensor] = {}
        for name in {name: None for names in parts for name in names}:
            holders = self.canonical_holders(name)
            ranks = [rank for rank, _ in sorted(holders.items(), key=lambda each: each[1])]
            found[name] = self.whole(name, torch.cat([parts[rank][name] for rank in ranks]))
        return found

    def holds_whole(self, name: str, rank: int) -> bool:
        return any(group.bucket is None and rank in group.ranges for group in self.holder_groups[name])

    def is_sharded(self, name: str) -> bool:
        """Return whether any process holds a shard instead of the whole tensor."""
        return any(group.bucket is not None for group in self.holder_groups[name])

    @property
    def is_replicated(self) -> bool:
        """Whether every process holds every tensor whole."""
        return all(
            any(group.bucket is None and len(group.ranges) == self._size for group in groups)
            for groups in self.holder_groups.values()
        )

    def canonical_range(self, name: str, rank: int) -> Range | None:
        """Return the elements that a process holds as a member of the canonical group. Return None if it is
        not a member. Only one of the members with the same elements is their canonical holder."""
        return self.holder_groups[name][0].ranges.get(rank)

    def canonical_holders(self, name: str) -> Mapping[int, Range]:
        """Return, by rank, the elements whose canonical holder is the rank. Each element occurs once."""
        return self.holder_groups[name][0].canonical_holders


def _sharded(compiled: Compiled) -> tuple[dict[str, list[HolderGroup]], set[tuple[int, str]]]:
    """Return the holder groups of the tensors in buckets (name -> groups), and the set of all (device, name)
    such that the device is one of those that together have the bucket of this tensor.

    Raises:
        PiperError: A parameter lies in two buckets of a device.
    """
    holder_groups: dict[str, list[HolderGroup]] = {}
    covered: set[tuple[int, str]] = set()
    for bucket, devices in buckets_of_parameters(compiled):
        ranges: dict[str, dict[int, Range]] = {name: {} for name in bucket.names}
        for device in sorted(devices):
            for name, start, stop, _ in bucket.local_shards(compiled.plans.group_rank_of(device)):
                ranges[name][device] = (start, stop)
        for name, found in ranges.items():
            twice = [device for device in devices if (device, name) in covered]
            if twice:
                raise PiperError(
                    f"parameter {name!r} is in two buckets of device {twice[0]}. If you wrote a directive, put it "
                    "into one bucket. Otherwise, report this [PIPER-S011]"
                )
            covered.update((device, name) for device in devices)
            holder_groups.setdefault(name, []).append(
                HolderGroup(found, None if bucket.whole_tensors else bucket)
            )
    return holder_groups, covered


def buckets_of_parameters(compiled: Compiled) -> Iterator[tuple[Bucket, tuple[int, ...]]]:
    """Yield each bucket of parameters, and the devices that together have the whole bucket."""
    for node in compiled.dag.of_type(Parameters):
        bucket = node.outputs[0].bucket
        assert bucket is not None
        yield bucket, node.devices


class SharedTensors:
    """The tensors of a module in the one process that has all devices.

    The process has every tensor once: parameters in buckets are views of one flat tensor, and every device has its shard
    of that tensor. Parameters divided along an axis are an exception, because one parameter cannot be a view of the flat
    tensors of several parts. The devices have copies of the parts, which `refresh` updates from the module's whole
    parameters before each step.

    Args:
        places: As of `Ownership`.
        compiled: The training program.
        device: The device of the tensors.
    """

    def __init__(self, places: Mapping[str, list[Place]], compiled: Compiled, device: torch.device) -> None:
        self._places, self._compiled, self._device = places, compiled, device
        # (bucket, part) -> flat tensor of this part of divided parameters
        self._parts: dict[tuple[Bucket, int], torch.Tensor] = {}

    def lay(self, names: Iterable[str]) -> dict[int, dict[Bucket, torch.Tensor]]:
        """Make the parameters of each bucket views of a flat tensor, and return `shards` of `Ownership`.

        Each device gets its shard of the flat tensor, or the whole flat tensor if the device keeps the bucket gathered
        between steps. A bucket whose parameters are divided along an axis (`degree` above 1) gets a flat tensor of its
        own for each part. Every other tensor moves to the device whole.

        Args:
            names: Canonical names of all tensors.

        Raises:
            PiperError: A parameter is in two buckets.
        """
        flats: dict[Bucket, torch.Tensor] = {}
        laid: set[str] = set()
        for bucket, _ in buckets_of_parameters(self._compiled):
            if bucket in flats or bucket.degree > 1:
                continue
            values = {n: self._get(n).detach() for n in bucket.names}
            flats[bucket] = packed(bucket, values, self._device)
            for name, view in zip(bucket.names, bucket.views(flats[bucket]), strict=True):
                if name in laid:
                    raise PiperError(
                        f"parameter {name!r} is in two buckets. If you wrote a directive, put it into one bucket. "
                        "Otherwise, report this [PIPER-S011]"
                    )
                laid.add(name)
                self._get(name).data = view
        for name in names:
            if name not in laid:
                tensor = self._get(name)
                tensor.data = tensor.data.to(self._device)
        shards: dict[int, dict[Bucket, torch.Tensor]] = {}
        for device, plan in self._compiled.plans.items():
            own = shards[device] = {}
            for bucket, kept in plan.shards.items():
                if bucket.degree > 1:
                    part = (bucket, bucket.part_of(plan.group_rank))
                    flat = self._parts[part] = self._parts.get(part, bucket.empty(self._device))
                else:
                    flat = flats[bucket]
                own[bucket] = flat if kept else flat.chunk(bucket.members)[bucket.member(plan.group_rank)]
        self.refresh()
        return shards

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a step, copy the module's parameters that are divided along an axis into the parts of the devices."""
        for (bucket, part), flat in self._parts.items():
            for name, view in zip(bucket.names, bucket.views(flat), strict=True):
                view.copy_(bucket.cut(name, self._get(name), part))

    def separate(self, shards: Mapping[int, Mapping[Bucket, torch.Tensor]]) -> None:
        """Give the parameters in these shards memory of their own."""
        for bucket in dict.fromkeys(bucket for own in shards.values() for bucket in own):
            for tensor in map(self._get, bucket.names):
                tensor.data = tensor.data.clone()

    def _get(self, name: str) -> torch.Tensor:
        return tensor_at(self._places[name])
