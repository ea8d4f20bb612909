"""`lightning-piper check | plan | viz | simulate | explain | search`: programs on a module, without training.
`lightning-piper convert`: checkpoints.

No process is started. The exit status is 0; 1 if a check fails, with the error's text on stderr; or 2 if the
command line is wrong. `lightning_piper_cli` reads the command line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lightning_piper.capture import capture
from lightning_piper.certificate import certificate_of
from lightning_piper.cli_search import run_compare, run_search
from lightning_piper.common.argument_names import problem_of
from lightning_piper.common.garbage_collection import uncollected
from lightning_piper.common.limits import kind_of
from lightning_piper.compiler import Compiled, compile
from lightning_piper.directives import Directive, parse
from lightning_piper.directives.program import annotate_as, annotations_of
from lightning_piper.errors import PiperError, SimulationError
from lightning_piper.passes import run_pipeline
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.profile.node_times import when_it_ran
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.costs.optimizers import optimizer_of, states_of
from lightning_piper.search.report import size
from lightning_piper.session.local_sgd import LocalSGD, RoundCost
from lightning_piper.simulate import (
    DEFAULT,
    Durations,
    Link,
    Network,
    Simulation,
    read_durations,
    simulate,
    write_chakra,
)
from lightning_piper.strategy import consolidate
from lightning_piper.verify import verify_step
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.passes import Passes
from lightning_piper.viz import dot_graph, svg_chart, text_chart
from lightning_piper_cli import main
from lightning_piper_cli.targets import UsageError, made, module_of, program_of

__all__ = ["main", "run"]


def run(args: argparse.Namespace) -> str:
    """Run the command `args.command`, and return the text to print; empty if the command has written a file
    instead.

    Raises:
        UsageError: An argument names an object that does not exist or does not fit.
        PiperError: The command itself fails, such as a check.
    """
    return COMMANDS[args.command](args)


# Arguments


def _compiled(args: argparse.Namespace) -> Compiled:
    return compile(*_given(args))


def _given(args: argparse.Namespace) -> tuple[nn.Module, Any, tuple[Directive, ...]]:
    """Return the module, tagged as the program needs it, the batch, and the program."""
    module, batch, source = module_of(args.module), made(args.batch), program_of(args.directives)
    program = tuple(parse(source))
    annotate_as(module, annotations_of(source))
    return module, batch, program


# The commands. Each returns the text to print.


def _check(args: argparse.Namespace) -> str:
    """Return the directives, then a summary of the program or with `--run` the report of the run. With
    `--passes`, a line for each pass follows. The last line is "ok" or the verdict.

    If the check fails, raise its error. With `--passes`, first print the lines of the passes so far.
    """
    module, batch, program = _given(args)
    passes = _passes(args)
    hook = StaticCheck() if passes is None else passes
    report = None
    try:
        step = capture(module, batch)
        with uncollected():
            dag = run_pipeline(step, program, after=hook)
            plans = compile_plans(dag)
            with hook.watch:
                check_plans(plans.representatives, plans.image)
        if args.execute:
            report = verify_step(step, module, batch, program)
            report.require()
    except PiperError:
        if passes is not None and args.passes:
            print("\n".join(passes.table(report)))
        raise
    if args.certificate is not None:
        _write(args.certificate, json.dumps(certificate_of(dag, plans, program)), "--certificate")
    lines = [f"{i} {json.dumps(directive.to_json())}" for i, directive in enumerate(program)]
    if report is None:
        compiled = Compiled(step, program, dag, plans, checked=hook.watch.seconds)
        lines += [compiled.summary(), f"  {_memory(compiled, module)}"]
    if passes is not None and args.passes:
        return "\n".join([*lines, *passes.table(report), *(report.ending if report is not None else ["ok"])])
    return "\n".join([*lines, str(report or "ok")])


def _memory(compiled: Compiled, module: nn.Module) -> str:
    """Return the bytes of the fullest device in a step, and what they contain, as text."""
    optimizer = optimizer_of(module)
    needed = bytes_needed(compiled, states_of(optimizer, module))
    fullest = max(needed, key=lambda device: needed[device])
    states = "states of Adam" if optimizer is None else f"states of {type(optimizer).__name__}"
    return f"memory: {size(needed[fullest])} on device {fullest}, the fullest, with gradients, saved values and {states}"


def _passes(args: argparse.Namespace) -> Passes | None:
    """Return the recorder of passes for `check`; None without `--passes` and `--dump`. Raise UsageError if
    the folder of `--dump` cannot be used."""
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
    """Return the chart or graph as text. With `--output`, write it to this file and return an empty text.
    Raise UsageError if the file cannot be written, or if the program does not use the device of `--dag`."""
    compiled = _compiled(args)
    if args.dag is not None:
        text = dot_graph(compiled.dag, _device(compiled, args.dag))
    else:
        simulation = _simulation(compiled, args)
        width = shutil.get_terminal_size((132, 24)).columns - 12  # the names of the rows need 12 columns
        text = text_chart(simulation, max(width, 20)) if args.output is None else svg_chart(simulation)
    if args.output is not None:
        _write(args.output, text, "-o")
        return ""
    return text.rstrip("\n")


def _write(path: Path, text: str, option: str) -> None:
    """Write a file. Raise UsageError if this is impossible. `option` is the option that gave the path."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {getattr(error, 'strerror', error)}. Give another path to {option}"
        ) from None


