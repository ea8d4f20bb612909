"""Point-to-point transfers and the report: communication that follows from the placement of nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lightning_piper.directives.rewrites.device_groups import settle
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Partial, Replicated
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.metrics import Metrics, MetricsSum, StepReport
from lightning_piper.ops.update import Update

SEND_STREAM, RECV_STREAM = "send", "recv"


def place_around(dag: TrainingDAG, chunks: list[Chunk]) -> bool:
    """Place the nodes that depend on `chunks`, which have just got devices, and connect nodes on different
    devices.

    Returns:
        Whether the order of gradient sums changed.
    """
    touched: list[Node] = [*chunks, *place_dependents(dag, chunks)]
    updates, regrouped = settle(dag, chunks)
    touched += updates
    connect(dag, touched + [user for node in touched for user in dag.users(node)])
    connect_report(dag)
    return regrouped


def place_dependents(dag: TrainingDAG, chunks: Iterable[Chunk]) -> list[Node]:
    """Place the nodes without devices whose devices follow from `chunks`: nodes that prepare a value for a chunk
    (`Node.placed_by_reader`), and nodes that read a chunk's outputs directly or through such nodes.

    Returns:
        The nodes that were placed.
    """
    placed: list[Node] = []
    for chunk in chunks:
        readers: list[Node] = [chunk]
        makers: list[Node] = [chunk]
        while readers:
            for source in [dag.nodes[ref[0]] for ref in readers.pop().inputs]:
                if source.placed_by_reader and _is_unplaced(source):
                    dag.change(source, devices=chunk.devices, placed_by=chunk.placed_by)
                    placed.append(source)
                    readers.append(source)
        while makers:
            for user in dag.users(makers.pop()):
                if _is_unplaced(user) and not _waits_for_reader(dag, user):
                    dag.change(user, devices=chunk.devices, placed_by=chunk.placed_by)
                    placed.append(user)
                    makers.append(user)
    return placed


def _is_unplaced(node: Node) -> bool:
    """Return whether the node has no devices, and gets its devices from other nodes. Chunks get theirs from a
    directive, and updates from `settle`, because several regions may share their parameters.
    """
    return not (node.devices or node.everywhere or isinstance(node, Chunk | Update))


def _waits_for_reader(dag: TrainingDAG, node: Node) -> bool:
    """Return whether the node gets its devices from a chunk that reads it."""
    return node.placed_by_reader and any(
        isinstance(user, Chunk) or user.placed_by_reader for user in dag.users(node)
    )


def connect(dag: TrainingDAG, nodes: Iterable[Node]) -> None:
    """Insert a send and a receive where a placed node of `nodes` reads a value of another device.

    One transfer serves all readers of a value on a device. Between device groups, each device sends to the
    device with the same group rank.
    """
    arrived: dict[tuple[Ref, tuple[int, ...]], Ref] = {}
    for node in nodes:
        if not node.devices or node.everywhere or node.reads_from != "own":
            continue
        for ref in dict.fromkeys(node.reads):
            source = dag.nodes[ref[0]]
            if source.devices is node.devices:  # most nodes share a tuple, which may be long
                continue
            if source.devices and source.devices != node.devices:
                key = (ref, node.devices)
                if key not in arrived:
                    arrived[key] = _existing(dag, *key) or _transfer(dag, *key, node)
                dag.substitute(node, ref, arrived[key])


def _existing(dag: TrainingDAG, ref: Ref, devices: tuple[int, ...]) -> Ref | None:
    """Return the received value of an existing transfer to these devices; None if there is no transfer."""
    for send in dag.readers(ref):
        if isinstance(send, Send) and send.peers == devices:
            return (dag.users(send)[0].id, 0)
    return None


def _transfer(dag: TrainingDAG, ref: Ref, devices: tuple[int, ...], reader: Node) -> Ref:
    """Add a send and a receive of a value for a reader on `devices`. Return the received value."""
    source, value = dag.nodes[ref[0]], dag.value(ref)
    by = max((i for i in (source.placed_by, reader.placed_by) if i is not None), default=None)
    shared: dict[str, Any] = {"outputs": (value,), "tags": source.tags, "placed_by": by, "origin": by}
    send = dag.add(Send(inputs=(ref,), devices=source.devices, peers=devices, stream=SEND_STREAM, **shared))
    recv = dag.add(
        Recv(inputs=((send.id, 0),), devices=devices, peers=source.devices, stream=RECV_STREAM, **shared)
    )
    return (recv.id, 0)


def disconnect(dag: TrainingDAG, makers: Iterable[Node]) -> list[Node]:
    """Remove the transfers of values that `makers` make, so that readers read the values directly again.

    Returns:
        The readers.
    """
    readers: list[Node] = []
    for maker in makers:
        for send in [user for user in dag.users(maker) if isinstance(user, Send)]:
            for recv in dag.users(send):
                for reader in dag.users(recv):
                    dag.substitute(reader, (recv.id, 0), send.inputs[0])
                    readers.append(reader)
                dag.remove([recv])
            dag.remove([send])
    return readers


def connect_report(dag: TrainingDAG) -> None:
    """Make the loss and logged values reach every device. With several devices, each device makes a vector of
    all values, with zeros for the values of other devices, and a node sums these vectors.
    """
    report = next(dag.of_type(StepReport))
    devices = dag.devices()
    metrics = list(dag.of_type(Metrics))
    parts = tuple((m.id, 0) for m in metrics)
    dag.change(report, devices=devices)
    if len(devices) < 2 or not metrics:
        return
    for m in metrics:
        dag.change(m, outputs=(dataclasses.replace(m.outputs[0], placement=Partial()),))
    total = next(dag.of_type(MetricsSum), None)
    if total is None:
        value = dataclasses.replace(metrics[0].outputs[0], placement=Replicated())
        total = dag.add(MetricsSum(inputs=parts, outputs=(value,), stream="metrics"))
        dag.rewire(report, inputs=((total.id, 0),))
    dag.change(total, devices=devices, placed_by=dag.origin)
    dag.change(report, placed_by=dag.origin)
