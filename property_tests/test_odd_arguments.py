"""Whatever is given to the public functions, what comes is an error that they document, soon, and without
much memory.
"""

from __future__ import annotations

import copy
import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse, to_json
from lightning_piper.profile import Schedule
from lightning_piper.simulate import IssueCost, Link, Network, SharedLink, read_durations, simulate
from lightning_piper.testing import POOL, Case, Model, Spec, case, cases, make_batch, programs
from lightning_piper.viz import dot_graph, text_chart

SECONDS = 20.0  # of one call, of processor time, also of a slow one; most need milliseconds
JSON = Any


class Opaque:
    """Nothing knows it, and it cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


# What is odd in any place. Deep copies are made of what is drawn, so nothing here is a generator.
ODD_JSON = [
    None, True, False, -1, 0, 1, 2, 3, 17, 2**31, 2**63, 10**9, 10**30, -(10**30), 0.5, 2.0, 1e300, 1e-320,
    -0.0, "", "PP", "MB",
    "F", "*", "-", "PASS", "BI", "é", "a b", "\n", "\x00", "\ud800", "x" * 1000, "0", [], [[]], [0], [0, 0],
    [0, 1], [1, 0],
    [[0, 1]], [[0], 1], [[0, 1], [2]], [[0, 1], [2, 3]], {}, {"PP": 0}, {"PP": [0, 1]}, {"PP": "*"}, {"": 0},
    {"PP": {}}, {"PASS": []}, {"PASS": "B"}, {"op": "place"}, nested(50), [0] * 2000,
    {str(i): i for i in range(300)},
]  # fmt: skip
ODD = [
    *ODD_JSON, float("nan"), float("inf"), -float("inf"), 10**5000, b"PP", object(), Opaque(), (0, 1),
    range(3), {0, 1},
    np.int64(2), np.float64(2.0), np.bool_(True), np.arange(3), torch.tensor(2), torch.ones(2, 2),
    torch.ones(0), Path("none"),
    nested(5000),
    {1: 2}, timedelta(1), ..., [None], [Opaque()], {"PP": np.int64(0)}, {"PP": np.arange(2)},
    {"PP": Opaque()}, complex(1, 2),
]  # fmt: skip


BYTES_PUT_IN = [
    b"",
    b"\xff",
    b"\x00",
    b"NaN",
    b"1e999",
    b"[" * 3000,
    b'"op": 1, ',
    b"{",
    b"}",
    b",",
    b"9" * 5000,
]


def documented(call: Callable[[], object]) -> Exception | None:
    """The error of this package that a call ends with, if it does; soon, and without much memory."""
    gc.disable()  # what other tests have left to collect is none of its time
    start = time.process_time()
    try:
        call()
        found = None
    except piper.PiperError as error:
        found = error
        assert len(str(error)) < 5000, "a message is short"
    finally:
        taken = time.process_time() - start
        gc.enable()
    assert taken < SECONDS
    return found


@cache
def tiny() -> tuple[Model, Any]:
    spec = POOL[0]
    return Model(spec), make_batch(spec, 4)


# Programs


@st.composite
def mutated(draw: Any, case: Case) -> JSON:
    """A valid program of which some places, anywhere, hold something else, or nothing, or more."""
    program = json.loads(json.dumps(to_json(draw(programs(case)))))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(program))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        other = copy.deepcopy(draw(st.sampled_from(ODD_JSON)))
        match draw(
            st.sampled_from(["other", "other", "other", "gone", "twice", "swapped", "renamed", "added"])
        ):
            case "other":
                holder[key] = other
            case "gone":
                del holder[key]
            case "twice" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "swapped":
                there, at = draw(st.sampled_from(places))
                holder[key] = copy.deepcopy(there[at])
            case "renamed" if isinstance(holder, dict):
                holder[draw(st.sampled_from(["filter", "devices", "PP", "MB", "PASS", "op", "", "é"]))] = (
                    holder.pop(key)
                )
            case "added" if isinstance(holder, dict):
                holder[
                    draw(
                        st.sampled_from(
                            ["stream", "devices", "PP", "MB", "PASS", "shard_params", "bucket_size", "x"]
                        )
                    )
                ] = other
    return program


def _places(value: JSON) -> Any:
    for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


@settings(max_examples=settings().max_examples * 4)
@given(data=st.data(), case=cases(pool=POOL[:4]))
def test_malformed_programs(tally: Counter[str], data: Any, case: Case) -> None:
    """Compiled, or refused with a DirectiveError."""
    program = data.draw(mutated(case))
    note(repr(program)[:3000])
    error = documented(lambda: compile_step(case.step, tuple(parse(program))))
    assert error is None or isinstance(error, piper.DirectiveError), repr(error)
    tally[f"malformed programs, {'compiled' if error is None else 'refused'}"] += 1


@given(data=st.data())
def test_malformed_files(tally: Counter[str], tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """JSON with bytes changed, cut off or put in."""
    text = bytearray(json.dumps(to_json(data.draw(programs(case(POOL[0], 4))))).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        new = data.draw(st.sampled_from(BYTES_PUT_IN))
        text[at : at + data.draw(st.integers(0, 3))] = new
    path = tmp_path_factory.getbasetemp() / "program.json"
    path.write_bytes(text)
    for read in (parse, schedules.from_csv, read_durations):
        documented(lambda read=read: read(path))
    tally["malformed files"] += 1


# Arguments


def _compiled() -> Any:
    module, batch = tiny()
    return piper.compile(module, batch, schedules.gpipe(2, 2))


COMPILED = cache(_compiled)
# Each function with a call that is right, by the names of its arguments.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    **{
        name: (
            getattr(schedules, name),
            lambda: {"stages": 2, "microbatches": 4, "devices": None, "tag": "PP", "dim_name": "MB"},
        )
        for name in ("gpipe", "one_f_one_b", "zero_bubble", "zb_h2", "zbv", "v_half", "v_min", "dualpipe",
            "dualpipev")
    },
    "interleaved_one_f_one_b": (
        schedules.interleaved_one_f_one_b,
        lambda: {"stages": 4, "microbatches": 4, "stages_per_device": 2, "devices": None, "tag": "PP",
            "dim_name": "MB"},
    ),
    "fitted": (
        schedules.fitted,
        lambda: {
            "costs": [schedules.StageCosts(1, 1, 1, saved=1)] * 4, "microbatches": 4, "ranks": [0, 1, 1, 0],
            "memory": 8,
            "devices": None, "tag": "PP", "dim_name": "MB",
        },
    ),
    "StageCosts": (
        schedules.StageCosts,
        lambda: {
            "forward": 1, "backward_input": 1, "backward_weights": 1, "backward": 2, "saved": 1,
            "saved_for_weights": 1,
            "transfer": 1, "static": 1,
        },
    ),
    "from_csv": (schedules.from_csv,
        lambda: {"path_or_text": "0F0,0B0\n", "devices": None, "tag": "PP", "dim_name": "MB"}),
    "to_csv": (schedules.to_csv,
        lambda: {"program": schedules.gpipe(1, 2), "path": None, "tag": "PP", "dim_name": "MB"}),
    "annotate": (piper.annotate, lambda: {"tag": "PP", "index": 0}),
    "annotate_modules": (
        piper.annotate_modules,
        lambda: {"model": torch.nn.Sequential(torch.nn.ReLU()), "tag": "PP", "groups": [["0"]]},
    ),
    "Place": (lambda **fields: parse([piper.Place(**fields)]),
        lambda: {"filter": {}, "devices": [0], "stream": "compute"}),
    "Replicate": (
        lambda **fields: parse([piper.Replicate(**fields)]),
        lambda: {
            "filter": {}, "devices": [0, 1], "reduce_stream": "r", "gather_stream": "g", "bucket_size": 25.0,
            "shard_optimizer": False, "shard_grads": False, "shard_params": False, "reduce_dtype": None,
            "gather_dtype": None,
            "shard_by": "elements", "overlap_update": False,
        },
    ),
    "ShardExperts": (lambda **fields: parse([piper.ShardExperts(**fields)]),
        lambda: {"filter": {}, "devices": [0, 1], "axis": "ep", "stream": "s"}),
    "ShardWeights": (lambda **fields: parse([piper.ShardWeights(**fields)]),
        lambda: {"filter": {}, "devices": [0, 1], "axis": "tp", "stream": "s", "params": {"a": 0}, "values": {"*": 1},
                 "attention": None}),
    "ShardSequences": (lambda **fields: parse([piper.ShardSequences(**fields)]),
        lambda: {"filter": {}, "devices": [0, 1], "axis": "cp", "stream": "s", "values": {"*": 1},
                 "attention": "ring"}),
    "Split": (lambda **fields: parse([piper.Split(**fields)]),
        lambda: {"filter": {}, "dim_name": "MB", "num_microbatches": 2}),
    "Order": (lambda **fields: parse([piper.Order(**fields)]), lambda: {"filters": [{"PP": 0}, {"PP": 1}]}),
    "parse": (parse, lambda: {"source": schedules.gpipe(2, 2)}),
    "compile": (
        piper.compile,
        lambda: {
            "module": tiny()[0], "batch": tiny()[1], "directives": schedules.gpipe(2, 2), "verify": True,
            "device": "cpu",
            "step": "training_step",
        },
    ),
    "verify": (
        piper.verify,
        lambda: {"module": tiny()[0], "batch": tiny()[1], "directives": schedules.gpipe(2, 2), "seed": 0},
    ),
    "explain": (lambda node: COMPILED().explain(node), lambda: {"node": 15}),
    "at": (lambda size: COMPILED().at(size), lambda: {"size": 3}),
    "PiperStrategy": (
        piper.PiperStrategy,
        lambda: {
            "directives": schedules.gpipe(2, 2), "verify": "static", "transport": "local", "profile": None,
            "timeout": timedelta(1),
            "start_method": "popen", "checkpoint": "sharded",
        },
    ),
    "Schedule": (Schedule, lambda: {"wait": 1, "warmup": 1, "active": 1, "repeat": 0, "kernels": False}),
    "simulate": (
        simulate,
        lambda: {"dag": COMPILED().dag, "plans": COMPILED().plans, "durations": {"F": 1, "B": 2},
            "network": None, "issue": None},
    ),
    "Link": (Link, lambda: {"latency": 1, "bandwidth": 2}),
    "SharedLink": (SharedLink, lambda: {"devices": [0], "bandwidth": 2, "peers": None}),
    "IssueCost": (IssueCost, lambda: {"time": 1, "devices": 1}),
    "Network": (
        lambda **fields: simulate(COMPILED().dag, COMPILED().plans, network=Network(**fields)),
        lambda: {"link": Link(), "channels": {}, "groups": {}, "shared": [], "communicators": {}},
    ),
    "read_durations": (read_durations, lambda: {"path": "none.json"}),
    "text_chart": (text_chart,
        lambda: {"simulation": simulate(COMPILED().dag, COMPILED().plans), "width": 80}),
    "dot_graph": (dot_graph, lambda: {"dag": COMPILED().dag, "device": 0}),
    "grouped_linear": (
        piper.grouped_linear,
        lambda: {"x": torch.ones(3, 2), "weight": torch.ones(2, 4, 2), "counts": torch.tensor([1, 2])},
    ),
    "dispatch": (piper.dispatch, lambda: {"tokens": torch.ones(3, 2), "counts": torch.tensor([1, 2])}),
    "combine": (piper.combine, lambda: {"outputs": torch.ones(3, 2)}),
    "Spec": (Spec, lambda: {"blocks": ("linear",), "stages": (0,), "exact": False}),
    "case": (case, lambda: {"spec": POOL[0], "size": 4}),
    "make_batch": (make_batch, lambda: {"spec": POOL[0], "size": 4, "seed": 0}),
}  # fmt: skip


@settings(max_examples=settings().max_examples * 4)
@given(name=st.sampled_from(sorted(CALLS)), data=st.data())
def test_odd_arguments(
    tally: Counter[str], tmp_path_factory: pytest.TempPathFactory, name: str, data: Any
) -> None:
    function, right = CALLS[name]
    arguments = right()
    keys = data.draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=2))
    changed = {key: data.draw(st.sampled_from(ODD)) for key in sorted(keys)}
    if name == "to_csv" and isinstance(changed.get("path"), str | Path):
        changed["path"] = tmp_path_factory.getbasetemp() / "out.csv"
    error = documented(lambda: function(**{**arguments, **changed}))
    tally[f"odd arguments, {'accepted' if error is None else 'refused'}"] += 1


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_calls_are_right_where_nothing_is_odd(name: str) -> None:
    function, right = CALLS[name]
    error = documented(lambda: function(**right()))
    assert (error is None) == (name != "read_durations")
