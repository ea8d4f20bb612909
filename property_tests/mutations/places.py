"""Bugs of `place` and `order`: transfers, updates, temporal edges."""

from __future__ import annotations

from typing import Any

from lightning_piper.directives import order, place, split
from lightning_piper.directives.rewrites import device_groups, transfers
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.metrics import Metrics
from lightning_piper.ops.update import Update
from property_tests.mutations.table import Function, Seeded, mutation

TRANSFER = (transfers, "_transfer")


def _pair(dag: TrainingDAG, received: Ref) -> tuple[Send, Recv]:
    recv = dag.nodes[received[0]]
    send = dag.nodes[recv.inputs[0][0]]
    assert isinstance(send, Send) and isinstance(recv, Recv)
    return send, recv


@mutation("transfer skipped", "a gradient of an activation stays where it is", "rewrite", TRANSFER)
def _transfer_skipped(original: Function, seeded: Seeded) -> Function:
    def transfer(dag: TrainingDAG, ref: Ref, device: int, reader: Node) -> Ref:
        if dag.value(ref).kind != "cotangent":
            return original(dag, ref, device, reader)
        seeded.hit()
        return ref

    return transfer


@mutation("transfer of the wrong output", "another output of the chunk travels", "rewrite", TRANSFER)
def _transfer_of_the_wrong_output(original: Function, seeded: Seeded) -> Function:
    def transfer(dag: TrainingDAG, ref: Ref, device: int, reader: Node) -> Ref:
        received = original(dag, ref, device, reader)
        others = [i for i in range(len(dag.nodes[ref[0]].outputs)) if i != ref[1]]
        if others:
            dag.rewire(_pair(dag, received)[0], inputs=((ref[0], others[0]),))
            seeded.hit()
        return received

    return transfer


@mutation("transfer of another microbatch", "a receive is reused for another value of the same "
                                            "shape", "rewrite",
          (transfers, "_existing"))  # fmt: skip
def _transfer_of_another_microbatch(original: Function, seeded: Seeded) -> Function:
    def existing(dag: TrainingDAG, ref: Ref, devices: tuple[int, ...]) -> Ref | None:
        for send in dag.of_type(Send):
            alike = (
                send.devices == dag.nodes[ref[0]].devices
                and send.outputs[0].tensors == dag.value(ref).tensors
            )
            if alike and send.peers == devices and send.inputs[0] != ref:
                seeded.hit()
                return (dag.users(send)[0].id, 0)
        return original(dag, ref, devices)

    return existing


@mutation("send and receive exchanged", "the receiver sends", "rewrite", TRANSFER)
def _send_and_receive_exchanged(original: Function, seeded: Seeded) -> Function:
    def transfer(*args: Any) -> Ref:
        received = original(*args)
        send, recv = _pair(args[0], received)
        from_, to = send.devices, recv.devices
        args[0].change(send, devices=to)
        args[0].change(recv, devices=from_)
        seeded.hit()
        return received

    return transfer


@mutation(
    "sent to the wrong peer",
    "a value is sent to the next device after the one that reads it",
    "rewrite",
    TRANSFER,
)
def _sent_to_the_wrong_peer(original: Function, seeded: Seeded) -> Function:
    def transfer(*args: Any) -> Ref:
        received = original(*args)
        send = _pair(args[0], received)[0]
        args[0].change(send, peers=tuple(peer + 1 for peer in send.peers))
        seeded.hit()
        return received

    return transfer


@mutation("received from the wrong peer", "a receive listens to its own device", "rewrite", TRANSFER)
def _received_from_the_wrong_peer(original: Function, seeded: Seeded) -> Function:
    def transfer(*args: Any) -> Ref:
        received = original(*args)
        recv = _pair(args[0], received)[1]
        args[0].change(recv, peers=recv.devices)
        seeded.hit()
        return received

    return transfer


@mutation("old transfers kept", "after a split, chunks still read what was sent before "
                                "it", "rewrite", (split, "disconnect"),
          scenario="batch norm")  # fmt: skip
def _old_transfers_kept(original: Function, seeded: Seeded) -> Function:
    def disconnect(dag: TrainingDAG, chunks: Any) -> list[Node]:
        seeded.hits += any(isinstance(user, Send) for chunk in chunks for user in dag.users(chunk))
        return []

    return disconnect


@mutation("tied update on one device", "a tied gradient reaches the optimizer of one device only", "rewrite",
          (device_groups, "_update_everywhere"), scenario="tied over three")  # fmt: skip
def _tied_update_on_one_device(original: Function, seeded: Seeded) -> Function:
    def update_everywhere(dag: TrainingDAG, family: list[Update], users: Any) -> list[Update]:
        placed: list[Update] = original(dag, family, users)
        seeded.hits += len(placed) > 1
        dag.remove(placed[1:])
        return placed[:1]

    return update_everywhere


@mutation("tied update with own share", "every device steps with its own part of a tied gradient", "rewrite",
          (device_groups, "_update_everywhere"), scenario="tied over three")  # fmt: skip
