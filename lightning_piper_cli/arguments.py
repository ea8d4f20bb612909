"""The parser of the command line. It does not import torch."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from lightning_piper_cli.targets import TARGET


def parser_of(of_run: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        of_run: Whether `explain` is about a recorded run instead of a node.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-piper",
        description="Check, show, simulate and search for a program of directives, without processes and "
        "training. Convert checkpoints.",
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = partial(_command, commands)
    _add_check(command("check", "capture the training step, apply the directives, run all static checks"))
    plan = command("plan", "print the plan of each device")
    plan.add_argument("--device", type=int, help="print only the plan of this device")
    viz = command("viz", "draw the simulated step in the terminal, or as an SVG file")
    viz.add_argument(
        "-o", "--output", type=Path, help="write the picture to this file, as SVG (with --dag: as DOT)"
    )
    viz.add_argument(
        "--dag", type=int, metavar="DEVICE", help="draw the training DAG of one device instead, for Graphviz"
    )
    figures = command("simulate", "print step time, bubbles, exposed communication and memory")
    figures.add_argument("--json", action="store_true", help="print all figures and the timeline as JSON")
    figures.add_argument(
        "--chakra",
        type=Path,
        metavar="FOLDER",
        help="also write a Chakra execution trace of each device to this folder, with durations as seconds",
    )
    figures.add_argument(
        "--local-sgd",
        metavar="JSON",
        help='also print what a round of local SGD costs, such as \'{"replicas": 4, "every": 64, "parts": 4}\'. '
        "The program is that of one replica",
    )
    figures.add_argument(
        "--across",
        type=number,
        nargs=2,
        metavar=("LATENCY", "BANDWIDTH"),
        help="the link between replicas of local SGD (default: the link of --latency and --bandwidth)",
    )
    why = command(
        "explain",
        "explain why a node exists, or how a run differs from its prediction",
        None if of_run else "node",
    )
    why.set_defaults(command="compare" if of_run else "explain")
    why.add_argument(
        "--log-dir",
        type=Path,
        help="log directory of a run that was recorded with this program; also print when the node ran",
    )
    why.add_argument(
        "--run",
        dest="recorded",
        type=Path,
        metavar="LOGDIR",
        help="instead of a node: compare this recorded run with its costs",
    )
    _add_machine(why)
    _add_search(
        command("search", "search for the fastest program that fits, check it, and explain the choice")
    )
    for sub in (viz, figures):
        _add_times(sub)
    _add_without_module(commands)
    return parser


def _command(commands: Any, name: str, about: str, first: str | None = None) -> argparse.ArgumentParser:
    """Add the parser of one command to `commands`, and return it. The command reads a module and a batch, and
    directives unless it is `search`.

    Args:
        commands: The subparsers of the command line.
        name: Name of the command.
        about: The command's description in the help.
        first: Name of an argument before the module, a node's number; None for no such argument.
    """
    sub: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    sub.set_defaults(command=name)
    if first is not None:
        sub.add_argument(
            first,
            type=_node,
            metavar=first.upper(),
            help="node, as plans and recordings print it: %%12, or 12",
        )
    sub.add_argument("module", help=f"a LightningModule class, or a function that makes one: {TARGET}")
    sub.add_argument(
        "--batch",
        required=True,
        help=f"function that returns one batch of all devices, or the batch: {TARGET}",
    )
    if name != "search":
        sub.add_argument(
            "--directives", required=True, help=f"JSON file, or function that returns the list: {TARGET}"
        )
    return sub


def _add_check(check: argparse.ArgumentParser) -> None:
    """Add the options of `check`, other than the module, the batch and the directives."""
    check.add_argument(
        "--run",
        dest="execute",
        action="store_true",
        help="also run the program, as piper.verify does, and print the report",
    )
    check.add_argument(
        "--passes", action="store_true", help="print a line for each pass: contract, verdict, nodes, time"
    )
    check.add_argument(
        "--dump",
        type=Path,
        metavar="FOLDER",
        help="write the training DAG after each pass to files in this folder",
    )
    check.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="write what the checks have proved to this JSON file, which `lightning-piper certificate` verifies",
    )


def _add_without_module(commands: Any) -> None:
    """Add the parsers of the commands that read files instead of a module."""
    verified = commands.add_parser(
        "certificate",
        help="verify a certificate, without torch and without the module",
        description="Verify a certificate that `check --certificate` has written.",
    )
    verified.add_argument("file", type=Path, metavar="FILE", help="the certificate")
    verified.set_defaults(command="certificate")
    about = "convert a sharded checkpoint into a plain Lightning checkpoint"
    sub = commands.add_parser("convert", help=about, description=about)
    sub.set_defaults(command="convert")
    sub.add_argument(
        "source",
        help="path or address of a sharded checkpoint, or a folder that FSDPStrategy or ModelParallelStrategy "
        "has saved",
    )
    sub.add_argument("output", help="path or address of the file to write")
    sub.add_argument(
        "--unsafe",
        action="store_true",
        help="also load objects of other classes than torch's, which can run code",
    )


def _add_times(sub: argparse.ArgumentParser) -> None:
    """Add the options for the times of passes and messages."""
    sub.add_argument(
        "--durations",
        type=Path,
        help='JSON file such as {"F": 1, "B": 2, "F[PP=0]": 1.5} (default: F takes 1, B takes 2); see '
        "docs/simulate.md",
    )
    sub.add_argument(
        "--latency",
        type=number,
        default=0,
        help="latency of each message, in the unit of the durations (default: 0)",
    )
    sub.add_argument(
        "--bandwidth",
        type=number,
        help="bandwidth of each channel, in bytes per unit of time (default: unlimited)",
    )


class _Version(argparse.Action):
    """An option that prints the version of the installed package and ends the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        from importlib.metadata import version

        print(f"lightning-piper {version('lightning-piper')}")
        parser.exit()


def _node(text: str) -> int:
    try:
        return int(text.removeprefix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a node. Give the number of a node as plans print it, such as %12"
        ) from None


def number(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


def _add_search(sub: argparse.ArgumentParser) -> None:
    """Add the options of `search`, other than the module and the batch."""
    sub.add_argument("--devices", type=int, required=True, metavar="N", help="number of devices")
    sub.add_argument(
        "--objective", choices=("time", "memory"), default="time", help="what to minimize (default: time)"
    )
    sub.add_argument(
        "--check",
        choices=("static", "run", "off"),
        default="static",
        help="how to check the program; run also executes it (default: static)",
    )
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the program to this JSON file")
    _add_machine(sub)


def _add_machine(sub: argparse.ArgumentParser) -> None:
    """Add the options that describe the machine of a search."""
    sub.add_argument(
        "--memory", help="memory of each device, such as 24GiB (default: the memory of the hardware)"
    )
    sub.add_argument(
        "--hardware",
        help="a name such as h100-sxm, or a JSON file, from which costs are calculated (default: measure "
        "costs on this machine)",
    )
