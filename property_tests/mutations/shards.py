"""Bugs of the runtime where shards and buckets are concerned, with all devices in one process and with
several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops import chunk as chunk_operation
from lightning_piper.ops.base import BINDERS
from lightning_piper.ops.communication import gather, reduce
from lightning_piper.plan import instructions as ins
from lightning_piper.runtime import chunks, collectives, process, step_outputs
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

GATHERED = (gather._AllGather, "join")
SCATTERED = (reduce._ReduceScatter, "join")
SUMMED = (reduce._AllReduce, "join")


# All devices in one process


def _together(change: Callable[[Any, Any, list[Any], Function], Any]) -> Wrap:
    """What a collective makes of its members' parts."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def join(self: Any, state: Any, received: list[Any]) -> Any:
            seeded.hit()
            return change(self, state, list(received), lambda parts: original(self, state, parts))

        return join

    return wrap


def _own_part_alone(self: Any, state: Any, parts: list[Any], together: Function) -> Any:
    if isinstance(parts[0], tuple):
        return together([p if p is state else tuple(torch.zeros_like(x) for x in p) for p in parts])
    return together([p if i == self._own else torch.zeros_like(p) for i, p in enumerate(parts)])


def _in_bfloat16(self: Any, state: Any, parts: list[Any], together: Function) -> Any:
    return together([tuple(x.bfloat16().to(x.dtype) for x in part) for part in parts])


def _once(self: Any, state: Any, parts: list[Any], together: Function) -> Any:
    """The first step's result, also in all later ones."""
    if "remembered" not in self.__dict__:
        self.remembered = tuple(x.clone() for x in together(parts))
    return self.remembered


mutation(
    "gather in reverse",
    "members' shards are joined from the last to the first",
    "executor",
    GATHERED,
    scenario="sharded parameters",
)(_together(lambda self, state, parts, together: together(parts[::-1])))
mutation(
    "kept parameters gathered in reverse",
    "the others' shards are put into each other's places",
    "executor",
    GATHERED,
    scenario="sharded optimizer",
)(_together(lambda self, state, parts, together: together(parts[::-1])))
mutation(
    "reduce-scatter without the others",
    "a replica's shard is of its own gradient",
    "executor",
    SCATTERED,
    scenario="sharded gradients",
)(_together(_own_part_alone))
mutation("buckets summed without the others", "a replica's gradient is its own", "executor", SUMMED,
         scenario="replicas")(_together(_own_part_alone))  # fmt: skip
mutation("buckets summed in bfloat16", "gradients lose most of their digits before their "
                                       "sum", "executor", SUMMED,
         scenario="replicas")(_together(_in_bfloat16))  # fmt: skip
mutation("gathered once for all steps", "what was gathered in the first step is used in the "
                                        "second", "executor", GATHERED,
         scenario="sharded parameters")(_together(_once))  # fmt: skip
mutation("kept buffer not refreshed", "a kept bucket is brought up to date in the first step "
                                      "only", "executor", GATHERED,
         scenario="sharded optimizer")(_together(_once))  # fmt: skip


def _members_turned(original: Function, seeded: Seeded) -> Function:
    def bind(instruction: ins.Collective, on: Any) -> Any:
        seeded.hit()
        return original(replace(instruction, members=instruction.members[::-1]), on)

    return bind


mutation("shard of another member", "a reduce-scatter hands out the shards in the opposite order", "executor",
         (BINDERS, ins.ReduceScatterInstruction), scenario="sharded gradients")(_members_turned)  # fmt: skip
mutation("own shard of another place", "a device gives the gather what it keeps in the other's "
                                       "place", "executor",
         (BINDERS, ins.AllGatherInstruction), scenario="sharded optimizer")(_members_turned)  # fmt: skip


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


mutation(
    "pieces off by one",
    "a piece of a gradient begins one element too late",
    "executor",
    (Bucket, "local_shards"),
    scenario="sharded optimizer",
)(_pieces(lambda self, member, found: ((n, a, b, at + (at + b - a < self.shard)) for n, a, b, at in found)))
mutation("last element of a piece lost", "the last element of a parameter is not "
                                         "stepped", "executor", (Bucket, "local_shards"),
         scenario="sharded optimizer")(
    _pieces(lambda self, member, found: ((n, a, b - 1, at) for n, a, b, at in found)))  # fmt: skip
mutation("pieces without the first parameter", "the first parameter of a shard is not stepped", "executor",
         (Bucket, "local_shards"), scenario="sharded optimizer")(
    _pieces(lambda self, member, found: iter(list(found)[1:])))  # fmt: skip


