"""Programs: JSON in both directions, files, and errors that need no graph."""

from __future__ import annotations

import dataclasses
import json
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import numpy
import pytest

from lightning_piper.directives import (
    Directive,
    Order,
    Place,
    ShardExperts,
    ShardSequences,
    ShardWeights,
    Split,
    parse,
    to_json,
)
from lightning_piper.directives.program import annotations_of
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules import gpipe, one_f_one_b

PROGRAM: list[Directive] = [
    Place(filter={"PP": 0}, devices=[0]),
    Place(filter={"PP": [1, 2], "EP": "-"}, devices=[1], stream="other"),
    Split(filter={"PASS": "*"}, dim_name="MB", num_microbatches=3),
    Order(
        filters=[
            {"PP": 0, "MB": 0},
            [{"PP": 0, "MB": 1}, {"PP": 0, "MB": 2, "PASS": "F"}],
            {"MB": 2, "PASS": "B"},
        ]
    ),
]
JSON = [
    {"op": "place", "filter": {"PP": 0}, "devices": [0]},
    {"op": "place", "filter": {"PP": [1, 2], "EP": "-"}, "devices": [1], "stream": "other"},
    {"op": "split", "filter": {"PASS": "*"}, "dim_name": "MB", "num_microbatches": 3},
    {
        "op": "order",
        "filters": [
            {"PP": 0, "MB": 0},
            [{"PP": 0, "MB": 1}, {"PP": 0, "MB": 2, "PASS": "F"}],
            {"MB": 2, "PASS": "B"},
        ],
    },
]


def test_both_spellings_mean_the_same() -> None:
    assert to_json(PROGRAM) == JSON
    assert parse(JSON) == PROGRAM
    assert parse(JSON)[1:] != PROGRAM[:-1], "directives with other fields are not equal"


@pytest.mark.parametrize(
    "program", [PROGRAM, gpipe(3, 4), one_f_one_b(2, 5, devices=[1, 0], tag="X", dim_name="UB")]
)
def test_a_round_trip_through_json(program: list[Directive]) -> None:
    assert parse(json.loads(json.dumps(to_json(program)))) == program


def test_spellings_may_be_mixed_and_tuples_given() -> None:
    assert parse([PROGRAM[0], JSON[1], *PROGRAM[2:]]) == PROGRAM
    assert parse(tuple(JSON)) == parse(entry for entry in JSON) == PROGRAM
    assert to_json([Place(filter={"PP": (0, 1)}, devices=(0,))]) == [
        {"op": "place", "filter": {"PP": [0, 1]}, "devices": [0]}
    ]


def of_a_configuration(value: Any) -> Any:
    """Return a value in containers that are not dicts and lists, like the containers of Hydra's
    configurations.
    """
    if isinstance(value, dict):
        return UserDict({key: of_a_configuration(item) for key, item in value.items()})
    return UserList(map(of_a_configuration, value)) if isinstance(value, list) else value


def test_a_program_may_come_from_a_configuration() -> None:
    whole = of_a_configuration({"version": 1, "annotate": {"PP": [["a"], ["b.*"]]}, "directives": JSON})
    assert parse(of_a_configuration(JSON)) == parse(whole) == PROGRAM and to_json(whole) == JSON
    assert json.dumps(annotations_of(whole)) == '{"PP": [["a"], ["b.*"]]}'
    assert to_json([Place(filter=UserDict({"PP": UserList([0])}), devices=range(2))]) == [
        {"op": "place", "filter": {"PP": [0]}, "devices": [0, 1]}
    ]
    for devices in ("01", b"01", UserList(["0"])):
        with pytest.raises(DirectiveError, match=r"directive 0 \(place\): field 'devices'"):
            parse(UserList([{"op": "place", "filter": {}, "devices": devices}]))


def test_what_is_malformed_is_not_written() -> None:
    assert to_json([PROGRAM[0], JSON[1]]) == JSON[:2], "both spellings, as everywhere"
    for devices, axes in ((numpy.arange(2), ()), ({0, 1}, ()), ([[0, 1]], numpy.array(["dp", "ep"]))):
        with pytest.raises(DirectiveError, match=r"directive 0 \(place\): field '(devices|axes)'"):
            to_json([Place(filter={}, devices=devices, axes=axes)])  # type: ignore[arg-type]
    with pytest.raises(DirectiveError, match=r"directive 0 is \[Place"):
        to_json([PROGRAM[:1]])


