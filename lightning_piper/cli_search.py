"""`lightning-piper search`, and `explain --run`: programs that a search finds, and what a recording says of one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightning_piper.directives import parse
from lightning_piper.directives.program import annotations_of
from lightning_piper.search.comparing import compare
from lightning_piper.search.proposing import search
from lightning_piper.search.searching import OBJECTIVES
from lightning_piper.targets import UsageError, made, module_of, program_of

OFTEN = 0.1  # seconds between two lines of progress


def add_search(sub: argparse.ArgumentParser) -> None:
    """What `search` takes beside a module and a batch."""
    sub.add_argument("--devices", type=int, required=True, metavar="N", help="how many there are")
    sub.add_argument("--objective", choices=OBJECTIVES, default="time", help="what is to be least; time when left out")
    sub.add_argument(
        "--check", choices=("static", "run", "off"), default="static", help="how the program is checked: static when left out"
    )
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the program to this JSON file")
    add_machine(sub)


def add_machine(sub: argparse.ArgumentParser) -> None:
    """What says for which machine a search is."""
    sub.add_argument("--memory", help="of each device, such as 24GiB; that of the hardware when left out")
    sub.add_argument("--hardware", help="a name such as h100-sxm, or a JSON file; costs are measured here when left out")


def run_search(args: argparse.Namespace) -> str:
    """The table, why others lost, and the program as Python. `-o` gets it as JSON."""
    module, batch = module_of(args.module), made(args.batch)
    if args.output is not None:
        _check_output(args.output)
    tell = progress()
    try:
        found = search(
            module, batch, args.devices, args.memory, hardware=args.hardware, objective=args.objective, check=args.check,
            progress=tell,
        )  # fmt: skip
    finally:
        tell("")
    if args.output is not None:
        try:
            found.save(args.output)
        except OSError as error:
            print(found)  # what took so long to find is not lost
            raise UsageError(f"{str(args.output)!r} cannot be written: {error.strerror}") from None
    return str(found)


def _check_output(path: Path) -> None:
    """Refuse a file that cannot be written before anything is searched.

    Raises:
        UsageError: that.
    """
    problem = None
    if not path.parent.is_dir():
        problem = f"there is no folder {str(path.parent)!r}"
    elif path.is_dir():
        problem = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "that is not permitted"
    if problem is not None:
        raise UsageError(f"{str(path)!r} cannot be written: {problem}")


def run_compare(args: argparse.Namespace) -> str:
    """Where prediction and measurement differ, and what a search with the measured costs chooses."""
    module, batch, source = module_of(args.module), made(args.batch), program_of(args.directives)
    program, tell = parse(source), progress()
    try:
        return str(compare(args.recorded, module, batch, program, annotations_of(source), args.hardware, args.memory, tell))
    finally:
        tell("")


def progress() -> Callable[[str], None]:
    """Shows what is done in one line of stderr, if that is a terminal. An empty text takes it away."""
    last = 0.0

    def tell(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if sys.stderr.isatty() and (not text or now - last > OFTEN):
            last = now
            print(f"\r\x1b[K{text[:120]}", end="", file=sys.stderr, flush=True)

    return tell
