"""A schedule as what each rank does one after the other, and the directives that make it so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_piper.directives import Directive, Order, Place, Split
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.filters import Filter
from lightning_piper.limits import DEVICES, PASSES, integer, is_name, shown

# Of each rank: a device, or a group of devices over which a `replicate` divides the batch.
Devices = Sequence[int | Sequence[int]]


class Action(NamedTuple):
    """One pass (`F`, `B`, `BI` or `BW`) of one stage for one microbatch."""

    stage: int
    kind: str
    microbatch: int


Row = list[tuple[Action, ...]]  # what a rank does; several actions in one entry overlap


def program_of(
    rows: Sequence[Row], microbatches: int, devices: Devices | None, tag: str, dim_name: str, name: str
) -> list[Directive]:
    """Place each stage on the ranks that run it, split, and order each rank.

    A stage that several ranks run is placed after the split, each of its microbatches where it runs.

    Args:
        rows: by rank.
        microbatches: pieces of the batch, tagged `dim_name`.
        devices: of each rank; rank i has device i when left out.
        tag: of the stages.
        dim_name: of the microbatches.
        name: of the builder, for messages.

    Raises:
        DirectiveError: not one device (or group) a rank, or names that cannot be used.
    """
    check_names(name, tag, dim_name)
    places = _devices_of_ranks(name, range(len(rows)) if devices is None else devices)
    if len(places) != len(rows):
        raise DirectiveError(f"{name}: {len(places)} devices for {len(rows)} ranks; give one device, or one group, for each rank")
    where: dict[int, dict[int, set[int]]] = {}  # stage -> rank -> microbatches
    for rank, row in enumerate(rows):
        for action in (action for group in row for action in group):
            where.setdefault(action.stage, {}).setdefault(rank, set()).add(action.microbatch)
    alone = [Place(filter={tag: s}, devices=places[r]) for s, ranks in sorted(where.items()) if len(ranks) == 1 for r in ranks]
    shared = [Place(filter={tag: s, dim_name: sorted(parts)}, devices=places[r])
              for s, ranks in sorted(where.items()) if len(ranks) > 1 for r, parts in sorted(ranks.items())]  # fmt: skip
    orders = [Order(filters=[_group(group, tag, dim_name) for group in row]) for row in rows if len(row) > 1]
    return [*alone, Split(filter={}, dim_name=dim_name, num_microbatches=microbatches), *shared, *orders]


def _group(group: Sequence[Action], tag: str, dim_name: str) -> Filter | list[Filter]:
    filters: list[Filter] = [{tag: a.stage, dim_name: a.microbatch, "PASS": a.kind} for a in group]
    return filters if len(filters) > 1 else filters[0]


def _devices_of_ranks(name: str, devices: object) -> list[list[int]]:
    """A list of devices for each rank."""
    found: list[list[int]] = []
    for own in devices if isinstance(devices, Sequence) and not isinstance(devices, str | bytes) else [None]:
        group = own if isinstance(own, list | tuple | range) else [own]
        numbers = [number for device in group if (number := integer(device)) is not None and 0 <= number < DEVICES]
        if not numbers or len(numbers) < len(group) or len(set(numbers)) < len(numbers):
            accepted = "one device >= 0, or one group of them, for each rank, such as [0, 1] or [[0, 2], [1, 3]]"
            raise DirectiveError(f"{name}: devices={shown(devices)}; give {accepted}")
        found.append(numbers)
    return found


def check_names(name: str, tag: object, dim_name: object) -> None:
    """Refuse what cannot be the tags of stages and microbatches.

    Raises:
        DirectiveError: names the builder and the argument.
    """
    for what, value in (("tag", tag), ("dim_name", dim_name)):
        if not is_name(value) or value == "PASS":
            raise DirectiveError(f"{name}: {what}={shown(value)}; give the name of a tag, such as 'PP' or 'MB'")
    if tag == dim_name:
        raise DirectiveError(f"{name}: tag and dim_name are both {tag!r}; stages and microbatches need tags of their own")


def one_by_one(*actions: Action) -> Row:
    """A row without overlap."""
    return [(action,) for action in actions]


def counts(name: str, **given: int) -> Iterator[int]:
    """The arguments of a builder as integers, the numbers of stages and microbatches first.

    Raises:
        DirectiveError: names the builder and the argument that is no count; or they are too many.
    """
    found = []
    for what, value in given.items():
        number = integer(value)
        if number is None or number < 1:
            raise DirectiveError(f"{name}: {what}={shown(value)}; give an integer >= 1")
        if number > PASSES:
            raise DirectiveError(f"{name}: {what}={shown(value)}; give fewer: a step has at most {PASSES} passes")
        found.append(number)
    if 2 * found[0] * found[1] > PASSES:
        raise DirectiveError(
            f"{name}: {found[0]} stages with {found[1]} microbatches; give fewer: a step has at most {PASSES} passes, two for "
            "each stage and microbatch"
        )
    return iter(found)


def ranks_of(name: str, stages: int, stages_per_device: int) -> int:
    """Number of ranks that have `stages_per_device` stages each.

    Raises:
        DirectiveError: the stages cannot be divided so.
    """
    if stages % stages_per_device:
        raise DirectiveError(
            f"{name}: {stages} stages, {stages_per_device} on each rank; give a multiple of {stages_per_device} stages"
        )
    return stages // stages_per_device