@pytest.mark.parametrize("kind", [str, Path])
def test_a_program_from_a_file(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "program.json"
    path.write_text(json.dumps(JSON))
    assert parse(kind(path)) == PROGRAM


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"directives file '.*program.json' does not exist"),
        ("[{", r"directives file '.*program.json' cannot be read as JSON: Expecting property name"),
        (
            "3",
            r"directives file '.*program.json' contains a value of type int instead of directives\. Write a list of directives",
        ),
        ("[]]", "cannot be read as JSON"),
        ('[{"op": "place", "filter": {}}]', r"directive 0 \(place\): field 'devices' is missing"),
    ],
)
def test_a_file_that_holds_no_program(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "program.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DirectiveError, match=says):
        parse(path)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DirectiveError, match=r"cannot be read as JSON: .*directory"):
        parse(tmp_path)


@pytest.mark.parametrize("directives", [JSON, PROGRAM, tuple(PROGRAM), []])
def test_a_program_may_say_its_version(directives: Any) -> None:
    assert parse({"version": 1, "directives": directives}) == parse(directives)


def test_a_file_may_say_its_version(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(json.dumps({"directives": JSON, "version": 1}))
    assert parse(path) == PROGRAM
    assert to_json(parse(path)) == JSON, "what is written is a list, as ever"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            JSON[0],
            r"is an object without the key 'version'. Give a list of directives, or {\"version\": 1, "
            r"\"directives\": ",
        ),
        ({"directives": JSON}, "is an object without the key 'version'"),
        ({"version": 2, "stages": []}, r": version 2 is unknown. Give version 1 \[PIPER-D001\]$"),
        ({"version": "1", "directives": JSON}, r": version '1' is unknown. Give version 1 \[PIPER-D001\]$"),
        ({"version": True, "directives": JSON}, r": version True is unknown"),
        ({"version": 1.0, "directives": JSON}, r": version 1.0 is unknown"),
        (
            {"version": 1, "directives": JSON, "name": "gpipe"},
            r": the key 'name' is unknown. Give one of version, annotate, directives, about \[PIPER-D001\]$",
        ),
        ({"version": 1}, r": the key 'directives' is missing. Give a list of directives \[PIPER-D001\]$"),
        (
            {"version": 1, "directives": JSON[0]},
            r": the key 'directives' is {'op': 'place', .*}. Give a list of directives \[PIPER-D001\]$",
        ),
        ({"version": 1, "directives": None}, r": the key 'directives' is None. Give"),
        (
            {"version": 1, "directives": "program.json"},
            r": the key 'directives' is 'program.json'. Give a list of directives \[PIPER-D001\]$",
        ),
        (
            {"version": 1, "directives": [JSON[0], {"op": "plce"}]},
            r"directive 1 \(op 'plce'\): field 'op' is unknown",
        ),
    ],
)
def test_an_object_that_is_no_program(program: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(json.dumps(program))
    for source, where in ((program, "the program"), (path, r"directives file '.*program.json'")):
        with pytest.raises(
            DirectiveError, match=says if says.startswith("directive 1") else where + r"( |)" + says
        ):
            parse(source)


@pytest.mark.parametrize("source", [PROGRAM[0], 3, None])
def test_what_is_no_program(source: Any) -> None:
    with pytest.raises(
        DirectiveError,
        match=r"the program is (an? )?\w+\. Give a list of directives, or the path of a JSON file",
    ):
        parse(source)


PLACE, SPLIT, ORDER = JSON[0], JSON[2], JSON[3]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("place", r"directive 1 is 'place'. Give a directive or an object such as"),
        ({"filter": {}}, r"directive 1 is {'filter': {}}"),
        (
            {"op": "plce"},
            r"directive 1 \(op 'plce'\): field 'op' is unknown. Give one of .*order, place, .*split",
        ),
        ({"op": None}, r"\(op None\): field 'op' is unknown"),
        ({"op": ["place"]}, r"\(op \['place'\]\): field 'op' is unknown"),
        (
            {**PLACE, "device": [0]},
            r"directive 1 \(place\): field 'device' is unknown. Give one of filter, devices, axes, stream",
        ),
        (
            {"op": "split", "filter": {}, "dim_name": "MB"},
            r"\(split\): field 'num_microbatches' is missing. Give a value of 'num_microbatches'",
        ),
        ({"op": "order"}, r"\(order\): field 'filters' is missing. Give a value of 'filters'"),
        ({**PLACE, "filter": "PP"}, r"\(place\): field 'filter': 'PP' is not a filter"),
        ({**PLACE, "filter": {"PP": -1}}, r"field 'filter': tag 'PP' has -1"),
        (
            {**PLACE, "devices": 0},
            r"field 'devices': 0 is not a list of distinct devices. Give distinct device indices >= 0, such as \[0\]",
        ),
        ({**PLACE, "devices": []}, r"field 'devices': \[\] is not a list of distinct devices"),
        ({**PLACE, "devices": [-1]}, r"field 'devices': \[-1\] is not a list of distinct devices"),
        (
            {**PLACE, "devices": ["cuda:0"]},
            r"field 'devices': \['cuda:0'\] is not a list of distinct devices",
        ),
        ({**PLACE, "devices": [True]}, r"field 'devices': \[True\] is not a list of distinct devices"),
        (
            {**PLACE, "devices": [0, 0]},
            r"field 'devices': \[0, 0\] is not a list of distinct devices. Give distinct",
        ),
        (
            {**PLACE, "stream": ""},
            r"field 'stream': '' is not a stream. Give a name of 1 to 100 printable characters, such as 'compute'",
        ),
        ({**PLACE, "stream": 1}, r"field 'stream': 1 is not a stream"),
        (
            {**SPLIT, "dim_name": ""},
            r"\(split\): field 'dim_name': '' is not usable. Give a new tag such as 'MB'",
        ),
        ({**SPLIT, "dim_name": "PASS"}, r"field 'dim_name': 'PASS' is not usable"),
        (
            {**SPLIT, "num_microbatches": 0},
            r"field 'num_microbatches': 0 is not a number of microbatches. Give an integer >= 1",
        ),
        (
            {**SPLIT, "num_microbatches": 2.0},
            r"field 'num_microbatches': 2.0 is not a number of microbatches. Give an integer >= 1",
        ),
        ({**SPLIT, "num_microbatches": True}, r"field 'num_microbatches': True"),
        (
            {**ORDER, "filters": [{"PP": 0}]},
            r"\(order\): field 'filters': \[{'PP': 0}\] is not an order. Give a list of at least two filters",
        ),
        (
            {**ORDER, "filters": {"PP": 0}},
            r"field 'filters': {'PP': 0} is not an order. Give a list of at least two filters",
        ),
        (
            {**ORDER, "filters": [{"PP": 0}, []]},
            r"field 'filters\[1\]': \[\] is not a group. Give a filter or a non-empty list",
        ),
        ({**ORDER, "filters": [{"PP": 0}, 3]}, r"field 'filters\[1\]': 3 is not a group"),
        ({**ORDER, "filters": [{"PP": 0}, [{"PASS": "G"}]]}, r"field 'filters\[1\]': PASS 'G' is unknown"),
    ],
)
def test_a_malformed_entry_is_named_by_index_and_field(entry: Any, says: str) -> None:
    with pytest.raises(DirectiveError, match=says):
        parse([PLACE, entry, SPLIT])


