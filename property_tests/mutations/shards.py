"""Bugs of the runtime where shards and buckets are concerned, with all devices in one process and with several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.nodes import Chunk
from lightning_piper.plan import instructions as ins
from lightning_piper.runtime import chunks, collectives, local, outbox, process
from lightning_piper.verify import interpreter
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

LOCAL = local.LocalEndpoint
TOGETHER = (LOCAL, "_bring")


# All devices in one process


def _together(kind: type[ins.Collective], change: Callable[[Any, ins.Collective, list[Any], Function], Any]) -> Wrap:
    """What a collective makes of its members' parts."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def bring(self: Any, instruction: ins.Collective, part: Function, together: Function) -> Any:
            if not isinstance(instruction, kind):
                return original(self, instruction, part, together)

            def wrong(parts: list[Any]) -> Any:
                seeded.hit()
                return change(self, instruction, parts, together)

            return original(self, instruction, part, wrong)

        return bring

    return wrap


def _own_part_alone(self: Any, instruction: Any, parts: list[Any], together: Function) -> Any:
    own = instruction.members.index(self._plan.device)
    return together([tuple(x if i == own else torch.zeros_like(x) for x in part) for i, part in enumerate(parts)])


def _once(self: Any, instruction: Any, parts: list[Any], together: Function) -> Any:
    """The first step's result, also in all later ones."""
    memory = self.__dict__.setdefault("remembered", {})
    if instruction.node not in memory:
        memory[instruction.node] = tuple(x.clone() for x in together(parts))
    return memory[instruction.node]


mutation("gather in reverse", "members' shards are joined from the last to the first", "executor", TOGETHER,
         scenario="sharded parameters")(
    _together(ins.AllGather, lambda self, x, parts, together: together(parts[::-1])))  # fmt: skip
mutation("kept parameters gathered in reverse", "the others' shards are put into each other's places", "executor", TOGETHER,
         scenario="sharded optimizer")(
    _together(ins.AllGather, lambda self, x, parts, together: together(parts[::-1])))  # fmt: skip
mutation("reduce-scatter without the others", "a replica's shard is of its own gradient", "executor", TOGETHER,
         scenario="sharded gradients")(_together(ins.ReduceScatter, _own_part_alone))  # fmt: skip
mutation("buckets summed without the others", "a replica's gradient is its own", "executor", TOGETHER,
         scenario="replicas")(_together(ins.Reduce, _own_part_alone))  # fmt: skip
mutation("gathered once for all steps", "what was gathered in the first step is used in the second", "executor", TOGETHER,
         scenario="sharded parameters")(_together(ins.AllGather, _once))  # fmt: skip
mutation("kept buffer not refreshed", "a kept bucket is brought up to date in the first step only", "executor", TOGETHER,
         scenario="sharded optimizer")(_together(ins.AllGather, _once))  # fmt: skip


@mutation("shard of another member", "a reduce-scatter hands out the shards in the opposite order", "executor",
          (LOCAL, "reduce_scatter"), scenario="sharded gradients")  # fmt: skip
def _shard_of_another_member(original: Function, seeded: Seeded) -> Function:
    def reduce_scatter(self: Any, instruction: ins.ReduceScatter, slots: Any) -> Any:
        seeded.hit()
        return original(self, replace(instruction, members=instruction.members[::-1]), slots)

    return reduce_scatter


@mutation("own shard of another place", "a device gives the gather what it keeps in the other's place", "executor",
          (LOCAL, "all_gather"), scenario="sharded optimizer")  # fmt: skip
def _own_shard_of_another_place(original: Function, seeded: Seeded) -> Function:
    def all_gather(self: Any, instruction: ins.AllGather, slots: Any, own: torch.Tensor) -> Any:
        seeded.hit()
        return original(self, replace(instruction, members=instruction.members[::-1]), slots, own)

    return all_gather


# Buckets


def _pieces(change: Callable[[Bucket, int, Iterator[Any]], Iterator[Any]]) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def pieces(self: Bucket, member: int) -> Iterator[Any]:
            right = list(original(self, member))
            wrong = list(change(self, member, iter(right)))
            seeded.hits += wrong != right
            return iter(wrong)

        return pieces

    return wrap


mutation("pieces off by one", "a piece of a gradient begins one element too late", "executor", (Bucket, "pieces"),
         scenario="sharded optimizer")(
    _pieces(lambda self, member, found: ((n, a, b, at + (at + b - a < self.shard)) for n, a, b, at in found)))  # fmt: skip
mutation("last element of a piece lost", "the last element of a parameter is not stepped", "executor", (Bucket, "pieces"),
         scenario="sharded optimizer")(
    _pieces(lambda self, member, found: ((n, a, b - 1, at) for n, a, b, at in found)))  # fmt: skip
mutation("pieces without the first parameter", "the first parameter of a shard is not stepped", "executor", (Bucket, "pieces"),
         scenario="sharded optimizer")(_pieces(lambda self, member, found: iter(list(found)[1:])))  # fmt: skip


