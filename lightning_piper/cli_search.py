"""`lightning-piper search` and `explain --run`: find a program, and compare a program with its recording."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_piper.directives import parse
from lightning_piper.directives.program import annotations_of
from lightning_piper.search.comparison import compare
from lightning_piper.search.proposal import search
from lightning_piper_cli.targets import UsageError, made, module_of, program_of


def run_search(args: argparse.Namespace) -> str:
    """Return the text for `search`: the table, why other candidates lost, and the program as Python.

    Writes the program as JSON to the file of `-o`. If that fails, prints the text and raises UsageError.
    """
    module, batch = module_of(args.module), made(args.batch)
    if args.output is not None:
        _check_output(args.output)
    tell = progress()
    try:
        found = search(
            module,
            batch,
            args.devices,
            args.memory,
            hardware=args.hardware,
            objective=args.objective,
            check=args.check,
            progress=tell,
        )
    finally:
        tell("")
    if args.output is not None:
        try:
            found.save(args.output)
        except OSError as error:
            print(found)  # the search took long, so its result must not be lost
            raise UsageError(
                f"{str(args.output)!r} cannot be written: {error.strerror}. Give another path to -o"
            ) from None
    return str(found)


def _check_output(path: Path) -> None:
    """Check that a file can be written, before the search starts.

    Raises:
        UsageError: The file cannot be written.
    """
    problem = None
    if not path.parent.is_dir():
        problem = f"there is no folder {str(path.parent)!r}"
    elif path.is_dir():
        problem = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "this process may not write there"
    if problem is not None:
        raise UsageError(f"{str(path)!r} cannot be written: {problem}. Give another path to -o")


def run_compare(args: argparse.Namespace) -> str:
    """Return the text for `explain --run`: prediction and recording compared, and a new search's result."""
    module, batch, source = module_of(args.module), made(args.batch), program_of(args.directives)
    program, tell = parse(source), progress()
    try:
        return str(
            compare(
                args.recorded,
                module,
                batch,
                program,
                annotations_of(source),
                args.hardware,
                args.memory,
                tell,
            )
        )
    finally:
        tell("")


def progress() -> Callable[[str], None]:
    """Return a function that shows a line of text on stderr, if stderr is a terminal. A new text replaces the line,
    and an empty text clears it. On other streams, the first text prints one line for the whole search."""
    on_terminal, told = sys.stderr.isatty(), False

    def tell(text: str) -> None:
        nonlocal told
        if on_terminal:
            print(f"\r\x1b[K{text[:120]}", end="", file=sys.stderr, flush=True)
        elif text and not told:
            told = True
            print("searching for a program, which can take minutes", file=sys.stderr, flush=True)

    return tell
