"""Write plans as Chakra execution traces, which other simulators read.

A trace is a DAG of nodes for each device, in the format of MLCommons Chakra (`schema/protobuf/et_def.proto` in
github.com/mlcommons/chakra). Every instruction that takes time, and every message and collective, becomes a
node. The order of streams, and waits, become dependencies. Communication has sizes and no duration, because
the other simulator calculates it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from os import PathLike
from pathlib import Path

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.values import Partial
from lightning_piper.ops.communication.redistribute import RedistributeInstruction, ShiftInstruction
from lightning_piper.plan.instructions import (
    AllToAllInstruction,
    Channel,
    Collective,
    Group,
    HostCopy,
    Instruction,
    Irecv,
    Record,
    Run,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.matching import Matching
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import DEFAULT, Durations, WorkDurations
from lightning_piper.simulate.network import Network


class NodeType(IntEnum):
    """The types of nodes in a trace, with the numbers of the format."""

    LOAD = 2
    STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


class CollectiveType(IntEnum):
    """The types of collectives in a trace, with the numbers of the format."""

    ALL_REDUCE = 0
    ALL_GATHER = 2
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7


@dataclass(frozen=True)
class _Node:
    """A node of a trace. `after` has the ids of the nodes that must be over before."""

    id: int
    name: str
    type: NodeType
    after: tuple[int, ...]
    microseconds: int = 0
    attributes: Mapping[str, int | str | bool] = field(default_factory=dict)


def write_chakra(
    folder: str | PathLike[str],
    dag: TrainingDAG,
    plans: Mapping[int, Plan],
    durations: Durations = DEFAULT,
    network: Network | None = None,
) -> None:
    """Write a Chakra execution trace for each device.

    The files are `trace.RANK.et`, and `comm_groups.json`, which has the members of each group. The ranks are the
    devices.

    Args:
        folder: The folder for the files. It is made if it does not exist.
        dag: The finished DAG.
        plans: The plans of all devices of the DAG.
        durations: The durations of chunks and other work, in seconds, as for `simulate`. They are rounded to
            microseconds.
        network: Its `host` gives the duration of copies between devices and hosts (default: no time).

    Raises:
        SimulationError: The durations are not valid.
        OSError: A file cannot be written.
    """
    chunks = [i.node for plan in plans.values() for i in plan.instructions if isinstance(i, Run)]
    work = WorkDurations(dag, durations, chunks)
    groups: dict[Group, str] = {}
    for plan in plans.values():
        for instruction in plan.instructions:
            if isinstance(instruction, Collective):
                groups.setdefault(instruction.group, str(len(groups)))
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    for device, plan in plans.items():
        with (to / f"trace.{device}.et").open("wb") as file:
            file.write(_sized(_text(1, "1.0.0")))
            for node in _nodes(device, plan, work, groups, network or Network()):
                file.write(_sized(_encoded(node)))
    members = {name: list(group[0]) for group, name in groups.items()}
    (to / "comm_groups.json").write_text(json.dumps(members, indent=1) + "\n", encoding="utf-8")


def _nodes(
    device: int, plan: Plan, work: WorkDurations, groups: Mapping[Group, str], network: Network
) -> Iterator[_Node]:
    """Yield the nodes of a device in the order of its plan.

    The nodes of a line run one after the other. A line is a stream, one direction of a channel, or a group. So
    the last node of each line stands for all nodes of the line before it.
    """
    lines: dict[object, int] = {}  # line -> id of its last node
    frontiers: dict[str, dict[object, int]] = {}  # stream -> line -> last node that the stream has waited for
    events: dict[int, dict[object, int]] = {}  # event -> the frontier of its stream
    started: dict[int, dict[object, int]] = {}  # node of a plan -> line -> node of its communication
    matching, count = Matching(), 0
    for instruction in plan.instructions:
        frontier = frontiers.setdefault(instruction.stream, {})
        match instruction:
            case WaitWork() | WaitSend():
                _join(frontier, started[instruction.node])
            case Record():
                events[instruction.event] = dict(frontier)
            case WaitEvent():
                _join(frontier, events[instruction.event])
            case SendInstruction() | Irecv() | Collective():
                own = started.setdefault(instruction.node, {})
                number = 0 if isinstance(instruction, Collective) else matching.of(instruction)[1]
                for line, kind, attributes in _exchange(device, instruction, number, groups):
                    before = {*frontier.values(), *([lines[line]] if line in lines else [])}
                    yield _Node(count, instruction.label, kind, tuple(sorted(before)), attributes=attributes)
                    lines[line] = own[line] = count
                    count += 1
            case _:
                copying = network.host.time(instruction.nbytes) if isinstance(instruction, HostCopy) else 0
                duration = round(work.of(instruction, copying) * 10**6)
                if duration or isinstance(instruction, Run | HostCopy):
                    kind, attributes = _work(instruction)
                    after = tuple(sorted(frontier.values()))
                    yield _Node(count, instruction.label, kind, after, duration, attributes)
                    frontier.clear()
                    frontier[instruction.stream] = count
                    count += 1


def _join(frontier: dict[object, int], other: Mapping[object, int]) -> None:
    """Add the nodes of another frontier to a frontier. Of two nodes of one line, keep the later one."""
    for line, node in other.items():
        frontier[line] = max(node, frontier.get(line, node))


def _work(instruction: Instruction) -> tuple[NodeType, dict[str, int | str | bool]]:
    """Return the type and the attributes of the node of a computation or copy."""
    if isinstance(instruction, HostCopy):
        kind = NodeType.STORE if instruction.to_host else NodeType.LOAD
        return kind, {"is_cpu_op": False, "tensor_size": instruction.nbytes}
    return NodeType.COMPUTE, {"is_cpu_op": False}


def _exchange(
    device: int,
    instruction: SendInstruction | Irecv | Collective,
    number: int | tuple[int, ...],
    groups: Mapping[Group, str],
) -> Iterator[tuple[object, NodeType, dict[str, int | str | bool]]]:
    """Yield the line, the type and the attributes of each node of a message or collective on a device.

    In a shift, each member sends to one member. The format has no such collective, so it is a send and a
    receive. Shifts have odd tags, and other messages have even tags.

    Args:
        number: The number of the message on its channel. It does not matter for a collective.
    """
    if isinstance(instruction, SendInstruction | Irecv):
        assert isinstance(number, int)
        nbytes = sum(spec.nbytes for spec in instruction.tensors)
        kind = NodeType.SEND if isinstance(instruction, SendInstruction) else NodeType.RECEIVE
        yield (kind, instruction.channel), kind, _message(instruction.channel, nbytes, 2 * number)
    elif isinstance(instruction, ShiftInstruction):
        for channel in instruction.routes:
            if device in channel:
                kind = NodeType.SEND if channel[0] == device else NodeType.RECEIVE
                tag = 2 * instruction.node + 1
                yield (kind, instruction.group), kind, _message(channel, instruction.nbytes, tag)
    else:
        found = _type(instruction)
        # A node gives the bytes that each member has before the collective.
        parts = len(instruction.members) if found == CollectiveType.ALL_GATHER else 1
        attributes: dict[str, int | str | bool] = {
            "is_cpu_op": False,
            "comm_type": int(found),
            "comm_size": instruction.nbytes // parts,
            "pg_name": groups[instruction.group],
        }
        yield instruction.group, NodeType.COLLECTIVE, attributes


def _message(channel: Channel, nbytes: int, tag: int) -> dict[str, int | str | bool]:
    """Return the attributes of a message."""
    sender, receiver = channel
    attributes: dict[str, int | str | bool] = {"is_cpu_op": False, "comm_size": nbytes}
    return {**attributes, "comm_src": sender, "comm_dst": receiver, "comm_tag": tag}


def _type(instruction: Collective) -> CollectiveType:
    """Return the type of a collective that is not a shift."""
    if instruction.rings == 2:
        return CollectiveType.ALL_REDUCE
    if instruction.gathers:
        return CollectiveType.ALL_GATHER
    sums = not isinstance(instruction, RedistributeInstruction) or isinstance(instruction.before, Partial)
    if isinstance(instruction, AllToAllInstruction) or not sums:
        return CollectiveType.ALL_TO_ALL
    return CollectiveType.REDUCE_SCATTER


# The encoding: protocol buffers, with the field numbers of the format.

# Attribute -> number of the field `int32_val` or `uint64_val`. Other numbers are in the field `int64_val`.
_FIELDS = {"comm_src": 7, "comm_dst": 7, "comm_tag": 7, "tensor_size": 13}


def _encoded(node: _Node) -> bytes:
    """Return a node as the message `Node`."""
    made = _integer(1, node.id) + _text(2, node.name) + _integer(3, node.type)
    made += b"".join(_integer(5, each) for each in node.after)
    made += _integer(7, node.microseconds)
    return made + b"".join(_bytes(10, _attribute(*item)) for item in node.attributes.items())


def _attribute(name: str, value: int | str | bool) -> bytes:
    """Return an attribute as the message `AttributeProto`."""
    if isinstance(value, str):
        return _text(1, name) + _text(29, value)
    if isinstance(value, bool):
        return _text(1, name) + _integer(27, value)
    return _text(1, name) + _integer(_FIELDS.get(name, 9), value)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def _integer(number: int, value: int) -> bytes:
    """Return a field with an integer that is not negative."""
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    """Return a field with bytes, a text or a message."""
    return _varint(number << 3 | 2) + _sized(value)


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _sized(message: bytes) -> bytes:
    """Return a message after its length, as in a file of messages."""
    return _varint(len(message)) + message
