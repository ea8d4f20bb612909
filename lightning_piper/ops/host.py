"""Values that wait in host memory: a store and a fetch, each on a logical stream of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_piper.accelerators import accelerator_of
from lightning_piper.ir.nodes import IssuePriority, Node
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, register_operation, take
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.instruction import HostCopy
from lightning_piper.ops.reference import Bundle, Reference, on_each_rank

ALIGNED = 64  # bytes, the alignment of allocators


@dataclass(frozen=True, kw_only=True)
class Store(Node):
    """A node that copies a value to host memory and frees it on the device. Only a `Fetch` reads the copy."""

    turn = IssuePriority.BOOKKEEPING
    moves = True


@dataclass(frozen=True, kw_only=True)
class Fetch(Node):
    """A node that copies a stored value back to the device.

    Attributes:
        ahead: Number of chunks on the node's devices between the issue of the fetch and its first reader.
    """

    turn = IssuePriority.PREFETCH
    moves = True

    ahead: int = 1  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class StoreInstruction(HostCopy):
    """An instruction that copies a bundle to the host, without waiting."""

    op: ClassVar[str] = "store"
    color: ClassVar[str] = "#d5c4a1"
    to_host: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FetchInstruction(HostCopy):
    """An instruction that copies a bundle back from the host, without waiting."""

    op: ClassVar[str] = "fetch"
    color: ClassVar[str] = "#c9b38c"
    paced: ClassVar[bool] = True


def check_store(facts: Facts, node: Store) -> Iterable[str]:
    """The node must store a value of its own devices, and only fetches may read it."""
    yield from _same(facts, node)
    for user in facts.dag.users(node):
        if not isinstance(user, Fetch):
            yield (
                f"{facts.at(user)} reads a value that {facts.at(node)} has moved to the host. Let it read a "
                "fetch of it"
            )


def check_fetch(facts: Facts, node: Fetch) -> Iterable[str]:
    """The node must fetch a value that its own devices stored."""
    yield from _same(facts, node)
    source = facts.dag.nodes[node.inputs[0][0]]
    if not isinstance(source, Store):
        yield (
            f"{facts.at(node)} fetches from {facts.at(source)}, which stores nothing in the memory of the "
            "host"
        )


def _same(facts: Facts, node: Store | Fetch) -> Iterable[str]:
    """Yield the problems of a copy whose output or devices differ from its input."""
    facts.forward(node)
    source = facts.dag.nodes[node.inputs[0][0]]
    if node.outputs[0] != facts.dag.value(node.inputs[0]):
        yield (
            f"{facts.at(node)} describes its output differently from its input {facts.named(node.inputs[0])}"
        )
    # A later directive may place the one that has no devices. At the end, all nodes need devices.
    if node.devices and source.devices and node.devices != source.devices:
        yield f"{facts.at(node)} reads a value that lies on devices {list(source.devices)}"


@on_each_rank
def interpret(run: Reference, node: Store | Fetch, inputs: list[Bundle]) -> list[Bundle]:
    return inputs


def lower_store(plan: Planning, node: Store) -> None:
    source = plan.read(node.inputs[0], node)
    slot = plan.new_slot((node.id, 0), "host", node.stream)
    plan.emit(
        StoreInstruction(**about(node), reads=(source,), writes=(slot,), tensors=node.outputs[0].tensors)
    )


def lower_fetch(plan: Planning, node: Fetch) -> None:
    source = plan.read(node.inputs[0], node)
    slot = plan.new_slot((node.id, 0), "host", node.stream)
    plan.emit(
        FetchInstruction(**about(node), reads=(source,), writes=(slot,), tensors=node.outputs[0].tensors)
    )


# Runtime


class _View(NamedTuple):
    """A tensor in the bytes of a storage that a bundle uses. A storage may have tensors of several dtypes.

    Attributes:
        storage: Address of the storage on the device.
        offset: Offset of the first element, in elements from the start of the storage.
    """

    storage: int
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    @property
    def end(self) -> int:
        """The end of the tensor in the storage, in bytes."""
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def of(self, span: torch.Tensor, first: int) -> torch.Tensor:
        """Return the tensor as a view of `span`, a copy of the storage's bytes from byte `first` on."""
        offset = self.offset - first // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=span.device).set_(
            span.untyped_storage(), offset, self.size, self.stride
        )


