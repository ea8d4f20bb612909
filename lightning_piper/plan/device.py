"""The plan of one device during its construction: its instructions, and the slots of its values."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning_piper.errors import VerificationError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ops.base import about, bucket_of, operation_of
from lightning_piper.ops.communication.gather import Parameters
from lightning_piper.ops.communication.p2p import Irecv, WaitSend
from lightning_piper.ops.instruction import Channel, Collective, Instruction, Read, WaitWork
from lightning_piper.plan.accumulation import Accumulation
from lightning_piper.plan.send_completion import SendCompletion

IN_FLIGHT = 2  # sums of whole buckets in flight: one is communicated while the next one is made


class DevicePlan:
    """A plan of one device, with its instructions in the order of lowering.

    It implements `ops.base.Planning` for operations.

    Attributes:
        instructions: Instructions without irecvs, events and lifetimes, which later passes add.
        irecvs: Id of a receiving node -> the irecv that it needs.
        group_rank: The position of this device in its groups.
        replica: The replica to which the device belongs, which selects its local batch.
        slots: Number of slots.
        shards: Each bucket of parameters with a shard on the device -> whether the device keeps the whole
            bucket's memory.
    """

    def __init__(
        self,
        dag: TrainingDAG,
        device: int,
        group_rank: int,
        send_completion: SendCompletion,
        members: dict[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        """Create an empty plan.

        Args:
            members: Maps each member tuple to itself, so that equal tuples, which may be long, exist only
                once.
        """
        self.dag, self.device, self.group_rank, self.send_completion, self._members = (
            dag,
            device,
            group_rank,
            send_completion,
            members,
        )
        self.replica = dag.replica_of(group_rank)
        self.instructions: list[Instruction] = []
        self.irecvs: dict[int, Irecv] = {}
        self.slots = 0
        self._slot: dict[Ref, int] = {}  # value -> its slot
        self._source: dict[int, str] = {}  # slot -> `Deliver.source`
        # send node -> (node, channel, stream that made the value)
        self._sent: dict[int, tuple[Node, Channel, str]] = {}
        self._stream: dict[int, str] = {}  # slot -> the stream that made its value
        self.shards: dict[Bucket, bool] = {}
        self._pending: dict[int, int] = {}  # collective without a wait so far -> its slot
        self._in_flight: deque[Node] = deque()  # the latest sums of whole buckets, at most `IN_FLIGHT`
        self._read: set[Ref] = set()  # values that a node of this device reads
        self._accumulations: dict[int, Accumulation] = {}  # node -> its sum
        self._terms: dict[Ref, list[tuple[Accumulation, int]]] = {}  # value -> the sums that add it
        self._made: list[Ref] = []  # outputs of the previous chunk, and terms that arrived before it ran
        self._arriving: list[Ref] = []  # terms from other devices since the previous chunk

    def register(self, node: Node) -> None:
        """Register a node of this device before lowering: its reads, its sum if it makes one, and its bucket of
        parameters."""
        self._read.update(node.reads)
        if isinstance(node, Parameters):
            self.shards[bucket_of(node)] = node.kept
        accumulation = Accumulation(self, node) if operation_of(node).adds_up else None
        if accumulation is not None:
            self._accumulations[node.id] = accumulation
            for i, ref in enumerate(accumulation.terms):
                self._terms.setdefault(ref, []).append((accumulation, i))

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def new_slot(self, ref: Ref | None, source: str, stream: str) -> int:
        slot = self.slots
        self.slots += 1
        self._source[slot], self._stream[slot] = source, stream
        if ref is not None:
            self._slot[ref] = slot
        return slot

    def bind(self, ref: Ref, slot: int) -> None:
        self._slot[ref] = slot

    def has(self, ref: Ref) -> bool:
        return self.device in self.dag.nodes[ref[0]].devices

    def is_read(self, ref: Ref) -> bool:
        return ref in self._read

    def source(self, slot: int) -> str:
        return self._source[slot]

    def stream_of(self, slot: int) -> str:
        return self._stream[slot]

    def read(self, ref: Ref, reader: Node) -> Read:
        """Return a read of a value. If the value does not have a slot yet, first emit the instruction that
        makes it: the wait for its collective, or the instruction that its operation emits on demand."""
        if ref not in self._slot:
            maker = self.dag.nodes[ref[0]]
            if not self.has(ref):
                where = f"device {', '.join(map(str, maker.devices))} only" if maker.devices else "no device"
                raise VerificationError(
                    f"%{reader.id} {reader.label} on device {self.device} reads %{ref[0]}.{ref[1]} "
                    f"{maker.label}, which is on {where}. "
                    "If you wrote a directive, add a send and a receive between the nodes. Otherwise, report "
                    "this [PIPER-V002]"
                )
            produce = operation_of(maker).produce
            if maker.id in self._pending:
                self._slot[ref] = self._pending.pop(maker.id)
                started = {"stream": self._stream[self._slot[ref]]}
                self.emit(WaitWork(**(about(maker) | started), writes=(self._slot[ref],)))
            elif produce is not None:
                produce(self, maker, ref)
            else:
                raise VerificationError(
                    f"%{reader.id} {reader.label} reads %{ref[0]} {maker.label}, which has no output. "
                    "If you wrote a directive or an operation, read a node that has one. Otherwise, report this"
                    " [PIPER-V002]"
                )
        return Read(self._slot[ref])

    # Sums

    def add_up(self, node: Node) -> int:
        return (self._accumulations.pop(node.id, None) or Accumulation(self, node)).complete()

    def offer_chunk_outputs(self) -> None:
        for ref in self._made:
            for accumulation, index in self._terms.get(ref, ()):
                accumulation.offer(index)

    def chunk_made(self, refs: Sequence[Ref]) -> None:
        # Values in `_arriving` were sent before this chunk ran, so they could arrive while it ran.
        self._made = [*refs, *self._arriving]
        self._arriving = []

    def arrives(self, ref: Ref) -> None:
        if ref in self._terms:
            self._arriving.append(ref)

    # Collectives

    def start(
        self,
        node: Node,
        kind: type[Collective],
        reads: tuple[Read, ...],
        stream: str | None = None,
        **fields: Any,
    ) -> None:
        """Emit a collective of a node. The first read of the node's output, or `wait_for_earlier`, emits the
        wait."""
        if kind.sums and node.outputs[0].bucket is not None and fields.get("bucket") is None:
            raise VerificationError(
                f"%{node.id} {node.label} is lowered to {kind.op}, which sums a bucket. In your operation, "
                "pass bucket= to plan.start [PIPER-V002]"
            )
        stream = stream or node.stream
        slot = self._pending[node.id] = self.new_slot(None, "sum", stream)
        members = node.members(self.group_rank)
        members = self._members.setdefault(members, members)
        about_both = about(node) | {"stream": stream, "communicator": node.stream}
        self.emit(kind(**about_both, reads=reads, writes=(slot,), members=members, **fields))
        self.arrives((node.id, 0))

    def wait_for_earlier(self, node: Node) -> None:
        self._in_flight.append(node)
        if len(self._in_flight) > IN_FLIGHT:
            oldest = self._in_flight.popleft()
            if oldest.id in self._pending:
                self.read((oldest.id, 0), oldest)

    # Messages

    def sent(self, node: Node, channel: Channel, source: Read) -> None:
        self._sent[node.id] = (node, channel, self._stream[source.slot])
        self.send_completion.send(channel, node.id)

    def received(self, irecv: Irecv) -> None:
        self.irecvs[irecv.node] = irecv
        self._wait_sends(self.send_completion.receive(irecv.channel, irecv.message))

    def finish(self) -> None:
        """Emit waits for the sends whose arrival the device cannot infer from received messages."""
        self._wait_sends(self.send_completion.unknown(self.device))

    def _wait_sends(self, messages: list[int]) -> None:
        # Wait on the stream that made the value, because this stream gets the memory back.
        for message in messages:
            node, channel, stream = self._sent.pop(message)
            self.emit(WaitSend(**(about(node) | {"stream": stream}), channel=channel))
