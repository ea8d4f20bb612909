"""`lightning-piper check | plan | viz | simulate | explain`: a program on a module, without processes and without training.

Exit status: 0; 1 when a check fails, with the error's text on stderr; 2 when the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_piper.capture import capture
from lightning_piper.compiler import Compiled, compile
from lightning_piper.directives import Directive, parse
from lightning_piper.errors import PiperError
from lightning_piper.passes import run_pipeline
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.profile.explain import when_it_ran
from lightning_piper.simulate import DEFAULT, Link, Network, Number, Simulation, read_durations, simulate
from lightning_piper.verify import verify_step
from lightning_piper.verify.hook import check_pass
from lightning_piper.verify.passes import Passes
from lightning_piper.viz import dot_graph, svg_chart, text_chart

_TARGET = "package.module:name or path/to/file.py:name"


class _UsageError(Exception):
    """The command line names something that is not there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Args:
        argv: arguments without the program's name; those of the process when left out.

    Raises:
        SystemExit: the command line is wrong (status 2), or help was asked for.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        text = args.run(args)
    except _UsageError as error:
        parser.error(str(error))
    except PiperError as error:
        print(error, file=sys.stderr)
        return 1
    if getattr(args, "output", None) is None:
        print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-piper",
        description="Check, show and simulate a program of directives, without processes and without training.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(
        name: str, run: Callable[[argparse.Namespace], str], about: str, first: str | None = None
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        if first is not None:
            sub.add_argument(first, type=_node, metavar=first.upper(), help="as plans and recordings print it: %%12, or 12")
        sub.add_argument("module", help=f"a LightningModule class, or a function that makes one: {_TARGET}")
        sub.add_argument("--batch", required=True, help="function that makes the batch of one step, spelled alike")
        sub.add_argument("--directives", required=True, help="JSON file, or a function that makes the list, spelled alike")
        return sub

    check = command("check", _check, "capture the training step, apply the directives, run all static checks")
    check.add_argument("--run", dest="execute", action="store_true", help="run it, too, as piper.verify does, and print the report")
    check.add_argument("--passes", action="store_true", help="print a line for each pass: contract, verdict, nodes, time")
    check.add_argument("--dump", type=Path, metavar="FOLDER", help="write the training DAG after each pass to files in this folder")
    plan = command("plan", _plan, "print the plan of each device")
    plan.add_argument("--device", type=int, help="of this device only")
    viz = command("viz", _viz, "draw the simulated step in the terminal, or as an SVG file")
    viz.add_argument("-o", "--output", type=Path, help="write the picture to this file, as SVG (with --dag: as DOT)")
    viz.add_argument("--dag", type=int, metavar="DEVICE", help="the training DAG of one device instead, for Graphviz")
    figures = command("simulate", _simulate, "print step time, bubbles, exposed communication and memory")
    figures.add_argument("--json", action="store_true", help="all figures and the timeline as JSON")
    why = command("explain", _explain, "say why a node is there, what it waits for, and when it ran", "node")
    why.add_argument("--log-dir", type=Path, help="of a training that was recorded with this program")
    for sub in (viz, figures):
        sub.add_argument("--durations", type=Path, help='JSON file such as {"F": 1, "B": 2, "F[PP=0]": 1.5}; docs/simulate.md')
        sub.add_argument("--latency", type=number, default=0, help="of each message, in the unit of the durations")
        sub.add_argument("--bandwidth", type=number, help="of each channel, in bytes per unit of time; unlimited when left out")
    return parser


def _node(text: str) -> int:
    return int(text.removeprefix("%"))


def number(text: str) -> Number:
    return int(text) if text.isdecimal() else float(text)


# What is given on the command line


def _compiled(args: argparse.Namespace) -> Compiled:
    return compile(*_given(args))


def _given(args: argparse.Namespace) -> tuple[nn.Module, Any, tuple[Directive, ...]]:
    """The module, the batch and the program."""
    module = _made(args.module)
    if not isinstance(module, nn.Module):
        raise _UsageError(f"{args.module} gives {type(module).__name__}; name a LightningModule class or a function that makes one")
    batch = _made(args.batch)
    return module, batch, tuple(parse(args.directives if args.directives.endswith(".json") else _made(args.directives)))


def _made(target: str) -> Any:
    """What a class or function gives when it is called without arguments; anything else as it is."""
    found = _found(target)
    if not callable(found) or isinstance(found, nn.Module):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise _UsageError(f"{target} cannot be called without arguments: {error}; name a function that can") from None
    return found()


def _found(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise _UsageError(f"{target!r} names nothing to import; give {_TARGET}")
    found = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    for part in name.split("."):
        if not hasattr(found, part):
            there = ", ".join([other for other in vars(found) if not other.startswith("_")][:8])
            raise _UsageError(f"{place} has no {name!r}; it has {there or 'nothing'}")
        found = getattr(found, part)
    return found


def _from_package(name: str) -> Any:
    _importable(Path.cwd())
    if not all(part.isidentifier() for part in name.split(".")):
        raise _UsageError(f"{name!r} is no name of a module; give {_TARGET}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise _UsageError(f"there is no module {error.name!r} in the current directory or installed") from None


def _from_file(path: Path) -> Any:
    name = str(path.resolve())  # also its name as a module: the module and the batch may come from one file
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise _UsageError(f"there is no file {str(path)!r}")
        _importable(Path.cwd())
        _importable(path.resolve().parent)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# The commands: each returns what is printed


def _check(args: argparse.Namespace) -> str:
    module, batch, program = _given(args)
    passes = _passes(args)
    report = None
    try:
        step = capture(module, batch)
        dag = run_pipeline(step, program, after=check_pass if passes is None else passes)
        check_plans(compile_plans(dag))
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
    """What `check` is to tell of the passes, if it is."""
    try:
        return Passes(args.dump) if args.passes or args.dump is not None else None
    except PiperError as error:
        raise _UsageError(str(error)) from None


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
        width = shutil.get_terminal_size((132, 24)).columns - 12  # the names of the rows need the rest
        text = text_chart(simulation, max(width, 20)) if args.output is None else svg_chart(simulation)
    if args.output is not None:
        try:
            args.output.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _UsageError(f"{str(args.output)!r} cannot be written: {getattr(error, 'strerror', error)}") from None
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
        raise _UsageError(error.args[0].replace("print(compiled.dag) lists them", "`lightning-piper plan` shows them")) from None
    if args.log_dir is not None:
        lines += [f"  {line}" for line in when_it_ran(compiled, args.node, args.log_dir)]
    return "\n".join(lines)


def _simulation(compiled: Compiled, args: argparse.Namespace) -> Simulation:
    durations = DEFAULT if args.durations is None else read_durations(args.durations)
    return simulate(compiled.dag, compiled.plans, durations, Network(Link(args.latency, args.bandwidth)))


def _device(compiled: Compiled, device: int) -> int:
    if device not in compiled.plans:
        raise _UsageError(f"there is no device {device}; the program uses {', '.join(map(str, compiled.plans))}")
    return device


if __name__ == "__main__":
    sys.exit(main())
