"""Errors of a directive come with a note that names the line that built it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.directives import parse, to_json
from tests.dags import build

HERE = f"{__file__}:"


def line() -> str:
    """Return `file:line` of the caller."""
    return f"{HERE}{sys._getframe(1).f_lineno}"


def notes(program: object, read: Callable[[Any], object] = parse) -> list[str]:
    with pytest.raises(piper.DirectiveError) as error:
        read(program)
    return getattr(error.value, "__notes__", [])


def test_the_note_names_the_line_of_the_directive() -> None:
    wrong, at = piper.Replicate(filter={}, devices=[0, 0]), line()
    program = [piper.Place([0, 1]), wrong]
    assert notes(program) == notes(program, piper.PiperStrategy)
    assert notes(program) == [f"directive 1 (replicate) was built at {at}"]


def test_errors_of_a_program_that_is_applied_have_the_note() -> None:
    wrong, at = piper.Place(filter={"PP": 7}, devices=[0]), line()
    program = [piper.Split(2), wrong]
    assert notes(program, lambda found: build("mlp", *found)) == [f"directive 1 (place) was built at {at}"]
    assert notes(to_json(program), lambda found: build("mlp", *found)) == []


def test_a_copy_has_the_line_that_copies() -> None:
    """It is the caller's line, not one of the standard library."""
    place = piper.Place([0])
    copy, at = dataclasses.replace(place, devices=[1]), line()
    assert copy.built_at == at


def test_the_line_of_a_builder_is_the_callers() -> None:
    program, at = piper.schedules.gpipe(2, 2), line()
    assert {directive.built_at for directive in program} == {at}


def test_fields_that_are_filled_in_keep_the_line() -> None:
    replicate, at = piper.Replicate(), line()
    [_, found] = parse([piper.Place([0, 1]), replicate])
    assert found != replicate and found.built_at == at


def test_directives_from_json_have_no_line() -> None:
    wrong = {"op": "replicate", "devices": [0, 0]}
    assert notes([wrong]) == []
    [place] = parse([{"op": "place", "devices": [0]}])
    assert place.built_at is None


def test_the_line_is_no_field() -> None:
    first = piper.Place([0])
    second = dataclasses.replace(first)
    assert first == second and first.built_at != second.built_at
    assert to_json([first]) == to_json([second]) == [{"op": "place", "filter": {}, "devices": [0]}]
    assert repr(first) == repr(second)