@mutation("strides lost in a bucket", "square weights lie turned in their bucket, and pieces are "
                                      "not", "executor",
          (Bucket, "views"), scenario="sharded optimizer")  # fmt: skip
def _strides_lost_in_a_bucket(original: Function, seeded: Seeded) -> Function:
    def views(self: Bucket, flat: torch.Tensor) -> Any:
        found = original(self, flat)
        square = [x.ndim == 2 and x.shape[0] == x.shape[1] for x in found]
        seeded.hits += any(square)
        return tuple(x.t() if turn else x for x, turn in zip(found, square, strict=True))

    return views


@mutation("shard delivered as the whole", "a device's piece is handed out from the beginning of the "
                                          "bucket", "executor",
          (step_outputs.StepOutputs, "_deliver_flat"), scenario="sharded optimizer")  # fmt: skip
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


mutation("one mask for all replicas, everywhere", "also the reference draws the same numbers in all "
                                                  "replicas", "executor",
         (chunks, "chunk_seed"), (chunk_operation, "chunk_seed"), scenario="replicas with dropout")(
    _one_mask_for_all_replicas)  # fmt: skip


# Several processes


def _zero_process_bug(name: str, what: str, *targets: tuple[Any, str]) -> Callable[[Wrap], Wrap]:
    return mutation(name, what, "executor", *targets, scenario="sharded on two", processes=True)


@_zero_process_bug(
    "exchange sends the wrong shards",
    "each member gets what another one should have",
    (collectives.Members, "exchange"),
)
def _exchange_sends_the_wrong_shards(original: Function, seeded: Seeded) -> Function:
    def exchange(self: Any, sent: list[torch.Tensor], received: list[torch.Tensor]) -> Any:
        seeded.hits += sent[0].data_ptr() != sent[1].data_ptr()
        return original(self, sent[::-1], received)

    return exchange


def _collective(
    kind: str, change: Callable[[Function, Function, Any, Seeded, int], tuple[Function, Function]]
) -> Wrap:
    """`change` gives what starts and what finishes a collective of this kind, from these, what is pending,
    and the own member.
    """

    def wrap(original: Function, seeded: Seeded) -> Function:
        def bind(exchange: Any, into: int, slots: Any, members: Any) -> Any:
            start, finish = original(exchange, into, slots, members)
            if exchange.kind != kind:
                return start, finish
            return change(start, finish, lambda: slots[into][1], seeded, members.own)

        return bind

    return wrap


COLLECTIVE = (process, "bind_collective")


@functools.partial(_collective, "all_gather")
def _own_shard_not_copied(
    start: Function, finish: Function, pending: Function, seeded: Seeded, own: int
) -> Any:
    def start_and_forget() -> None:
        start()
        pending()[1][own].zero_()
        seeded.hit()

    return start_and_forget, finish


@functools.partial(_collective, "reduce_scatter")
def _reduce_scatter_forgets_a_member(
    start: Function, finish: Function, pending: Function, seeded: Seeded, own: int
) -> Any:
    def finish_early(found: Any) -> Any:
        seeded.hit()
        return finish((found[0], [*found[1][:-1], torch.zeros_like(found[1][-1])]))

    return start, finish_early


@functools.partial(_collective, "all_gather")
def _shards_received_in_each_others_place(
    start: Function, finish: Function, pending: Function, seeded: Seeded, own: int
) -> Any:
    def finish_turned(found: Any) -> Any:
        seeded.hit()
        (shard, _), received = found
        return finish(([shard, torch.cat(received[::-1])], received))

    return start, finish_turned


_zero_process_bug("own shard not copied", "a gather brings the others' shards alone", COLLECTIVE)(
    _own_shard_not_copied
)
_zero_process_bug(
    "reduce-scatter forgets a member", "a shard is the sum without the last member", COLLECTIVE
)(_reduce_scatter_forgets_a_member)
_zero_process_bug("shards received in each other's place", "a gather joins the shards in the opposite "
                                                           "order", COLLECTIVE)(
    _shards_received_in_each_others_place)  # fmt: skip


@_zero_process_bug(
    "wait for a gather dropped",
    "parameters are read before they are there",
    (process.ProcessEndpoint, "wait"),
)
def _wait_for_a_gather_dropped(original: Function, seeded: Seeded) -> Function:
    def wait(self: Any, instruction: ins.WaitWork, slots: list[Any]) -> Function:
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