class Stored:
    """A bundle in host memory.

    After a fetch, tensors share memory as before and have the same strides, because strides choose kernels
    and thereby bits.

    Attributes:
        spans: Address of a storage on the device -> (a copy of the bytes that the bundle uses, their offset
            in the storage).
        views: The tensors of the bundle. An entry is the tensor itself if it is empty or already on the host.
    """

    __slots__ = ("spans", "views")

    def __init__(self, spans: dict[int, tuple[torch.Tensor, int]], views: list[_View | torch.Tensor]) -> None:
        self.spans, self.views = spans, views

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (span for span, _ in self.spans.values())


class HostPool:
    """A pool of host memory for stored bundles. A store reuses the memory of fetched bundles.

    On a device with streams, free memory has an event, for which the next store into this memory waits.

    Attributes:
        nbytes: Bytes allocated so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._api = device, accelerator_of(device)
        # number of bytes -> free memory of this size: (memory, event after the last copy from it; None
        # without streams)
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self.nbytes = 0

    def store(self, bundle: Iterable[torch.Tensor]) -> Stored:
        """Copy a bundle to host memory. Tensors of one storage are copied together."""
        views: list[_View | torch.Tensor] = []
        spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}  # storage, first byte, end
        for x in bundle:
            if x.device.type != self._device.type or not x.numel():
                views.append(x)
                continue
            storage = x.untyped_storage()
            view = _View(storage.data_ptr(), x.dtype, x.shape, x.stride(), int(x.storage_offset()))
            first = view.offset * x.dtype.itemsize // ALIGNED * ALIGNED
            _, least, most = spans.get(view.storage, (storage, first, view.end))
            spans[view.storage] = storage, min(least, first), max(most, view.end)
            views.append(view)
        return Stored(
            {at: (self._kept(storage, first, end), first) for at, (storage, first, end) in spans.items()},
            views,
        )

    def _kept(self, storage: torch.UntypedStorage, first: int, end: int) -> torch.Tensor:
        """Copy the bytes `first:end` of a storage to free or new host memory."""
        span = torch.empty(0, dtype=torch.uint8, device=self._device).set_(
            storage, first, (end - first,), (1,)
        )
        free = self._free[end - first]
        if free:
            room, moment = free.pop()
            if moment is not None:
                moment.wait()
        else:
            room = torch.empty(end - first, dtype=torch.uint8, pin_memory=self._api is not None)
            self.nbytes += room.nbytes
        return room.copy_(span, non_blocking=self._api is not None)

    def fetch(self, stored: Stored, last: bool) -> tuple[torch.Tensor, ...]:
        """Return the bundle in new memory of the device. A tensor that is empty or was never on the device is
        returned as it was stored. The `last` fetch of a bundle makes its host memory free for other
        bundles."""
        spans: dict[int, tuple[torch.Tensor, int]] = {}
        for storage, (room, first) in stored.spans.items():
            spans[storage] = (
                torch.empty_like(room, device=self._device).copy_(room, non_blocking=self._api is not None),
                first,
            )
        moment = None if self._api is None else self._api.current_stream(self._device).record_event()
        for room in stored if last else ():
            self._free[room.nbytes].append((room, moment))
        return tuple(
            view.of(*spans[view.storage]) if isinstance(view, _View) else view for view in stored.views
        )


def _pool(on: Binding) -> HostPool:
    found: HostPool = on.common.setdefault("host", HostPool(on.device))
    return found


def bind_store(instruction: StoreInstruction, on: Binding) -> Bound:
    read, slots, into, pool = take(instruction, on.slots), on.slots, instruction.into, _pool(on)

    def store() -> None:
        slots[into] = pool.store(read())

    return store


def bind_fetch(instruction: FetchInstruction, on: Binding) -> Bound:
    read, slots, into, pool = take(instruction, on.slots), on.slots, instruction.into, _pool(on)
    last = instruction.reads[0].last

    def fetch() -> None:
        slots[into] = pool.fetch(read(), last)  # type: ignore[arg-type]

    return fetch


register_operation(
    Operation(Store, check_store, interpret, lower_store, bind={StoreInstruction: bind_store}, alike=True)
)
register_operation(
    Operation(Fetch, check_fetch, interpret, lower_fetch, bind={FetchInstruction: bind_fetch}, alike=True)
)
