"""Programs: lists of directives, from JSON or Python."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_piper.annotate import annotate_modules
from lightning_piper.common.argument_names import unknown
from lightning_piper.common.limits import DIRECTIVES, integer, is_name, kind_of, shown
from lightning_piper.common.user_files import explained, read_json
from lightning_piper.directives.base import (
    Directive,
    check_class,
    error_at,
    find,
    known,
    set_degrees,
    set_line,
)
from lightning_piper.errors import DirectiveError

Program = Sequence[Directive]
VERSION = 1  # the value of the key `version` in a program that is a JSON object
KEYS = ("version", "annotate", "directives", "about")  # the keys of such a program; Piper ignores `about`
Annotations = Mapping[str, Sequence[Sequence[str]]]  # tag -> groups of module names, as in `annotate_modules`


def parse(source: Any) -> list[Directive]:
    """Return the directives of a program, with the fields that follow from other directives.

    The source is a list that mixes directives and JSON objects, an object `{"version": 1, "directives":
    [...]}`, or the path of a JSON file with one of these. `annotations_of` parses the object's `annotate`.

    Raises:
        DirectiveError: The source does not have one of these forms, or an entry is invalid. For an entry, the
            message names its index and field, the value found and the values accepted.
    """
    source, where = _content(source)
    if isinstance(source, dict):
        _annotations_of(source, where)
        source = _directives_of(source, where)
    if not isinstance(source, Iterable) or isinstance(source, Directive | Tensor | bytes):
        raise DirectiveError(
            f"the program is {kind_of(source)}. Give a list of directives, or the path of a JSON file"
            " [PIPER-D001]"
        )
    program = []
    for index, entry in enumerate(source):
        if index == DIRECTIVES:
            raise DirectiveError(
                f"a program has at most {DIRECTIVES} directives. Use filters that select several chunks"
                " [PIPER-D001]"
            )
        try:
            directive = entry if isinstance(entry, Directive) else _from_json(entry)
            check_class(type(directive))
        except DirectiveError as error:
            raise DirectiveError(f"directive {index} {error}") from None
        _check_fields(index, directive)
        program.append(directive)
    return [_completed(index, directive, program) for index, directive in enumerate(program)]


def _completed(index: int, directive: Directive, program: Program) -> Directive:
    """Return the directive, completed by the fields that follow from the other directives of the program."""
    found = directive.completed(program)
    if found is not directive:
        set_line(found, directive.built_at)
        set_degrees(found, directive.written_for)
        _check_fields(index, found)
    return found


def _check_fields(index: int, directive: Directive) -> None:
    try:
        directive.check_fields()
    except DirectiveError as error:
        raise error_at(index, directive, error) from None


def annotations_of(source: Any) -> Annotations:
    """Return the module annotations of a program object, such as `{"PP": [["first"], ["layers.*"]]}`.

    The result is empty for every other form of a program.

    Args:
        source: The program, in any form that `parse` accepts. An iterator is not consumed.

    Raises:
        DirectiveError: The annotations do not have this form, or the file cannot be read.
    """
    content, where = _content(source)
    return _annotations_of(content, where) if isinstance(content, dict) else {}


def annotate_as(module: nn.Module, annotations: Annotations) -> list[RemovableHandle]:
    """Annotate a module as a program needs it. See `annotate_modules` for the return value and errors."""
    return [handle for tag, groups in annotations.items() for handle in annotate_modules(module, tag, groups)]


def _content(source: Any) -> tuple[Any, str]:
    """Return the content of a program's source, read from its file if the source is a path, and the name of
    the source for errors. A mapping, such as a configuration of Hydra, becomes a dict.
    """
    if not isinstance(source, str | PathLike):
        return dict(source) if isinstance(source, Mapping) else source, "the program"
    where = f"directives file {shown(str(source))}"
    return _read(source, where), where


def _read(path: str | PathLike[str], where: str) -> Any:
    """Read a program from a JSON file.

    Raises:
        DirectiveError: The file does not exist, cannot be read as JSON, or has neither a list nor an object.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise DirectiveError(f"{where} does not exist. Give the path of a JSON file [PIPER-D001]") from None
    except (OSError, ValueError) as error:
        raise DirectiveError(f"{where} cannot be read as JSON: {explained(error)} [PIPER-D001]") from None
    if not isinstance(content, list | dict):
        raise DirectiveError(
            f"{where} contains a value of type {type(content).__name__} instead of directives. Write a list "
            "of directives [PIPER-D001]"
        )
    return content


