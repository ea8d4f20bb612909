"""A schedule as the sequence of actions of each rank, and the directives that implement it.

A schedule builder makes a row of actions for each rank. `program_of` turns the rows into directives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_piper.common.limits import DEVICES, NAME, PASSES, integer, is_name, shown
from lightning_piper.common.units import counted
from lightning_piper.directives import Directive, Order, Place, Split
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.filters import Filter

# For each rank, a device, or a group of devices over which a `replicate` divides the batch.
Devices = Sequence[int | Sequence[int]]


class Action(NamedTuple):
    """One pass of one stage for one microbatch. `kind` is `F`, `B`, `BI` or `BW`."""

    stage: int
    kind: str
    microbatch: int


# The actions of a rank in order. The actions of one entry may overlap: the second entry of
# [(Action(0, "F", 0),), (Action(0, "F", 1), Action(0, "B", 0))] is an overlap group.
Row = list[tuple[Action, ...]]


def program_of(
    rows: Sequence[Row], microbatches: int, devices: Devices | None, tag: str, dim_name: str, name: str
) -> list[Directive]:
    """Return a program that places each stage on the ranks that run it, splits the batch, and orders each
    rank's passes.

    The result has, in this order: the `Place` of each stage that one rank runs, the `Split`, the other
    `Place`s, and an `Order` for each rank with more than one entry. A stage that several ranks run has a
    `Place` for each of these ranks. This `Place` selects the rank's microbatches, so it comes after the
    split.

    Args:
        rows: The rows, by rank.
        microbatches: The number of microbatches; their tag is `dim_name`.
        devices: The device, or group of devices, of each rank (default: rank i has device i).
        tag: The tag of stages.
        dim_name: The tag of microbatches.
        name: The builder's name for error messages.

    Raises:
        DirectiveError: `devices` does not have one device (or group) for each rank, or a tag is not valid.
    """
    check_names(name, tag, dim_name)
    if devices is None and len(rows) > DEVICES:
        raise DirectiveError(
            f"{name}: the stages need {counted(len(rows), 'rank')}. Give stages for at most {DEVICES:,} ranks [PIPER-D020]"
        )
    places = _devices_of_ranks(name, range(len(rows)) if devices is None else devices)
    if len(places) != len(rows):
        raise DirectiveError(
            f"{name}: devices={shown(devices)} does not fit {counted(len(rows), 'rank')}. Give one device, "
            "or one group of devices, for each rank [PIPER-D020]"
        )
    where: dict[int, dict[int, set[int]]] = {}  # stage -> rank -> microbatches
    for rank, row in enumerate(rows):
        for action in (action for group in row for action in group):
            where.setdefault(action.stage, {}).setdefault(rank, set()).add(action.microbatch)
    whole = [
        Place(filter={tag: s}, devices=places[r])
        for s, ranks in sorted(where.items())
        if len(ranks) == 1
        for r in ranks
    ]
    shared = [
        Place(filter={tag: s, dim_name: sorted(parts)}, devices=places[r])
        for s, ranks in sorted(where.items())
        if len(ranks) > 1
        for r, parts in sorted(ranks.items())
    ]
    orders = [Order(filters=[_group(group, tag, dim_name) for group in row]) for row in rows if len(row) > 1]
    return [*whole, Split(filter={}, dim_name=dim_name, num_microbatches=microbatches), *shared, *orders]


def _group(group: Sequence[Action], tag: str, dim_name: str) -> Filter | list[Filter]:
    filters: list[Filter] = [{tag: a.stage, dim_name: a.microbatch, "PASS": a.kind} for a in group]
    return filters if len(filters) > 1 else filters[0]


def _devices_of_ranks(name: str, devices: object) -> list[list[int]]:
    """Return the list of devices of each rank. [0, 1] becomes [[0], [1]].

    Raises:
        DirectiveError: `devices` is not a sequence of devices and groups, or a group is empty or has a device
            twice.
    """
    found: list[list[int]] = []
    accepted = (
        "Give one device >= 0, or one group of devices, for each rank, such as [0, 1] or [[0, 2], [1, 3]]"
    )
    if not isinstance(devices, Sequence) or isinstance(devices, str | bytes):
        raise DirectiveError(f"{name}: devices={shown(devices)} is not a list. {accepted} [PIPER-D020]")
    for rank, own in enumerate(devices):
        group = own if isinstance(own, list | tuple | range) else [own]
        numbers = [
            number for device in group if (number := integer(device)) is not None and 0 <= number < DEVICES
        ]
        if not numbers or len(numbers) < len(group):
            large = any((integer(device) or 0) >= DEVICES for device in group)
            fix = f"Give devices below {DEVICES}" if large else accepted
            raise DirectiveError(
                f"{name}: devices={shown(devices)} has {shown(own)} for rank {rank}. {fix} [PIPER-D020]"
            )
        if len(set(numbers)) < len(numbers):
            raise DirectiveError(
                f"{name}: devices={shown(devices)} names a device twice for rank {rank}. Name it once [PIPER-D020]"
            )
        found.append(numbers)
    return found


def check_names(name: str, tag: object, dim_name: object) -> None:
    """Check the tags of stages and microbatches. `name` is the builder's name for error messages.

    Raises:
        DirectiveError: A tag is not a name, is `PASS`, or both tags are equal.
    """
    for what, value, example in (("tag", tag, "PP"), ("dim_name", dim_name, "MB")):
        if not is_name(value) or value == "PASS":
            wrong = (
                "is the tag of passes. Give another tag"
                if value == "PASS"
                else f"is not a tag. Give a string of 1 to {NAME} printable characters"
            )
            raise DirectiveError(f"{name}: {what}={shown(value)} {wrong}, such as {example!r} [PIPER-D020]")
    if tag == dim_name:
        raise DirectiveError(
            f"{name}: tag and dim_name are both {tag!r}. Give stages and microbatches different tags"
            " [PIPER-D020]"
        )


def one_by_one(*actions: Action) -> Row:
    """Return a row in which no actions overlap: each action is an entry."""
    return [(action,) for action in actions]


def checked_counts(name: str, **given: int) -> Iterator[int]:
    """Return the arguments of a builder as integers, in the given order.

    Args:
        name: The builder's name for error messages.
        given: Name of an argument -> its value. The first two are the numbers of stages and microbatches.

    Raises:
        DirectiveError: An argument is not a positive integer, or the step would have too many passes.
    """
    found: list[int] = []
    numbers = {what: integer(value) for what, value in given.items()}
    for what, number in numbers.items():
        if number is None or number < 1:
            raise DirectiveError(f"{name}: {what}={shown(given[what])}. Give an integer >= 1 [PIPER-D020]")
        if number > PASSES // 2:
            most = _most_beside(list(numbers.values())[1 - len(found)] if len(found) < 2 else None)
            raise DirectiveError(
                f"{name}: {what}={shown(given[what])}. Give at most {most}, because a step has at most {PASSES} passes, "
                "two for each stage and microbatch [PIPER-D020]"
            )
        found.append(number)
    if 2 * found[0] * found[1] > PASSES:
        raise DirectiveError(
            f"{name}: {counted(found[0], 'stage')} with {counted(found[1], 'microbatch')}. Give at most "
            f"{counted(PASSES // 2 // found[0], 'microbatch')}, because a step has at most {PASSES} passes, two for each stage "
            "and microbatch [PIPER-D020]"
        )
    return iter(found)


def _most_beside(other: int | None) -> int:
    """Return the largest number of stages with `other` microbatches, or of microbatches with `other` stages."""
    return PASSES // 2 // (other if other is not None and 1 <= other <= PASSES // 2 else 1)


def ranks_of(name: str, stages: int, stages_per_device: int) -> int:
    """Return the number of ranks with `stages_per_device` stages each.

    Raises:
        DirectiveError: `stages` is not a multiple of `stages_per_device`.
    """
    if stages % stages_per_device:
        raise DirectiveError(
            f"{name}: {counted(stages, 'stage')}, {stages_per_device} on each rank. Give a multiple of "
            f"{stages_per_device} stages [PIPER-D020]"
        )
    return stages // stages_per_device