def _tied_update_with_own_share(original: Function, seeded: Seeded) -> Function:
    def update_everywhere(dag: TrainingDAG, family: list[Update], users: Any) -> list[Update]:
        placed: list[Update] = original(dag, family, users)
        for copy in placed if len(placed) > 1 else []:
            dag.rewire(
                copy, inputs=tuple(ref for ref in copy.inputs if dag.nodes[ref[0]].devices == copy.devices)
            )
            seeded.hit()
        return placed

    return update_everywhere


@mutation("device group left out", "the gradients of one of a region's device groups are never "
                                   "added", "rewrite",
          (device_groups, "_by_group"), scenario="two device groups")  # fmt: skip
def _group_left_out(original: Function, seeded: Seeded) -> Function:
    def by_group(dag: TrainingDAG, totals: list[Any]) -> list[Any]:
        found: list[Any] = original(dag, totals)
        seeded.hits += len(found) > 1
        return found[:1]

    return by_group


@mutation("group has all gradients", "each group adds up all microbatches, so that they count "
                                     "twice", "rewrite",
          (device_groups, "_by_group"), scenario="two device groups")  # fmt: skip
def _group_has_all_gradients(original: Function, seeded: Seeded) -> Function:
    def by_group(dag: TrainingDAG, totals: list[Any]) -> list[Any]:
        found: list[Any] = original(dag, totals)
        for total in found[1:]:
            dag.rewire(total, inputs=(*found[0].inputs, *total.inputs))
            seeded.hit()
        return found

    return by_group


@mutation("groups in another order", "the groups of a region add up their sums in different orders, and "
                                     "drift apart", "rewrite",
          (device_groups, "_update_everywhere"), scenario="two device groups")  # fmt: skip
def _groups_in_another_order(original: Function, seeded: Seeded) -> Function:
    def update_everywhere(dag: TrainingDAG, family: list[Update], users: Any) -> list[Update]:
        placed: list[Update] = original(dag, family, users)
        for copy in placed[1:]:
            seeded.hits += len(copy.inputs) > 1
            dag.rewire(copy, inputs=copy.inputs[::-1])
        return placed

    return update_everywhere


@mutation(
    "metrics without a place",
    "the node that merges the loss has no device",
    "rewrite",
    (transfers, "place_dependents"),
)
def _metrics_without_a_place(original: Function, seeded: Seeded) -> Function:
    def place_dependents(dag: TrainingDAG, chunks: Any) -> list[Node]:
        placed = original(dag, chunks)
        for node in placed:
            if isinstance(node, Metrics):
                dag.change(node, devices=())
                seeded.hit()
        return [node for node in placed if node.devices]

    return place_dependents


@mutation("chunk on two devices", "a chunk is placed on two devices and nothing divides its work", "rewrite",
          (place, "place_around"))  # fmt: skip
def _chunk_on_two_devices(original: Function, seeded: Seeded) -> Function:
    def place_around(dag: TrainingDAG, chunks: list[Chunk]) -> bool:
        dag.change(chunks[0], devices=(0, 1))
        seeded.hit()
        return original(dag, chunks)

    return place_around


@mutation("place ignored", "every stage goes to device 0", "rewrite", (place.Place, "_together"))
def _place_ignored(original: Function, seeded: Seeded) -> Function:
    def together(self: place.Place, dag: TrainingDAG, chunks: list[Chunk], group: tuple[int, ...]) -> None:
        for chunk in chunks:
            seeded.hits += chunk.devices != (0,)
            dag.change(chunk, devices=(0,))

    return together


@mutation("order ignored", "an order adds no edges", "rewrite", (order.Order, "_sequence"))
def _order_ignored(original: Function, seeded: Seeded) -> Function:
    def sequence(self: order.Order, dag: TrainingDAG, before: list[Chunk], after: list[Chunk]) -> None:
        seeded.hit()

    return sequence


@mutation("order of groups ignored", "an order between groups of several chunks keeps only the first of "
                                     "each", "rewrite",
          (order.Order, "_sequence"), scenario="one device")  # fmt: skip
def _order_of_groups_ignored(original: Function, seeded: Seeded) -> Function:
    def sequence(self: order.Order, dag: TrainingDAG, before: list[Chunk], after: list[Chunk]) -> None:
        seeded.hits += len(before) > 1 and len(after) > 1
        original(self, dag, before[:1], after[:1])

    return sequence


@mutation("order reversed", "an order's edges point the other way", "rewrite", (order.Order, "_sequence"))
def _order_reversed(original: Function, seeded: Seeded) -> Function:
    def sequence(self: order.Order, dag: TrainingDAG, before: list[Chunk], after: list[Chunk]) -> None:
        seeded.hit()
        original(self, dag, after, before)

    return sequence


@mutation(
    "circle not refused",
    "an order that contradicts the data is let through",
    "rewrite",
    (order.Order, "_refuse_cycle"),
)
def _circle_not_refused(original: Function, seeded: Seeded) -> Function:
    def refuse_cycle(self: order.Order, dag: TrainingDAG) -> None:
        ordered = [(a, b) for a, b in dag.graph.edges if dag.graph.edges[a, b]["order"] is not None]
        a, b = ordered[0]
        dag.order(dag.nodes[b], dag.nodes[a], dag.origin)
        seeded.hit()

    return refuse_cycle
