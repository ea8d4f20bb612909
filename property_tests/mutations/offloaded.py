"""Bugs of `offload`: of stores, fetches, and the memory of the host that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_piper.directives import offload
from lightning_piper.directives.offload import Offload
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ops import host
from lightning_piper.ops.host import Fetch, HostPool, Store
from lightning_piper.plan import instructions as ins
from lightning_piper.plan import order as plan_order
from property_tests.mutations.plans import _plan_bug
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

APPLY, STORED = (Offload, "apply"), "stored on the host"
Change = Callable[[TrainingDAG, list[Store], list[Fetch]], object]


def _applied(change: Change) -> Wrap:
    """The graph after an `offload`, changed."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def apply(self: Any, dag: TrainingDAG) -> None:
            original(self, dag)
            change(dag, list(dag.of_type(Store)), list(dag.of_type(Fetch)))
            seeded.hit()

        return apply

    return wrap


def _like(dag: TrainingDAG, fetches: list[Fetch]) -> Fetch:
    """One that brings the same as the first, of another microbatch."""
    return next(
        f
        for f in fetches[1:]
        if f.outputs[0].names == fetches[0].outputs[0].names
        and f.devices == fetches[0].devices
        and f.tags["PP"] == fetches[0].tags["PP"]
    )


def _read_on_the_host(dag: TrainingDAG, stores: list[Store], fetches: list[Fetch]) -> None:
    dag.substitute(dag.users(fetches[0])[0], (fetches[0].id, 0), fetches[0].inputs[0])


def _twice_fetched(dag: TrainingDAG, stores: list[Store], fetches: list[Fetch]) -> None:
    dag.rewire(fetches[0], inputs=_like(dag, fetches).inputs)


def _read_by_another(dag: TrainingDAG, stores: list[Store], fetches: list[Fetch]) -> None:
    dag.substitute(dag.users(fetches[0])[0], (fetches[0].id, 0), (_like(dag, fetches).id, 0))


def _fetched_elsewhere(dag: TrainingDAG, stores: list[Store], fetches: list[Fetch]) -> None:
    dag.change(fetches[0], devices=tuple(1 - device for device in fetches[0].devices))


def _fetched_from_the_device(dag: TrainingDAG, stores: list[Store], fetches: list[Fetch]) -> None:
    dag.rewire(fetches[0], inputs=dag.nodes[fetches[0].inputs[0][0]].inputs)


def _said_to_be_another(dag: TrainingDAG, stores: list[Store], fetches: list[Fetch]) -> None:
    other = next(store for store in stores if store.outputs != stores[0].outputs)
    dag.change(stores[0], outputs=other.outputs)


for _name, _what, _change in (
    ("read on the host", "a backward pass reads a value as it lies on the host", _read_on_the_host),
    ("another's fetched", "what is fetched is that of another microbatch", _twice_fetched),
    ("another's read", "a backward pass reads what was fetched for another microbatch", _read_by_another),
    ("fetched elsewhere", "a device fetches from the host of another one", _fetched_elsewhere),
    ("fetched from the device", "a fetch reads what was never stored", _fetched_from_the_device),
    (
        "stored as something else",
        "a store says that it makes another value than it reads",
        _said_to_be_another,
    ),
):
    mutation(_name, _what, "rewrite", APPLY, scenario=STORED)(_applied(_change))


@mutation("one reader kept", "of those that read what is kept, one goes on reading it on the "
                             "device", "rewrite",
          (offload, "_kept"), scenario=STORED)  # fmt: skip
def _one_reader_kept(original: Function, seeded: Seeded) -> Function:
    def kept(*args: Any) -> Any:
        found = original(*args)
        seeded.hits += bool(found)
        return dict(list(found.items())[1:])

    return kept


@mutation(
    "fetches at once",
    "what was stored is fetched at once",
    "plan",
    (plan_order, "with_gathers"),
    scenario=STORED,
)
def _fetched_at_once(original: Function, seeded: Seeded) -> Function:
    def with_gathers(dag: TrainingDAG, found: Any) -> Any:
        order = [node for node in original(dag, found) if not isinstance(node, Fetch)]
        for fetch in dag.of_type(Fetch):
            order.insert(order.index(dag.nodes[fetch.inputs[0][0]]) + 1, fetch)
            seeded.hit()
        return order

    return with_gathers


def _fetch_behind_its_reader(device: int, instructions: list[ins.Instruction]) -> list[ins.Instruction]:
    fetch = next((x for x in instructions if isinstance(x, ins.FetchInstruction)), None)
    if fetch is None:
        return instructions
    rest = [x for x in instructions if x is not fetch]
    reader = next(
        i
        for i, x in enumerate(rest)
        if isinstance(x, ins.Run) and fetch.into in [read.slot for read in x.reads]
    )
    return [*rest[: reader + 1], fetch, *rest[reader + 1 :]]


def _without(
    kind: type[ins.Instruction], stream: str
) -> Callable[[int, list[ins.Instruction]], list[ins.Instruction]]:
    return lambda device, instructions: [
        x for x in instructions if not (isinstance(x, kind) and x.stream == stream)
    ]


_plan_bug(
    "fetch behind its reader", "a chunk reads what is fetched only then", _fetch_behind_its_reader, STORED
)
_plan_bug(
    "stores do not wait",
    "a store begins before what it stores is there",
    _without(ins.WaitEvent, "store"),
    STORED,
)
_plan_bug(
    "fetches do not wait", "a fetch begins before all is stored", _without(ins.WaitEvent, "fetch"), STORED
)
_plan_bug("store dropped", "the plan lacks its stores", _without(ins.StoreInstruction, "store"), STORED)


@mutation("room given back too early", "what is stored next lies where something still "
                                       "waits", "executor", (HostPool, "store"),
          scenario=STORED)  # fmt: skip
def _room_given_back(original: Function, seeded: Seeded) -> Function:
    def store(self: HostPool, bundle: Any) -> Any:
        stored = original(self, bundle)
        for room in stored:
            self._free[room.nbytes].append((room, None))
            seeded.hit()
        return stored

    return store


@mutation("span too far on", "what is stored of a storage begins behind its first "
                             "number", "executor", (host._View, "of"),
          scenario=STORED)  # fmt: skip
def _span_too_far(original: Function, seeded: Seeded) -> Function:
    def of(self: Any, span: torch.Tensor, first: int) -> torch.Tensor:
        moved = original(self, span, first)
        if span.nbytes < 2 * self.dtype.itemsize or not self.dtype.is_floating_point:
            return moved
        seeded.hit()
        return torch.roll(moved, 1)

    return of
