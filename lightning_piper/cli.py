"""`lightning-piper check | plan | viz | simulate | explain | search`: programs on a module, without training.

No process is started. The exit status is 0; 1 if a check fails, with the error's text on stderr; or 2 if the
command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from lightning_piper.capture import capture
from lightning_piper.cli_search import add_machine, add_search, run_compare, run_search
from lightning_piper.compiler import Compiled, compile
from lightning_piper.directives import Directive, parse
from lightning_piper.directives.program import annotate_as, annotations_of
from lightning_piper.errors import PiperError
from lightning_piper.garbage_collection import uncollected
from lightning_piper.passes import run_pipeline
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.profile.node_times import when_it_ran
from lightning_piper.simulate import DEFAULT, Link, Network, Number, Simulation, read_durations, simulate
from lightning_piper.targets import TARGET, UsageError, made, module_of, program_of
from lightning_piper.verify import verify_step
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.passes import Passes
from lightning_piper.viz import dot_graph, svg_chart, text_chart


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    Args:
        argv: Arguments without the program's name (default: the arguments of the process).

    Raises:
        SystemExit: The command line is wrong (status 2), or the user asked for help.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(any(text.partition("=")[0] == "--run" for text in given))
    args = parser.parse_args(given)
    try:
        text = args.run(args)
    except UsageError as error:
        parser.error(str(error))
    except PiperError as error:
        print(error, file=sys.stderr)
        return 1
    if text:
        print(text)
    return 0


def _parser(of_run: bool = False) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        of_run: Whether `explain` is about a recorded run instead of a node.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-piper",
        description="Check, show, simulate and search for a program of directives, without processes and "
        "training.",
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = partial(_command, commands)
    check = command("check", _check, "capture the training step, apply the directives, run all static checks")
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
    plan = command("plan", _plan, "print the plan of each device")
    plan.add_argument("--device", type=int, help="print only the plan of this device")
    viz = command("viz", _viz, "draw the simulated step in the terminal, or as an SVG file")
    viz.add_argument(
        "-o", "--output", type=Path, help="write the picture to this file, as SVG (with --dag: as DOT)"
    )
    viz.add_argument(
        "--dag", type=int, metavar="DEVICE", help="draw the training DAG of one device instead, for Graphviz"
    )
    figures = command("simulate", _simulate, "print step time, bubbles, exposed communication and memory")
    figures.add_argument("--json", action="store_true", help="print all figures and the timeline as JSON")
    why = command(
        "explain",
        run_compare if of_run else _explain,
        "explain why a node exists, or how a run differs from its prediction",
        None if of_run else "node",
    )
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
    add_machine(why)
    add_search(
        command(
            "search", run_search, "search for the fastest program that fits, check it, and explain the choice"
        )
    )
    for sub in (viz, figures):
        _add_times(sub)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], str], about: str, first: str | None = None
) -> argparse.ArgumentParser:
    """The parser of one command, which reads a module and a batch."""
    sub: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    sub.set_defaults(run=run)
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
    """Prints the version of the installed package, and ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(f"lightning-piper {version('lightning-piper')}")
        parser.exit()


def _node(text: str) -> int:
    try:
        return int(text.removeprefix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a node; give its number as plans print it, such as %12"
        ) from None


def number(text: str) -> Number:
    return int(text) if text.isdecimal() else float(text)


# Arguments


def _compiled(args: argparse.Namespace) -> Compiled:
    return compile(*_given(args))


def _given(args: argparse.Namespace) -> tuple[nn.Module, Any, tuple[Directive, ...]]:
    """The module, tagged as the program needs it, the batch, and the program."""
    module, batch, source = module_of(args.module), made(args.batch), program_of(args.directives)
    program = tuple(parse(source))
    annotate_as(module, annotations_of(source))
    return module, batch, program


# The commands. Each returns the text to print.


def _check(args: argparse.Namespace) -> str:
    module, batch, program = _given(args)
    passes = _passes(args)
    report = None
    try:
        step = capture(module, batch)
        with uncollected():
            dag = run_pipeline(step, program, after=StaticCheck() if passes is None else passes)
            plans = compile_plans(dag)
            check_plans(plans.representatives, plans.image)
        if args.execute:
            report = verify_step(step, module, batch, program)
            report.require()
    except PiperError:
        if passes is not None and args.passes:
            print("\n".join(passes.table(report)))
        raise
    lines = [f"{i} {json.dumps(directive.to_json())}" for i, directive in enumerate(program)]
    if passes is not None and args.passes:
        return "\n".join([*lines, *passes.table(report), *(report.ending if report is not None else ["ok"])])
    return "\n".join([*lines, str(report or "ok")])


def _passes(args: argparse.Namespace) -> Passes | None:
    """The recorder of passes for `check`, if the user asked for one."""
    try:
        return Passes(args.dump) if args.passes or args.dump is not None else None
    except PiperError as error:
        raise UsageError(str(error)) from None


def _plan(args: argparse.Namespace) -> str:
    compiled = _compiled(args)
    if args.device is None:
        return "\n\n".join(str(plan) for plan in compiled.plans.values())
    return str(compiled.plans[_device(compiled, args.device)])


def _viz(args: argparse.Namespace) -> str:
    compiled = _compiled(args)
    if args.dag is not None:
        text = dot_graph(compiled.dag, _device(compiled, args.dag))
    else:
        simulation = _simulation(compiled, args)
        width = shutil.get_terminal_size((132, 24)).columns - 12  # the names of the rows need 12 columns
        text = text_chart(simulation, max(width, 20)) if args.output is None else svg_chart(simulation)
    if args.output is not None:
        try:
            args.output.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{str(args.output)!r} cannot be written: {getattr(error, 'strerror', error)}"
            ) from None
        return ""
    return text.rstrip("\n")


def _simulate(args: argparse.Namespace) -> str:
    compiled = _compiled(args)
    simulation = _simulation(compiled, args)
    return json.dumps(simulation.to_json()) if args.json else str(simulation)


def _explain(args: argparse.Namespace) -> str:
    compiled = _compiled(args)
    try:
        lines = [compiled.explain(args.node)]
    except KeyError as error:
        raise UsageError(
            error.args[0].replace("print(compiled.dag) lists them", "`lightning-piper plan` shows them")
        ) from None
    if args.log_dir is not None:
        lines += [f"  {line}" for line in when_it_ran(compiled, args.node, args.log_dir)]
    return "\n".join(lines)


def _simulation(compiled: Compiled, args: argparse.Namespace) -> Simulation:
    durations = DEFAULT if args.durations is None else read_durations(args.durations)
    return simulate(compiled.dag, compiled.plans, durations, Network(Link(args.latency, args.bandwidth)))


def _device(compiled: Compiled, device: int) -> int:
    if device not in compiled.plans:
        raise UsageError(
            f"there is no device {device}; the program uses {', '.join(map(str, compiled.plans))}"
        )
    return device


if __name__ == "__main__":
    sys.exit(main())