def _simulate(args: argparse.Namespace) -> str:
    """Return the figures as text. With `--chakra`, also write traces. Raise UsageError if this is impossible."""
    compiled = _compiled(args)
    simulation = _simulation(compiled, args)
    if args.chakra is not None:
        try:
            write_chakra(args.chakra, compiled.dag, compiled.plans, _durations(args))
        except OSError as error:
            raise UsageError(
                f"{str(args.chakra)!r} cannot be written: {error.strerror}. Give another path to --chakra"
            ) from None
    cost = None if args.local_sgd is None else _round_cost(compiled, simulation, args)
    if args.json:
        more = {} if cost is None else {"local_sgd": cost.to_json()}
        return json.dumps({**simulation.to_json(), **more})
    return str(simulation) if cost is None else f"{simulation}\n{cost}"


def _round_cost(compiled: Compiled, simulation: Simulation, args: argparse.Namespace) -> RoundCost:
    """Return what a round of local SGD with the settings of `--local-sgd` costs. Raise UsageError if these are not
    usable."""
    settings = _local_sgd(args.local_sgd)
    latency, bandwidth = args.across or (args.latency, args.bandwidth)
    across = _link(latency, bandwidth, "--" if args.across is None else "--across: ")
    return settings.cost(compiled, simulation.step_time, across)


def _local_sgd(text: str) -> LocalSGD:
    """Return the settings of local SGD in a JSON text. Raise UsageError if they are not usable."""
    fix = 'Give fields of LocalSGD as JSON, such as \'{"replicas": 4, "every": 64}\''
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise UsageError(f"--local-sgd {text} is {kind_of(fields)}. {fix}")
        if (problem := problem_of(LocalSGD, fields)) is not None:
            raise UsageError(f"--local-sgd: {problem}")
        return LocalSGD(**fields)
    except PiperError as error:
        raise UsageError(f"--local-sgd: {error}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"--local-sgd {text}: {error}. {fix}") from None


def _link(latency: float, bandwidth: float | None, option: str = "--") -> Link:
    """Return the link that options describe. Raise UsageError if a number is not usable. `option` comes before
    the name of the number in the error."""
    try:
        return Link(latency, bandwidth)
    except SimulationError as error:
        raise UsageError(f"{option}{str(error).removeprefix('Link: ')}") from None


def _explain(args: argparse.Namespace) -> str:
    """Return the text of `lightning-piper explain`: why a node exists, and with `--log-dir` when it ran.
    Raise UsageError if there is no such node."""
    compiled = _compiled(args)
    try:
        lines = [compiled.explain(args.node)]
    except KeyError as error:
        raise UsageError(
            error.args[0].replace("Run print(compiled.dag) to list", "Run `lightning-piper plan` to list")
        ) from None
    if args.log_dir is not None:
        lines += [f"  {line}" for line in when_it_ran(compiled, args.node, args.log_dir)]
    return "\n".join(lines)


def _simulation(compiled: Compiled, args: argparse.Namespace) -> Simulation:
    network = Network(_link(args.latency, args.bandwidth))
    return simulate(compiled.dag, compiled.plans, _durations(args), network)


def _durations(args: argparse.Namespace) -> Durations:
    return DEFAULT if args.durations is None else read_durations(args.durations)


def _device(compiled: Compiled, device: int) -> int:
    if device not in compiled.plans:
        raise UsageError(
            f"the program does not use device {device}. Give one of {', '.join(map(str, compiled.plans))}"
        )
    return device


def _convert(args: argparse.Namespace) -> str:
    consolidate(args.source, args.output, weights_only=not args.unsafe)
    return f"{args.output}: a plain Lightning checkpoint"


COMMANDS: dict[str, Callable[[argparse.Namespace], str]] = {
    "check": _check,
    "plan": _plan,
    "viz": _viz,
    "simulate": _simulate,
    "explain": _explain,
    "compare": run_compare,
    "search": run_search,
    "convert": _convert,
}

if __name__ == "__main__":
    sys.exit(main())
