"""Messages from device to device: a send and a receive that meet in a channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.ir.nodes import IssuePriority, Node, Ref
from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.base import Operation, Planning, about, register_operation
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.instruction import Channel, Instruction, WaitWork
from lightning_piper.ops.reference import Bundle, Reference, on_each_rank


@dataclass(frozen=True, kw_only=True)
class Send(Node):
    """A node that sends a value from each of its devices to the peer at the same position."""

    turn = IssuePriority.CRITICAL_COMM
    communicates = moves = True

    peers: tuple[int, ...]

    @property
    def details(self) -> str:
        return "to " + ",".join(map(str, self.peers))


@dataclass(frozen=True, kw_only=True)
class Recv(Node):
    """A node that receives a value from the peer at the same position.

    Its only input is the matching send's output.
    """

    turn = IssuePriority.CRITICAL_COMM
    communicates = moves = True
    reads_from = "channel"

    peers: tuple[int, ...]

    @property
    def details(self) -> str:
        return "from " + ",".join(map(str, self.peers))


@dataclass(frozen=True, kw_only=True)
class SendInstruction(Instruction):
    """An instruction that sends a bundle on a channel, without waiting.

    `tensors` are the specs of the bundle's tensors. Each tensor is a message.
    """

    op: ClassVar[str] = "send"
    color: ClassVar[str] = "#c9c9c9"
    channel: Channel
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return [*super().details(), "to", str(self.channel[1])]


@dataclass(frozen=True, kw_only=True)
class WaitSend(Instruction):
    """An instruction that waits until a message is sent, and frees the sent tensors.

    In the plan it comes after a point at which the receiver must have the message, so that the wait takes no
    time. If there is no such point, it comes at the end of the step.
    """

    op: ClassVar[str] = "retire"
    channel: Channel


@dataclass(frozen=True, kw_only=True)
class Irecv(Instruction):
    """An instruction that starts to receive a bundle, without waiting.

    The slot is pending until `WaitWork`.

    Attributes:
        channel: The channel of the message.
        message: Id of the send node that sends the message.
        tensors: Specs of the tensors.
    """

    op: ClassVar[str] = "post"
    channel: Channel
    message: int
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return [*super().details(), "from", str(self.channel[0])]


def check_send(facts: Facts, node: Send) -> Iterable[str]:
    """The node must send its input unchanged, to one receive."""
    yield from _same(facts, node)
    users = facts.dag.users(node)
    if len(users) != 1 or not isinstance(users[0], Recv):
        yield f"{facts.at(node)} has {counted(len(users), 'reader')}, but it needs one receive"


def check_recv(facts: Facts, node: Recv) -> Iterable[str]:
    """The node must receive from a send to its devices."""
    yield from _same(facts, node)
    source = facts.dag.nodes[node.inputs[0][0]]
    if not isinstance(source, Send) or source.peers != node.devices or node.peers != source.devices:
        yield f"{facts.at(node)} receives from {facts.at(source)}, which does not send to it"


def _same(facts: Facts, node: Send | Recv) -> Iterable[str]:
    facts.forward(node)
    if node.outputs[0] != facts.dag.value(node.inputs[0]):
        yield (
            f"{facts.at(node)} describes its output differently from its input {facts.named(node.inputs[0])}"
        )


@on_each_rank
def interpret(run: Reference, node: Send | Recv, inputs: list[Bundle]) -> list[Bundle]:
    return inputs


def lower_send(plan: Planning, node: Send) -> None:
    """Emit the send to the device with the same group rank. The plan frees the value later
    (`Planning.sent`)."""
    source = plan.read(node.inputs[0], node)
    channel = (plan.device, node.peers[node.devices.index(plan.device)])
    plan.emit(
        SendInstruction(
            **about(node), reads=(source,), channel=channel, tensors=plan.dag.value(node.inputs[0]).tensors
        )
    )
    plan.sent(node, channel, source)


def lower_recv(plan: Planning, node: Recv) -> None:
    ref = (node.id, 0)
    if not plan.is_read(ref):
        raise VerificationError(
            f"no node on device {plan.device} reads the value that %{node.id} {node.label} receives. If you "
            "wrote a directive, remove this node in `apply`. Otherwise, report this [PIPER-V002]"
        )
    plan.arrives(ref)


def produce_recv(plan: Planning, node: Recv, ref: Ref) -> None:
    """Wait for the message directly before its first reader.

    `plan.irecv` decides where the receive starts.
    """
    channel = (node.peers[node.devices.index(plan.device)], plan.device)
    slot = plan.new_slot(ref, "peer", node.stream)
    plan.emit(WaitWork(**about(node), writes=(slot,)))
    plan.received(
        Irecv(
            **about(node),
            writes=(slot,),
            channel=channel,
            message=node.inputs[0][0],
            tensors=node.outputs[0].tensors,
        )
    )


register_operation(
    Operation(
        Send,
        check_send,
        interpret,
        lower_send,
        bind={
            SendInstruction: lambda instruction, on: on.endpoint.send(instruction, on.slots),
            WaitSend: lambda instruction, on: on.endpoint.wait_send(instruction),
        },
        alike=True,
    )
)
register_operation(
    Operation(
        Recv,
        check_recv,
        interpret,
        lower_recv,
        produce_recv,
        bind={
            Irecv: lambda instruction, on: on.endpoint.irecv(instruction, on.slots),
            WaitWork: lambda instruction, on: on.endpoint.wait(instruction, on.slots),
        },
        alike=True,
    )
)
