"""Schedules in the CSV formats of torch.distributed.pipelining: one row for each rank, one action in each
cell.

    0F0,0F1,,1F0,1I0,1W0,(0F2;1B1)OVERLAP_F_B

A cell is stage, pass, microbatch. `I` and `W` are the passes BI and BW of a split backward. An empty cell is
an idle slot. The format with communication also has actions such as `0SEND_F1` and `1UNSHARD`. `from_csv`
drops them, because the program determines what is sent, gathered and reduced.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from lightning_piper.common.limits import FILE, PASSES, kind_of, shown
from lightning_piper.common.user_files import explained, read_text
from lightning_piper.directives import Directive, Order, Place, parse
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.filters import matches
from lightning_piper.schedules.actions import Action, Devices, Row, check_names, program_of

_KINDS = {"F": "F", "B": "B", "I": "BI", "W": "BW"}  # letter of a cell -> pass
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_COMPUTE = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_OVERLAP = re.compile(r"\((?P<actions>[^()]*)\)OVERLAP_F_B")
# Cells for communication, which `from_csv` drops.
_DERIVED = re.compile(r"\d+((SEND|RECV)_[FB]\d+|(UNSHARD|RESHARD|REDUCE_GRAD)\d*)")


def from_csv(
    path_or_text: str | PathLike[str], devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """Return the program of a schedule in CSV form, with or without communication.

    Args:
        path_or_text: The path of a file, or its content. A string with a comma or a line break is content.
        devices: The devices of each rank (row), as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: The file cannot be read, or a cell cannot be parsed. Passes of a stage for a
            microbatch are missing, duplicate, or on different ranks. A row is empty, the step has too many
            passes, or `devices` or a tag is not valid.

    Source: torch.distributed.pipelining, `_PipelineScheduleRuntime._load_csv` (torch 2.13).
    """
    check_names("from_csv", tag, dim_name)
    rows = _read(_content(path_or_text))
    microbatches = _checked_microbatches(rows)
    return program_of(rows, microbatches, devices, tag, dim_name, "from_csv")


def _content(source: str | PathLike[str]) -> str:
    """Return the text of a schedule: `source` itself if it has a comma or a line break, otherwise the content
    of the file with this path.

    Raises:
        DirectiveError: `source` is neither a string nor a path, the text is too long, or the file cannot be
            read.
    """
    if isinstance(source, str) and ("," in source or "\n" in source):
        if len(source) > FILE:
            raise DirectiveError(
                f"from_csv: the text has {len(source)} characters, but at most {FILE} are read. Give a "
                "shorter schedule [PIPER-D021]"
            )
        return source
    if not isinstance(source, str | PathLike):
        raise DirectiveError(
            f"from_csv: the source is {kind_of(source)}. Give the path of a file, or its content [PIPER-D021]"
        )
    try:
        return read_text(source)
    except (OSError, ValueError) as error:
        raise DirectiveError(
            f"from_csv: file {shown(str(source))} cannot be read: {explained(error)} [PIPER-D021]"
        ) from None


def _read(text: str) -> list[Row]:
    """Return the rows in a CSV text. Drop empty rows at the end, and cells for communication, which Piper
    derives itself.

    Raises:
        DirectiveError: The text is not CSV, or a cell is not an action.
    """
    rows: list[Row] = []
    try:
        lines = list(csv.reader(io.StringIO(text, newline=None)))
    except csv.Error as error:
        raise DirectiveError(
            f"from_csv: the text cannot be read as CSV: {error}. Give one line for each rank, with cells such "
            "as 0F0 [PIPER-D021]"
        ) from None
    for number, cells in enumerate(lines):
        row: Row = []
        for column, cell in enumerate(map(str.strip, cells)):
            overlap = _OVERLAP.fullmatch(cell)
            if overlap is None and (not cell or _DERIVED.fullmatch(cell)):
                continue
            parts = [
                _COMPUTE.fullmatch(part.strip())
                for part in (overlap["actions"].split(";") if overlap else [cell])
            ]
            if not all(parts):
                raise DirectiveError(
                    f"from_csv: row {number}, cell {column}: {shown(cell)} is not an action. Give a stage, "
                    "F, B, I or W, and a microbatch, such as '0F3', or '(0F3;1B0)OVERLAP_F_B' [PIPER-D021]"
                )
            row.append(tuple(Action(int(part[1]), _KINDS[part[2]], int(part[3])) for part in parts if part))
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _checked_microbatches(rows: Sequence[Row]) -> int:
    """Check that every stage runs its passes for every microbatch once and on one rank.

    Returns:
        The number of microbatches.

    Raises:
        DirectiveError: Passes are missing, duplicate, or on different ranks. Or a row is empty, there is no
            row, or the step has too many passes.
    """
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for rank, row in enumerate(rows):
        if not row:
            raise DirectiveError(f"from_csv: row {rank} has no pass. Remove the row [PIPER-D021]")
        for action in (action for group in row for action in group):
            found.setdefault((action.stage, action.microbatch), []).append((action.kind, rank))
    stages, microbatches = (1 + max((key[i] for key in found), default=-1) for i in (0, 1))
    if not found:
        raise DirectiveError(
            "from_csv: the schedule has no pass. Give a row of actions such as '0F0,0B0' for each rank"
            " [PIPER-D021]"
        )
    if len(found) > PASSES // 2:
        raise DirectiveError(
            f"from_csv: the schedule has {len(found)} pairs of a stage and a microbatch. Give at most {PASSES // 2}: "
            "each has at least two passes [PIPER-D021]"
        )
    # Raise an error at the first stage and microbatch with missing or duplicate passes.
    for key in ((stage, mb) for stage in range(stages) for mb in range(microbatches)):
        kinds = sorted(kind for kind, _ in found.get(key, []))
        if kinds not in (["B", "F"], ["BI", "BW", "F"]) or len({rank for _, rank in found[key]}) > 1:
            there = [
                f"{_cell(Action(key[0], kind, key[1]))} in row {rank}" for kind, rank in found.get(key, [])
            ]
            has = ", ".join(there[:8]) or "nothing"
            raise DirectiveError(
                f"from_csv: stage {key[0]}, microbatch {key[1]} has {has}. Give F and B, or F, I and W, "
                "once each, in one row [PIPER-D021]"
            )
    return microbatches


def to_csv(
    program: Sequence[Directive],
    path: str | PathLike[str] | None = None,
    tag: str = "PP",
    dim_name: str = "MB",
) -> str:
    """Return the orders of a program as CSV, without communication. `from_csv` can read the text. It has a
    row for each order, in the order of the devices that run it.

    Args:
        program: A program, such as a builder returns.
        path: A file for the CSV (default: None, no file).
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A filter of an order does not select exactly one pass of one stage for one microbatch,
            or its chunk is not placed. Or two orders belong to one rank, an order belongs to several ranks,
            the program or a tag is not valid, or the file cannot be written.
    """
    check_names("to_csv", tag, dim_name)
    program = parse(program)
    places = [directive for directive in program if isinstance(directive, Place)]
    rows: dict[tuple[int, ...], list[str]] = {}
    for index, order in enumerate(program):
        if not isinstance(order, Order):
            continue
        cells, ranks = [], set()
        for group in order.filters:
            actions = [
                _action(index, item, tag, dim_name)
                for item in (group if isinstance(group, list | tuple) else [group])
            ]
            ranks |= {_devices_of(index, action, places, tag, dim_name) for action in actions}
            joined = ";".join(map(_cell, actions))
            cells.append(f"({joined})OVERLAP_F_B" if len(actions) > 1 else joined)
        rank = ranks.pop()
        if ranks or rank in rows:
            raise DirectiveError(
                f"to_csv: directive {index} (order): field 'filters': the order is "
                f"{'for several ranks' if ranks else 'the second order for its rank'}. Give one order "
                "for each rank [PIPER-D021]"
            )
        rows[rank] = cells
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(rows[rank] for rank in sorted(rows))
    if path is not None:
        try:
            Path(path).write_text(stream.getvalue(), encoding="utf-8", newline="")
        except (OSError, ValueError, TypeError) as error:
            raise DirectiveError(
                f"to_csv: file {shown(path)} cannot be written: {error}. Give the path of a file in a folder that "
                "exists and can be written [PIPER-R003]"
            ) from None
    return stream.getvalue()


def _action(index: int, condition: object, tag: str, dim_name: str) -> Action:
    """Return the action that a filter names.

    Raises:
        DirectiveError: The filter is not one stage, one microbatch and one pass.
    """
    given = dict(condition) if isinstance(condition, dict) else {}
    stage, kind, microbatch = (given.get(name) for name in (tag, "PASS", dim_name))
    if len(given) != 3 or type(stage) is not int or type(microbatch) is not int or kind not in _LETTERS:
        raise DirectiveError(
            f"to_csv: directive {index} (order): field 'filters': {shown(condition)} is not one cell. Give "
            f"one stage, one microbatch and one pass, such as {{{tag!r}: 0, {dim_name!r}: 0, 'PASS': 'F'}}, or the "
            "names of other tags (tag=, dim_name=) [PIPER-D021]"
        )
    return Action(stage, str(kind), microbatch)


def _devices_of(
    index: int, action: Action, places: Sequence[Place], tag: str, dim_name: str
) -> tuple[int, ...]:
    """Return the devices on which the first place that matches an action puts it.

    Raises:
        DirectiveError: No place matches the action.
    """
    tags: dict[str, int | str] = {tag: action.stage, dim_name: action.microbatch, "PASS": action.kind}
    for place in places:
        if matches(place.filter, tags):
            return place.group
    raise DirectiveError(
        f"to_csv: directive {index} (order): field 'filters': {_cell(action)} is on no device. Put a "
        "place for its stage before the order [PIPER-D021]"
    )


def _cell(action: Action) -> str:
    return f"{action.stage}{_LETTERS[action.kind]}{action.microbatch}"