@mutation("strides lost in a bucket", "square weights lie turned in their bucket, and pieces are not", "executor",
          (Bucket, "views"), scenario="sharded optimizer")  # fmt: skip
def _strides_lost_in_a_bucket(original: Function, seeded: Seeded) -> Function:
    def views(self: Bucket, flat: torch.Tensor) -> Any:
        found = original(self, flat)
        square = [x.ndim == 2 and x.shape[0] == x.shape[1] for x in found]
        seeded.hits += any(square)
        return tuple(x.t() if turn else x for x, turn in zip(found, square, strict=True))

    return views


@mutation("shard delivered as the whole", "a device's piece is handed out from the beginning of the bucket", "executor",
          (outbox.Outbox, "_deliver_flat"), scenario="sharded optimizer")  # fmt: skip
def _shard_delivered_as_the_whole(original: Function, seeded: Seeded) -> Function:
    def deliver_flat(self: Any, instruction: ins.Deliver, *args: Any) -> Any:
        seeded.hits += bool(instruction.shard)
        return original(self, replace(instruction, shard=None if instruction.shard is None else 0), *args)

    return deliver_flat


# Random numbers


@mutation("one mask for all replicas", "every replica draws the random numbers of the first", "executor",
          (chunks, "chunk_seed"), scenario="replicas with dropout")  # fmt: skip
def _one_mask_for_all_replicas(original: Function, seeded: Seeded) -> Function:
    def chunk_seed(step_seed: int, chunk: Chunk, first: int = 0) -> int:
        seeded.hits += first > 0
        return original(step_seed, chunk)

    return chunk_seed


mutation("one mask for all replicas, everywhere", "also the reference draws the same numbers in all replicas", "executor",
         (chunks, "chunk_seed"), (interpreter, "chunk_seed"), scenario="replicas with dropout")(
    _one_mask_for_all_replicas)  # fmt: skip


# Several processes


def _zero_process_bug(name: str, what: str, *targets: tuple[Any, str]) -> Callable[[Wrap], Wrap]:
    return mutation(name, what, "executor", *targets, scenario="sharded on two", processes=True)


@_zero_process_bug(
    "exchange sends the wrong shards", "each member gets what another one should have", (collectives.Members, "exchange")
)
def _exchange_sends_the_wrong_shards(original: Function, seeded: Seeded) -> Function:
    def exchange(self: Any, sent: list[torch.Tensor], received: list[torch.Tensor]) -> Any:
        seeded.hits += sent[0].data_ptr() != sent[1].data_ptr()
        return original(self, sent[::-1], received)

    return exchange


@_zero_process_bug("own shard not copied", "a gather brings the others' shards alone", (process, "bind_all_gather"))
def _own_shard_not_copied(original: Function, seeded: Seeded) -> Function:
    def bind(instruction: ins.AllGather, slots: Any, members: Any, kept: torch.Tensor) -> Any:
        start, finish = original(instruction, slots, members, kept)

        def start_and_forget() -> None:
            start()
            slots[instruction.into][1].chunk(instruction.bucket.members)[members.own].zero_()
            seeded.hit()

        return start_and_forget, finish

    return bind


@_zero_process_bug(
    "reduce-scatter forgets a member", "a shard is the sum without the last member", (process, "bind_reduce_scatter")
)
def _reduce_scatter_forgets_a_member(original: Function, seeded: Seeded) -> Function:
    def bind(instruction: ins.ReduceScatter, slots: Any, members: Any) -> Any:
        start, finish = original(instruction, slots, members)

        def finish_early(received: list[torch.Tensor]) -> Any:
            seeded.hit()
            return finish([*received[:-1], torch.zeros_like(received[-1])])

        return start, finish_early

    return bind


@_zero_process_bug(
    "shards received in each other's place", "a gather joins the shards in the opposite order", (process, "bind_all_gather")
)
def _shards_received_in_each_others_place(original: Function, seeded: Seeded) -> Function:
    def bind(instruction: ins.AllGather, slots: Any, members: Any, kept: torch.Tensor) -> Any:
        start, finish = original(instruction, slots, members, kept)

        def finish_turned(flat: torch.Tensor) -> Any:
            seeded.hit()
            return finish(torch.cat(flat.chunk(instruction.bucket.members)[::-1]))

        return start, finish_turned

    return bind


@_zero_process_bug("wait for a gather dropped", "parameters are read before they are there", (process.ProcessEndpoint, "wait"))
def _wait_for_a_gather_dropped(original: Function, seeded: Seeded) -> Function:
    def wait(self: Any, instruction: ins.Wait, slots: list[Any]) -> Function:
        bound, finish = original(self, instruction, slots), self._finish.get(instruction.node)
        if finish is None or instruction.label != "allgather":
            return bound
        kept: list[Any] = []

        def ignore() -> None:
            kept.append(slots[instruction.into])  # the shards must still have a place to go to
            slots[instruction.into] = finish(kept[-1][1].clone())
            seeded.hit()

        return ignore

    return wait
