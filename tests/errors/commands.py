"""Errors of the command line, durations and recordings."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_piper.cli import main
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse
from lightning_piper.profile.node_times import when_it_ran
from lightning_piper.search import Block, Work, Workload, best_of
from lightning_piper.simulate import Link, Network, read_durations, simulate
from lightning_piper.simulate.hardware import Hardware
from tests.errors.case import (
    PLACES,
    SPLIT,
    TRAIN,
    Case,
    Cases,
    CommandLine,
    Elsewhere,
    captured_step,
    written,
)

CONFIGURATION = "tests/strategy/test_command_line.py"
TITLE = "The command line, configurations, simulations, recordings"
INTRO = """If the command line is wrong, `lightning-piper` prints a `usage` line and the message below, and ends with status 2. \
If a check fails, it ends with status 1."""

FILES = (
    TRAIN.replace("{line}", "pass")
    + """

def batch():
    return torch.zeros(8, 8), torch.zeros(8, 1)


def needs(width):
    return Net()
"""
)


def command(
    what: str, *more: str, name: str = "check", module: str = "train.py:Net", program: Any = None
) -> Case:
    def run() -> None:
        written("train.py", FILES)
        Path("notes").mkdir()
        written("notes/todo.txt", "")
        written("program.json", PLACES if program is None else program)
        ended([*name.split(), module, "--batch", "train.py:batch", "--directives", "program.json", *more])

    return Case(what, run)


def ended(argv: list[str]) -> None:
    """
    Raises:
        CommandLine: by something else than 0.
    """
    out = io.StringIO()
    try:
        with contextlib.redirect_stderr(out):
            status = main(argv)
    except SystemExit as stopped:
        status = stopped.code
    if status:
        raise CommandLine(out.getvalue().rstrip().splitlines()[-1])


def compiled() -> Any:
    return compile_step(captured_step(), tuple(parse([*PLACES, SPLIT])))


def simulated(what: str, durations: Callable[[], Any]) -> Case:
    def run() -> None:
        made = compiled()
        simulate(made.dag, made.plans, durations())

    return Case(what, run)


def table(what: str, found: dict[str, Any]) -> Case:
    return simulated(what, lambda: found)


def recorded(content: Any) -> None:
    Path("piper").mkdir()
    written("piper/step_1.json", content)
    when_it_ran(compiled(), 1, Path())


WORKLOAD = Workload((Block("only", {(1, 1): Work(1, 1, 1, 1, 1, 1)}, {}),), 2)


def search(what: str, *more: str) -> Case:
    def run() -> None:
        written("train.py", FILES)
        ended(["search", "train.py:Net", "--batch", "train.py:batch", "--hardware", "cpu", *more])

    return Case(what, run)


def explained_run() -> None:
    written("train.py", FILES)
    written("program.json", [*PLACES, SPLIT])
    ended(
        [
            "explain",
            "--run",
            "lightning_logs",
            "train.py:Net",
            "--batch",
            "train.py:batch",
            "--directives",
            "program.json",
        ]
    )


CASES: Cases = [
    command("a check that fails", program=[{"op": "place", "filter": {"PP": 7}, "devices": [0]}]),
    command("a target without a name", module="train"),
    command("a module that cannot be imported", module="trian:Net"),
    command("a file that does not exist", module="trian.py:Net"),
    command("a name that the file does not have", module="train.py:Nett"),
    command("a function that needs arguments", module="train.py:needs"),
    command("a target that is not a module", module="train.py:batch"),
    command("a device that the program does not use", "--device", "5", name="plan"),
    command("a node that does not exist", name="explain %999"),
    command("`--latency` is not a number", "--latency", "soon", name="simulate"),
    command("an output that cannot be written", "-o", "nowhere/step.svg", name="viz"),
    command("`--dump` names a file", "--dump", "train.py"),
    command("`--dump` names a folder with other files", "--dump", "notes"),
    search("a search on 0 devices", "--devices", "0"),
    search("an invalid size of memory", "--devices", "2", "--memory", "much"),
    search("a search in too little memory", "--devices", "2", "--memory", "64"),
    search("unknown hardware", "--devices", "2", "--hardware", "abacus"),
    search("`search -o` names a folder that does not exist", "--devices", "2", "-o", "nowhere/program.json"),
    Case("a search with an unknown objective",
        lambda: best_of(WORKLOAD, Hardware.read("cpu"), 2, objective="money")),
    Case("a search with an invalid gap", lambda: best_of(WORKLOAD, Hardware.read("cpu"), 2, gap=-1)),
    Case("a search among unknown schedules",
        lambda: best_of(WORKLOAD, Hardware.read("cpu"), 2, schedules=("2f2b",))),
    Case("`explain --run` without a recording", lambda: explained_run()),
    Case("a file of durations that does not exist", lambda: read_durations("durations.json")),
    Case("a file of durations that does not contain an "
         "object", lambda: read_durations(written("durations.json", json.dumps([1])))),
    table("a pass without a duration", {"F": 1}),
    table("a duration below 0", {"F": -1, "B": 2}),
    table("a duration that is text", {"F": "1", "B": 2}),
    table("a key that is not a pass, node or operation", {"F PP=1": 1}),
    table("tags that do not match a pass", {"F": 1, "B": 2, "F[PP=7]": 1}),
    table("a tag without an index", {"F[PP]": 1}),
    table("two durations that are equally specific", {"B": 2, "F[PP=0]": 1, "F[MB=0]": 2}),
    table("a node that does not exist", {"F": 1, "B": 2, "%999": 1}),
    Case("a bandwidth of 0", lambda: Network(Link(bandwidth=0))),
    Case("`explain --log-dir` without a recording",
        lambda: when_it_ran(compiled(), 1, Path("lightning_logs"))),
    Case("a recording that does not contain JSON", lambda: recorded("{")),
    Case("a recording with a different version", lambda: recorded({"version": 99})),
    Elsewhere("`LightningCLI`: a wrong directive in a "
              "configuration", "directive 0 (place): field 'device' is unknown. "
                                                                      "Give one of",
              "ValueError", f"{CONFIGURATION}::test_a_wrong_program_is_an_error"),
    Elsewhere("`LightningCLI`: an argument that the strategy does not "
              "have", "Option 'program' is not accepted", "error",
              f"{CONFIGURATION}::test_a_wrong_argument_is_an_error"),
]  # fmt: skip
