"""What is known of one device while its plan is made, and how a value comes to be in a slot there."""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_piper.errors import VerificationError
from lightning_piper.ir import nodes
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.plan import instructions as ins
from lightning_piper.plan.acks import Acks
from lightning_piper.plan.instructions import Instruction, Read

IN_FLIGHT = 2  # sums of whole buckets that a device does not wait for: one is communicated while the next one is made


def about(node: Node) -> dict[str, Any]:
    """The fields of every instruction that belongs to `node`."""
    return {"node": node.id, "label": node.label, "stream": node.stream, "origin": node.origin, "placed_by": node.placed_by}


def bucket_of(node: Node) -> Bucket:
    """The bucket of what a node makes."""
    bucket = node.outputs[0].bucket
    if bucket is None:
        raise VerificationError(f"%{node.id} {node.label} makes {node.outputs[0].label}, which lies in no bucket")
    return bucket


class DevicePlan:
    """The instructions of one device, as they come.

    Attributes:
        instructions: without posts, events and lifetimes, which later passes add.
        posts: by id of the receiving node, the post it needs.
        replica: which share of the batch is this device's.
        slots: how many there are.
        shards: the buckets of parameters that it has one shard of, and whether it keeps the whole of each.
    """

    def __init__(self, dag: TrainingDAG, device: int, acks: Acks) -> None:
        self.dag, self.device, self.acks = dag, device, acks
        # A device that runs nothing of a forward-only step receives what it returns, if it returns anything.
        working = (node for kind in (nodes.Chunk, nodes.Result) for node in dag.of_type(kind))
        self.replica = next((node.devices.index(device) for node in working if device in node.devices), 0)
        self.instructions: list[Instruction] = []
        self.posts: dict[int, ins.Post] = {}
        self.slots = 0
        self._slot: dict[Ref, int] = {}
        self._source: dict[int, str] = {}  # slot -> `Deliver.source`
        self._sent: dict[int, tuple[ins.Send, str]] = {}  # with the stream on which the value was made
        self._stream: dict[int, str] = {}
        self.shards = {bucket_of(p): p.kept for p in dag.of_type(nodes.Parameters) if device in p.devices}
        self._pending: dict[int, int] = {}  # collective -> its slot
        self._scattering: deque[nodes.ReduceScatter] = deque()  # in flight

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def new_slot(self, ref: Ref | None, source: str, stream: str) -> int:
        """A slot for a value that is made here."""
        slot = self.slots
        self.slots += 1
        self._source[slot], self._stream[slot] = source, stream
        if ref is not None:
            self._slot[ref] = slot
        return slot

    def bind(self, ref: Ref, slot: int) -> None:
        """The value is what the slot holds."""
        self._slot[ref] = slot

    def has(self, ref: Ref) -> bool:
        return self.device in self.dag.nodes[ref[0]].devices

    def source(self, slot: int) -> str:
        return self._source[slot]

    def read(self, ref: Ref, reader: Node) -> Read:
        """The slot of a value. Waits, cuts and concatenations happen here, directly before the first reader."""
        if ref not in self._slot:
            maker = self.dag.nodes[ref[0]]
            if not self.has(ref):
                raise VerificationError(
                    f"%{reader.id} {reader.label} on device {self.device} reads %{ref[0]}.{ref[1]} {maker.label}, which is on "
                    f"device {','.join(map(str, maker.devices)) or 'none'} only"
                )
            if isinstance(maker, nodes.Recv):
                self._receive(maker)
            elif maker.id in self._pending:
                self._slot[ref] = self._pending.pop(maker.id)
                self.emit(ins.Wait(**about(maker), writes=(self._slot[ref],)))
            elif isinstance(maker, nodes.Pack):
                source, bucket = self.read(maker.inputs[0], maker), bucket_of(maker)
                slot = self.new_slot(ref, "sum", maker.stream)
                self.emit(ins.Pack(**about(maker), reads=(source,), writes=(slot,), bucket=bucket,
                                   take=self.taken(maker)))  # fmt: skip
            elif isinstance(maker, nodes.Cut):
                whole = self.read(maker.inputs[0], maker)
                slot = self.new_slot(ref, self._source[whole.slot], maker.stream)
                self.emit(ins.Cut(**about(maker), reads=(whole,), writes=(slot,), dim=maker.dim, start=maker.start,
                                  stop=maker.stop, tensors=maker.outputs[0].tensors))  # fmt: skip
            elif isinstance(maker, nodes.Concat):
                parts = tuple(self.read(part, maker) for part in maker.inputs)
                slot = self.new_slot(ref, "chunk", maker.stream)
                self.emit(ins.Concat(**about(maker), reads=parts, writes=(slot,), dim=maker.dim,
                                     tensors=maker.outputs[0].tensors))  # fmt: skip
            else:
                raise VerificationError(f"%{reader.id} {reader.label} reads %{ref[0]} {maker.label}, which makes no value")
        return Read(self._slot[ref])

    def send(self, node: nodes.Send) -> None:
        source = self.read(node.inputs[0], node)
        channel = (self.device, node.peers[node.devices.index(self.device)])
        tensors = self.dag.value(node.inputs[0]).tensors
        send = ins.Send(**about(node), reads=(source,), channel=channel, tensors=tensors)
        self.emit(send)
        self._sent[node.id] = (send, self._stream[source.slot])
        self.acks.send(channel, node.id)

    def collective(self, node: nodes.AllReduce | nodes.ReduceScatter | nodes.AllGather | nodes.AllToAll) -> None:
        """Start it; whoever reads its value waits for it."""
        if isinstance(node, nodes.AllGather):
            reads: tuple[Read, ...] = ()  # the shard is no value of the step
        else:
            reads = tuple(self.read(ref, node) for ref in node.inputs if self.has(ref))
        slot = self._pending[node.id] = self.new_slot(None, "sum", node.stream)
        fields: dict[str, Any] = {**about(node), "reads": reads, "writes": (slot,), "members": self.members(node)}
        value = node.outputs[0]
        if isinstance(node, nodes.AllReduce):
            self.emit(ins.Reduce(**fields, tensors=value.tensors, bucket=value.bucket))
        elif isinstance(node, nodes.ReduceScatter):
            self.emit(ins.ReduceScatter(**fields, bucket=bucket_of(node)))
            self._bound_in_flight(node)
        elif isinstance(node, nodes.AllToAll):
            self.emit(ins.AllToAll(**fields, way=node.way, tensor=value.tensors[0]))
        else:
            self.emit(ins.AllGather(**fields, bucket=bucket_of(node), kept=self.shards[bucket_of(node)]))

    def members(self, node: Node) -> tuple[int, ...]:
        """With which devices this one does what `node` says: all of the node's, or those that share a bucket or all experts."""
        if isinstance(node, nodes.AllToAll):
            places = next(group for group in node.owners if self.replica in group)
        elif node.outputs[0].bucket is not None:
            places = node.outputs[0].bucket.sharers(self.replica)
        else:
            return node.devices
        return tuple(node.devices[place] for place in places)

    def _bound_in_flight(self, node: nodes.ReduceScatter) -> None:
        """A sum over replicas holds its whole bucket until somebody waits for it: wait for all but the last ones."""
        self._scattering.append(node)
        if len(self._scattering) > IN_FLIGHT:
            oldest = self._scattering.popleft()
            if oldest.id in self._pending:
                self.read((oldest.id, 0), oldest)

    def taken(self, node: nodes.Pack) -> tuple[int, ...]:
        """Which tensors of the bundle it reads a pack takes."""
        names = self.dag.value(node.inputs[0]).names
        where = dict(zip(names, range(len(names)), strict=True))
        return tuple(where[name] for name in bucket_of(node).names)

    def _receive(self, node: nodes.Recv) -> None:
        message = node.inputs[0][0]
        channel = (node.peers[node.devices.index(self.device)], self.device)
        slot = self.new_slot((node.id, 0), "peer", node.stream)
        self.posts[node.id] = ins.Post(**about(node), writes=(slot,), channel=channel, message=message,
                                       tensors=node.outputs[0].tensors)  # fmt: skip
        self.emit(ins.Wait(**about(node), writes=(slot,)))
        self._retire(self.acks.receive(channel, message))

    def finish(self) -> None:
        """Wait for the sends that nothing has acknowledged."""
        self._retire(self.acks.unknown(self.device))

    def _retire(self, messages: list[int]) -> None:
        # On the stream that made the value, for its allocator is the one that takes the memory back.
        for message in messages:
            send, stream = self._sent.pop(message)
            self.emit(ins.Retire(node=send.node, label=send.label, stream=stream, origin=send.origin,
                                 placed_by=send.placed_by, channel=send.channel))  # fmt: skip
