"""Programs: lists of directives, from JSON or Python, and their application one by one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from lightning_piper.directives.base import Directive, find, known
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.limits import DIRECTIVES, shown
from lightning_piper.reading import read_json

Program = Sequence[Directive]


def parse(source: Any) -> list[Directive]:
    """A program from a list that mixes directives and JSON objects, from the path of a JSON file, or from a JSON text's list.

    Raises:
        DirectiveError: names the entry's index and field, what was found and what would be accepted.
    """
    if isinstance(source, str | PathLike):
        source = _read(source)
    if not isinstance(source, Iterable) or isinstance(source, Directive | dict | Tensor):
        raise DirectiveError(f"a program is a list of directives or the path of a JSON file; found {type(source).__name__}")
    program = []
    for index, entry in enumerate(source):
        if index == DIRECTIVES:
            raise DirectiveError(f"a program has at most {DIRECTIVES} directives; let one filter name several chunks")
        try:
            directive = entry if isinstance(entry, Directive) else _from_json(entry)
            directive.check_fields()
        except DirectiveError as error:
            raise DirectiveError(f"directive {index} {error}") from None
        program.append(directive)
    return program


def _read(path: str | PathLike[str]) -> Any:
    name = shown(str(path))
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise DirectiveError(f"directives file {name} does not exist") from None
    except (OSError, ValueError) as error:
        raise DirectiveError(f"directives file {name} cannot be read as JSON: {error}") from None
    if not isinstance(content, list):
        raise DirectiveError(f"directives file {name} holds a {type(content).__name__}; it must hold a list of objects")
    return content


def _from_json(entry: Any) -> Directive:
    if not isinstance(entry, dict) or "op" not in entry:
        raise DirectiveError(f'is {shown(entry)}; give a directive or an object such as {{"op": "place", ...}}')
    op = entry["op"]
    cls = find(op) if isinstance(op, str) else None
    if cls is None:
        raise DirectiveError(f"(op {shown(op)}): field 'op': unknown; accepted are {', '.join(sorted(known()))}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {k: v for k, v in entry.items() if k != "op"}
    for name in given:
        if name not in fields:
            raise DirectiveError(f"({op}): field {shown(name)}: unknown; accepted are {', '.join(fields)}")
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DirectiveError(f"({op}): field {name!r}: missing; {op} needs {', '.join(fields)}")
    return cls(**given)


def to_json(program: Program) -> list[dict[str, Any]]:
    """The JSON spelling of a program; `parse` turns it back into an equal one."""
    return [directive.to_json() for directive in program]


def replicas_of(program: Program) -> dict[int, int]:
    """The index of each replicated device's replica, as far as the directives themselves say it; empty without replicas.

    Raises:
        DirectiveError: two directives give a device different indices.
    """
    found: dict[int, int] = {}
    for index, directive in enumerate(program):
        for group in directive.replica_groups():
            for replica, device in enumerate(group):
                if found.setdefault(device, replica) != replica:
                    raise DirectiveError(
                        f"directive {index} ({directive.op}): field 'devices': device {device} is replica {replica} here and "
                        f"{found[device]} in an earlier directive; give it the same position in all of its groups"
                    )
    return found


@contextlib.contextmanager
def at_index(dag: TrainingDAG, index: int) -> Iterator[None]:
    """What is done to `dag` meanwhile is done by this directive."""
    dag.origin = index
    try:
        yield
    except DirectiveError as error:
        raise DirectiveError(f"directive {index} {error}") from None
    finally:
        dag.origin = None


def apply_program(
    dag: TrainingDAG, program: Program, after: Callable[[TrainingDAG, int, Directive], None] | None = None
) -> TrainingDAG:
    """Apply a program to `dag` in place, directive by directive, and return it. `after` is called after each one.

    Raises:
        DirectiveError: a directive does not fit, or contradicts another one; names its index.
        VerificationError: `after` raises it; names the directive that was applied last.
    """
    dag.ops = tuple(directive.op for directive in program)
    replicas_of(program)
    for index, directive in enumerate(program):
        with at_index(dag, index):
            directive.apply(dag)
        if after is not None:
            try:
                after(dag, index, directive)
            except VerificationError as error:  # all was well before: it is this directive's doing
                raise VerificationError(f"after directive {index} ({directive.op}), {error}") from None
    return dag