def _directives_of(program: dict[Any, Any], where: str) -> Sequence[Any]:
    """Return the list of directives of a program object. Raise an error if its version or a key is unknown,
    or if there is no list. Check the version first, because another version may have other keys.
    """
    if "version" not in program:
        wanted = f'a list of directives, or {{"version": {VERSION}, "directives": [...]}}'
        raise DirectiveError(f"{where} is an object without the key 'version'. Give {wanted} [PIPER-D001]")
    if integer(program["version"]) != VERSION:
        raise DirectiveError(
            f"{where}: version {shown(program['version'])} is unknown. Give version {VERSION} [PIPER-D001]"
        )
    for key in program:
        if key not in KEYS:
            raise DirectiveError(
                f"{where}: the key {shown(key)} is unknown. Give one of {', '.join(KEYS)} [PIPER-D001]"
            )
    found = program.get("directives")
    if not _is_list(found):
        state = shown(found) if "directives" in program else "missing"
        raise DirectiveError(
            f"{where}: the key 'directives' is {state}. Give a list of directives [PIPER-D001]"
        )
    return found


def _annotations_of(program: dict[Any, Any], where: str) -> Annotations:
    found = program.get("annotate", {})
    if not isinstance(found, Mapping) or not all(
        is_name(tag) and _are_groups(groups) for tag, groups in found.items()
    ):
        wanted = 'an object of lists of lists of names of modules, such as {"PP": [["first"], ["layers.*"]]}'
        raise DirectiveError(f"{where}: the key 'annotate' is {shown(found)}. Give {wanted} [PIPER-D001]")
    return {tag: [list(group) for group in groups] for tag, groups in found.items() if groups}


def _are_groups(groups: Any) -> bool:
    return _is_list(groups) and all(
        _is_list(group) and all(isinstance(name, str) for name in group) for group in groups
    )


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _in_current_form(entry: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a JSON entry in the form of this version. Earlier versions had one directive `shard` for experts,
    weights and sequences.
    """
    if entry["op"] != "shard":
        return entry
    found = {"axis": "ep", "stream": "alltoall"} | {k: v for k, v in entry.items() if v is not None}
    if found.get("params"):
        return found | {"op": "shard_weights"}
    if found.keys().isdisjoint({"params", "values"}):
        return found | {"op": "shard_experts"}
    found.pop("params", None)
    return {"values": {}} | found | {"op": "shard_sequences"}


def _from_json(entry: Any) -> Directive:
    """Return the directive that a JSON object describes.

    Raises:
        DirectiveError: The object describes no valid directive.
    """
    if not isinstance(entry, Mapping) or "op" not in entry:
        raise DirectiveError(
            f'is {shown(entry)}. Give a directive or an object such as {{"op": "place", ...}} [PIPER-D001]'
        )
    entry = _in_current_form(entry)
    op = entry["op"]
    cls = find(op) if isinstance(op, str) else None
    if cls is None:
        raise DirectiveError(
            f"(op {shown(op)}): field 'op' is unknown. Give one of {', '.join(sorted(known()))} [PIPER-D002]"
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {k: v for k, v in entry.items() if k != "op"}
    for name in given:
        if name not in fields and name not in (arguments := inspect.signature(cls).parameters):
            raise DirectiveError(
                f"({op}): field {shown(name)} is {unknown(name, [*fields, *arguments])} [PIPER-D002]"
            )
    for name, field in fields.items():
        if (
            name not in given
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            raise DirectiveError(f"({op}): field {name!r} is missing. Give a value of {name!r} [PIPER-D002]")
    directive = cls(**given)
    set_line(directive, None)
    return directive


def to_json(program: Any) -> list[dict[str, Any]]:
    """Return the JSON form of a program, a list. `parse` turns it back into an equal program.

    Args:
        program: The program, in any form that `parse` accepts.

    Raises:
        DirectiveError: A directive is invalid. The message names its index.
    """
    return [directive.to_json() for directive in parse(program)]


def replicas_of(program: Program) -> dict[int, int]:
    """Return the replica index of each replicated device for which the directives alone determine it.

    The result is empty without replicas.

    Raises:
        DirectiveError: Two directives give a device different indices.
    """
    found: dict[int, int] = {}
    lines: dict[int, tuple[int, ...]] = {}
    for index, directive in enumerate(program):
        try:
            found_lines = directive.member_lines(program)
        except DirectiveError as error:
            raise error_at(index, directive, error) from None
        lines |= {device: tuple(line) for line in found_lines for device in line}
    for index, directive in enumerate(program):
        for group in directive.replica_groups():
            of_line: dict[tuple[int, ...], int] = {}
            for device in group:
                replica = of_line.setdefault(lines.get(device, (device,)), len(of_line))
                if found.setdefault(device, replica) != replica:
                    raise error_at(
                        index,
                        directive,
                        f"({directive.op}): field 'devices': device {device} is replica {replica} here and "
                        f"{found[device]} in an earlier directive. Give the device the same position in all of its "
                        "groups [PIPER-D005]",
                    )
    return found