def test_a_malformed_dataclass_is_refused_like_its_json() -> None:
    with pytest.raises(
        DirectiveError, match=r"directive 0 \(place\): field 'devices': 0 is not a list of distinct devices"
    ):
        parse([Place(filter={}, devices=0)])  # type: ignore[arg-type]


def test_directives_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROGRAM[0].filter = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "entry, now",
    [
        ({"filter": {"EP": "*"}}, ShardExperts(filter={"EP": "*"})),
        (
            {"devices": [0, 1], "params": None, "values": None, "attention": None},
            ShardExperts(devices=[0, 1]),
        ),
        ({"axis": "tp", "stream": "tp", "params": {"a": 0}}, ShardWeights(params={"a": 0})),
        ({"params": {"a": 0}}, ShardWeights(axis="ep", stream="alltoall", params={"a": 0})),
        (
            {"axis": "cp", "stream": "cp", "params": {}, "values": {"*": 1}, "attention": "ring"},
            ShardSequences(attention="ring"),
        ),
        ({"axis": "cp", "stream": "cp", "values": {"*": [1, 2]}}, ShardSequences(values={"*": [1, 2]})),
    ],
)
def test_the_single_shard_of_earlier_programs_is_read(entry: dict[str, Any], now: Directive) -> None:
    assert parse([{"op": "shard", **entry}]) == [now]


def test_its_unknown_fields_are_errors() -> None:
    with pytest.raises(DirectiveError, match=r"directive 0 \(shard_experts\): field 'parms'"):
        parse([{"op": "shard", "parms": {}}])
