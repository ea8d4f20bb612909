"""A schedule that users write in a file of their own: the search and the parallel degrees take it by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

import lightning_piper as piper
from lightning_piper import verify
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules import Action, one_by_one, program_of, searched
from lightning_piper.schedules.actions import Devices, Row
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.program_writer import write
from tests.pages import Layers, samples
from tests.search.problems import found, problem


def rows_of(stages: int, microbatches: int) -> list[Row]:
    """Return the rows of GPipe in waves, with as many microbatches in a wave as there are stages."""
    return [
        one_by_one(
            *(
                Action(stage, kind, mb)
                for start in range(0, microbatches, stages)
                for kind in "FB"
                for mb in range(start, min(start + stages, microbatches))
            )
        )
        for stage in range(stages)
    ]


@pytest.fixture
def waves_of_a_test() -> Iterator[None]:
    @searched(lambda ranks, microbatches, _: rows_of(ranks, microbatches))
    def waves_of_a_test(
        stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
    ) -> list[piper.Directive]:
        return program_of(
            rows_of(stages, microbatches), microbatches, devices, tag, dim_name, "waves_of_a_test"
        )

    yield
    del SEARCHED["waves_of_a_test"]


@pytest.mark.usefixtures("waves_of_a_test")
def test_degrees_take_the_schedule_by_name() -> None:
    program = piper.parallel(
        pp=2, microbatches=4, schedule="waves_of_a_test", module=Layers(4), batch=samples()
    )
    report = verify(Layers(2, "PP"), samples(), program)
    assert str(report).endswith("verified")
    (order, _) = orders_of(program)
    assert [each["PASS"] for each in order.filters] == ["F", "F", "B", "B"] * 2


@pytest.mark.usefixtures("waves_of_a_test")
def test_the_search_chooses_the_schedule_and_writes_it() -> None:
    space = replace(problem(3), schedules=("waves_of_a_test",))
    best = found(space).best
    assert best.layout.schedule == "waves_of_a_test" and best.layout.ranks > 1
    layout = best.layout
    written = write(best, [[f"{i}"] for i in range(layout.stages)])
    built = SEARCHED["waves_of_a_test"].builder(layout.stages, layout.microbatches)
    assert orders_of(written.directives) == orders_of(built) != []


def orders_of(directives: Sequence[piper.Directive]) -> list[piper.Order]:
    return [each for each in directives if isinstance(each, piper.Order)]


@pytest.mark.usefixtures("waves_of_a_test")
def test_two_schedules_cannot_have_one_name() -> None:
    def waves_of_a_test(*arguments: object) -> list[piper.Directive]:
        return []

    waves_of_a_test.__module__ = "another"
    with pytest.raises(
        DirectiveError, match=r"already has a schedule 'waves_of_a_test'. Rename the builder \[PIPER-D020\]"
    ):
        searched(lambda ranks, microbatches, _: rows_of(ranks, microbatches))(waves_of_a_test)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(DirectiveError, match=r"Give one of .*zbv"):
        piper.parallel(pp=2, schedule="waves_of_a_test")


def test_a_misspelled_argument_of_a_builder_names_the_accepted_ones() -> None:
    for builder in (piper.schedules.one_f_one_b, piper.schedules.dualpipe):
        with pytest.raises(
            DirectiveError, match=rf"{builder.__name__}\(num_microbatches=.*Did you mean 'microbatches'"
        ):
            builder(2, num_microbatches=4)  # type: ignore[call-arg]
