"""Errors in building the program: files, fields, filters, schedules. They do not need a module."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.directives import parse
from tests.errors.case import PLACES, SPLIT, Case, Cases, written

TITLE = "Building the program"
INTRO = """Piper raises these errors when it reads the list of directives: in `PiperStrategy(directives=...)`, \
`piper.compile`, `piper.verify`, a schedule builder, or a file."""


def file(what: str, content: str) -> Case:
    return Case(what, lambda: parse(written("program.json", content)))


def entry(what: str, *directives: Any) -> Case:
    return Case(what, lambda: parse([*PLACES, *directives]))


def place(what: str, condition: Any) -> Case:
    return entry(what, {"op": "place", "filter": condition, "devices": [0]})


def replicate(what: str, **fields: Any) -> Case:
    return entry(what, {"op": "replicate", "filter": {}, "devices": [0, 1], **fields})


def registered(**members: Any) -> None:
    made = type("Mine", (piper.Directive,), {"apply": lambda self, dag: None, **members})
    piper.register(dataclasses.dataclass(frozen=True, kw_only=True)(made))


CASES: Cases = [
    Case("a misspelled argument of a directive", lambda: piper.Replicate(shard_param=True)),
    Case("a misspelled argument of the strategy", lambda: piper.PiperStrategy(zero_stage=3)),
    Case("the file does not exist", lambda: parse("program.json")),
    file("a key occurs twice", '[{"op": "place", "filter": {}, "devices": [0], "devices": [1]}]'),
    file("NaN or Infinity, which JSON does not have", '[{"op": "replicate", "filter": {}, "devices": [0, '
                                                      '1], "bucket_size": NaN}]'),
    Case("the file is a device", lambda: parse("/dev/zero")),
    file("the file does not contain JSON", '[\n  {"op": "place",\n   "filter": {}, "devices" [0]}\n]'),
    file("the file contains a number", "3"),
    file("the file contains a directive instead of a list", '{"op": "place", "filter": {}, "devices": [0]}'),
    file("a program with an unknown version", '{"version": 2, "directives": []}'),
    file("a program with an unknown key", '{"version": 1, "directives": [], "name": "mine"}'),
    file("a program without a list of directives", '{"version": 1}'),
    file("a program whose `annotate` does not contain annotations", '{"version": 1, "annotate": ["first"], '
                                                                    '"directives": []}'),
    Case("a directive is given instead of a list of them",
        lambda: parse(piper.Place(filter={}, devices=[0]))),
    entry("an entry is not a directive", "place"),
    entry("an unknown `op`", {"op": "plaice", "filter": {}}),
    entry("a field that the directive does not have", {"op": "place", "filter": {}, "device": [0]}),
    entry("a field is missing", {"op": "split", "filter": {}}),
    place("a filter that is not an object", "PP"),
    place("a filter with an invalid index", {"PP": -1}),
    place("an empty list of indices", {"PP": []}),
    place("a pass that does not exist", {"PASS": "forward"}),
    place("a tag that is not text", {0: 1}),
    entry("`devices` is a number", {"op": "place", "filter": {}, "devices": 0}),
    entry("a device is named twice", {"op": "place", "filter": {}, "devices": [1, 1]}),
    entry("a stream without a name", {"op": "place", "filter": {}, "devices": [0], "stream": ""}),
    entry("a split into 0 microbatches", {**SPLIT, "num_microbatches": 0}),
    entry("`PASS` as the microbatches' tag", {**SPLIT, "dim_name": "PASS"}),
    entry("an order of one group", {"op": "order", "filters": [{"PP": 0}]}),
    entry("an empty group in an order", {"op": "order", "filters": [{"PP": 0}, []]}),
    replicate("one replica", devices=[0]),
    replicate("groups of different sizes", devices=[[0, 1], [2, 3, 4]]),
    replicate("a device with two replica indices", devices=[[0, 1], [1, 2]]),
    replicate("an invalid bucket size", bucket_size=0),
    replicate("an integer dtype for sums of gradients", reduce_dtype="int8"),
    replicate("an unknown dtype for gathers", gather_dtype="int8", zero=3),
    replicate("`gather_dtype` without a sharding switch", gather_dtype="bfloat16"),
    replicate("a shard switch that is neither true nor false", shard_params="yes"),
    replicate("`shard_by` without a sharding switch", shard_by="parameter"),
    replicate("`overlap_update` without whole parameters", overlap_update=True, zero=1),
    replicate("`shard_size` without a sharding switch", shard_size=2),
    replicate("`shard_size=1`", shard_size=1, zero=3),
    replicate("a communication stream without a name", reduce_stream=""),
    Case("a builder gets a number for the devices of all "
         "stages", lambda: schedules.one_f_one_b(2, 4, devices=2)),
    Case("more passes than a step may have", lambda: schedules.gpipe(2, 10**9)),
    Case("one tag for stages and microbatches", lambda: schedules.gpipe(2, 4, tag="MB")),
    Case("a builder gets 0 microbatches", lambda: schedules.gpipe(2, 0)),
    Case("fewer devices than stages", lambda: schedules.one_f_one_b(2, 4, devices=[0])),
    Case("`zbv` with an odd number of stages", lambda: schedules.zbv(3, 8)),
    Case("`interleaved_one_f_one_b`: rounds of different "
         "sizes", lambda: schedules.interleaved_one_f_one_b(4, 5)),
    Case("`dualpipe` with too few microbatches", lambda: schedules.dualpipe(4, 4)),
    Case("`dualpipev` with too few microbatches", lambda: schedules.dualpipev(4, 2)),
    Case("`from_csv` of a file that does not exist", lambda: schedules.from_csv("schedule.csv")),
    Case("`from_csv`: a cell that is not an action", lambda: schedules.from_csv("0F0,0X0\n")),
    Case("`from_csv`: a backward pass is missing", lambda: schedules.from_csv("0F0,0B0,0F1\n")),
    Case("`from_csv`: an empty row between two rows", lambda: schedules.from_csv("0F0,0B0\n\n1F0,1B0\n")),
    Case("`from_csv`: an empty file", lambda: schedules.from_csv("\n")),
    Case("`to_csv` of an order whose filter selects a whole stage",
         lambda: schedules.to_csv(parse([*PLACES,
             {"op": "order", "filters": [{"PP": 0, "PASS": "F"}, {"PP": 0, "PASS": "B"}]}]))),
    Case("`to_csv` of a stage without a place", lambda: schedules.to_csv(schedules.gpipe(2, 2)[1:])),
    Case("`to_csv` of two orders for one rank",
        lambda: schedules.to_csv(schedules.gpipe(1, 2) + schedules.gpipe(1, 2)[-1:])),
    Case("your own directive does not have an `op`", lambda: registered(contract="bitwise")),
    Case("your own directive does not have a contract", lambda: registered(op="mine")),
    Case("your own directive has the `op` of another "
         "directive", lambda: registered(op="place", contract="bitwise")),
]  # fmt: skip
