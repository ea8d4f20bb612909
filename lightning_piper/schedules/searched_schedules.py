"""The schedules among which a search chooses, and from which `schedule=` of the parallel degrees takes a
name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec

from lightning_piper.common.argument_names import checks_names
from lightning_piper.directives import Directive
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules.actions import Row

P = ParamSpec("P")


class SearchedSchedule(NamedTuple):
    """The facts about a schedule builder that a search needs.

    Attributes:
        builder: The schedule builder, which returns the directives.
        rows: Returns the passes of each rank. Its arguments are the numbers of ranks, of microbatches and of
            stages on each rank.
        per_rank: Numbers of stages on each rank that a search tries.
        folded: Whether the stages lie along a V: down the ranks and up again.
        split: Whether backward passes are split into BI and BW.
        whole_too: Whether some backward passes are whole although other backward passes are split.
        exists: Returns whether the schedule exists for a number of ranks and of microbatches.
        alike: The name of a schedule that has the same passes in the same order if there is one microbatch. A
            search then tries only that schedule. None: there is no such schedule.
        argument: The builder's argument for the number of stages on each rank. None if the number is fixed.
    """

    builder: Callable[..., list[Directive]]
    rows: Callable[[int, int, int], list[Row]]
    per_rank: tuple[int, ...] = (1,)
    folded: bool = False
    split: bool = False
    whole_too: bool = False
    exists: Callable[[int, int], bool] = lambda ranks, microbatches: ranks > 1
    alike: str | None = None
    argument: str | None = None


SEARCHED: dict[str, SearchedSchedule] = {}  # name of a builder -> its schedule, in the order of a search


def searched(
    rows: Callable[[int, int, int], list[Row]],
    per_rank: tuple[int, ...] = (1,),
    folded: bool = False,
    split: bool = False,
    whole_too: bool = False,
    exists: Callable[[int, int], bool] = lambda ranks, microbatches: ranks > 1,
    alike: str | None = None,
    argument: str | None = None,
) -> Callable[[Callable[P, list[Directive]]], Callable[P, list[Directive]]]:
    """Add the decorated schedule builder to the schedules among which a search chooses.

    The builder takes the arguments of `gpipe`, and the argument `argument`. `SearchedSchedule` explains the
    arguments of this decorator. `rows` must return the passes in the order of the builder's directives: the
    search computes the duration of a step and its memory from them.

    The decorated builder also reports unknown argument names. A second builder of the same name in the same
    Python module replaces the first.

    Raises:
        DirectiveError: A builder of a different Python module has the same name.
    """

    def add(builder: Callable[P, list[Directive]]) -> Callable[P, list[Directive]]:
        name = builder.__name__
        if name in SEARCHED and SEARCHED[name].builder.__module__ != builder.__module__:
            raise DirectiveError(
                f"searched: the search already has a schedule {name!r}. Rename the builder [PIPER-D020]"
            )
        builder = checks_names(builder)
        SEARCHED[name] = SearchedSchedule(
            builder, rows, per_rank, folded, split, whole_too, exists, alike, argument
        )
        return builder

    return add
