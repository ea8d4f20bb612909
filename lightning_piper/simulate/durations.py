"""The durations of a plan's work: a function of the chunk, or a table that can be written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from os import PathLike

from lightning_piper.common.argument_names import unknown
from lightning_piper.common.limits import is_number, kind_of, shown
from lightning_piper.common.user_files import explained, name_of, read_json
from lightning_piper.errors import SimulationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import SPLIT_BACKWARD
from lightning_piper.ops.base import INSTRUCTIONS
from lightning_piper.ops.communication.p2p import Recv
from lightning_piper.plan.instructions import (
    Collective,
    Instruction,
    Irecv,
    Keep,
    Record,
    Run,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)

Number = int | float | Fraction
Durations = Mapping[str, Number] | Callable[[Chunk], Number]

# A backward pass computes two products for each product of the forward pass: for its input (BI) and its
# weights (BW).
DEFAULT: Mapping[str, Number] = {"F": 1, "B": 2, "BI": 1, "BW": 1}

# The end of errors about an unknown node or tag, which users of Python and of the command line see.
LISTED = "Find the nodes, passes and tags with print(compiled.dag) in Python, or with `lightning-piper plan`"

PAIR = "F&B"  # key of the duration of an F and a B that form an overlap group
_CHUNK = re.compile(r"(?P<kind>[A-Z]+)(\[(?P<tags>[^\]]*)\])?")
_NODE = re.compile(r"%(?P<node>\d+)")
_OP = re.compile(r"[a-z_]+")
_PASSES = ("F", "B", *SPLIT_BACKWARD)  # a recomputed forward pass counts as F
_Tags = tuple[tuple[str, int], ...]  # (tag, index), sorted
_Entry = tuple[int, str, Number]  # number of tags, key, duration


class WorkDurations:
    """The durations of one DAG's work. The constructor looks up the duration of every chunk.

    Args:
        dag: The finished DAG.
        durations: A function from a chunk to its duration, or a table with these keys.
            `"F"`: every chunk of this pass without a more specific entry.
            `"F[PP=0]"`, `"F[PP=0,MB=3]"`: chunks of this pass with these tags. The entry with the most tags
            wins.
            `"F&B"`: an F and a B on the same devices, one chunk each, that form an overlap group of an order.
            They start together and end together after this time. The entry does not apply if one of the two
            chunks has an entry such as `"%12"`.
            `"%12"`: node 12, as plans print it. For a send, this is the duration of the transfer.
            `"add"`, `"merge"`, ...: every instruction of this operation. Operations without an entry take no
            time. Communication takes the time of the network, except nodes with an entry such as `"%12"`.
        issued: The nodes of chunks, in the order in which the plans run them. It decides which chunk of an
            overlap group is the first one.

    Raises:
        SimulationError: `durations` is neither a table nor a function. An entry is malformed, is not a
            duration, occurs twice, has tags or a node that this DAG does not have, or names no pass or operation. Or a chunk has no
            entry, or two equally specific ones.
    """

    def __init__(self, dag: TrainingDAG, durations: Durations, issued: Iterable[int] = ()) -> None:
        """Look up the duration of every chunk."""
        self._ops: dict[str, Number] = {}  # operation of an instruction -> duration
        self._nodes: dict[int, Number] = {}  # node -> duration
        if not isinstance(durations, Mapping) and not callable(durations):
            raise SimulationError(
                f"durations: {shown(durations)} is neither a table nor a function. Give a table such as "
                f"{DEFAULT} [PIPER-T001]"
            )
        if isinstance(durations, Mapping):
            rules = self._read(dag, durations)
            measured = set(self._nodes)
            for chunk in dag.of_type(Chunk):
                matching = rules.matching(chunk)
                if chunk.id not in self._nodes:
                    self._nodes[chunk.id] = _most_specific(chunk, matching)
            rules.check_used()
            if PAIR in durations:
                self._overlap(
                    [pair for pair in _pairs(dag) if not measured & set(pair)], durations[PAIR], issued
                )
        else:
            for chunk in dag.of_type(Chunk):
                self._nodes[chunk.id] = checked(f"the duration of {_name(chunk)}", durations(chunk))

    def _overlap(self, pairs: Iterable[tuple[int, int]], duration: Number, issued: Iterable[int]) -> None:
        """Give the first chunk of each pair the duration of the pair, and the second chunk the duration 0. So
        the outputs of both chunks exist at the end of the pair.
        """
        rank = {node: i for i, node in reversed(list(enumerate(issued)))}
        for pair in pairs:
            first, second = sorted(pair, key=lambda node: rank.get(node, node))
            self._nodes[first], self._nodes[second] = duration, 0

    def _read(self, dag: TrainingDAG, table: Mapping[str, Number]) -> _Rules:
        """Read a table of durations. Store the durations of nodes and operations in `self`, and return rules
        with the durations of passes.

        Raises:
            SimulationError: An entry is invalid.
        """
        rules = _Rules()
        for key, value in table.items():
            duration = checked(f"durations: {shown(key)}", value)
            if not isinstance(key, str):
                raise SimulationError(
                    f"durations: {shown(key)} is not a string. Give keys such as 'F', 'F[PP=0]' or '%12'"
                    " [PIPER-T001]"
                )
            if match := _NODE.fullmatch(key):
                node = int(match["node"])
                if node not in dag.nodes:
                    raise SimulationError(
                        f"durations: {key!r} is not a node of this program. {LISTED} [PIPER-T001]"
                    )
                found = dag.nodes[node]
                if isinstance(found, Recv):
                    raise SimulationError(
                        f"durations: {key!r} is a recv. Name its send, '%{found.inputs[0][0]}' [PIPER-T001]"
                    )
                self._nodes[node] = duration
            elif match := _CHUNK.fullmatch(key):
                if match["kind"] not in _PASSES:
                    raise SimulationError(
                        f"durations: {key!r}: pass {match['kind']!r} is {unknown(match['kind'], _PASSES)} [PIPER-T001]"
                    )
                rules.add(key, match["kind"], _tags(key, match["tags"]), duration)
            elif _OP.fullmatch(key):
                if key in _untimed():
                    raise SimulationError(
                        f"durations: {key!r} has no duration, because its instructions communicate or wait. Give the "
                        "duration of a node, such as '%12' [PIPER-T001]"
                    )
                if key not in (known := _timed()):
                    raise SimulationError(
                        f"durations: operation {key!r} is {unknown(key, known)} [PIPER-T001]"
                    )
                self._ops[key] = duration
            elif key == PAIR:
                continue
            else:
                raise SimulationError(
                    f"durations: {key!r} cannot be understood. Give a pass such as 'F', with tags "
                    "such as 'F[PP=0,MB=3]', a node such as '%12', or an operation such as 'add'"
                    " [PIPER-T001]"
                )
        return rules

    def of(self, instruction: Instruction, otherwise: Number = 0) -> Number:
        """Return how long the instruction occupies its stream, or `otherwise` if neither its node nor its
        operation has a duration.
        """
        return self._nodes.get(instruction.node, self._ops.get(instruction.op, otherwise))

    def measured(self, node: int) -> Number | None:
        """Return how long the communication of a node takes, or None if no `"%12"` entry gives its
        duration."""
        return self._nodes.get(node)


def _untimed() -> set[str]:
    """Return the operations that take the time of the network or of a wait."""
    kinds = (SendInstruction, Irecv, Collective, WaitWork, WaitSend)
    found = {op for op, kind in INSTRUCTIONS.items() if issubclass(kind, kinds)}
    return found | {Record.op, WaitEvent.op}


def _timed() -> list[str]:
    """Return the operations, except chunks, that a table may give a duration, in alphabetical order."""
    return sorted({*INSTRUCTIONS, Keep.op} - _untimed() - {Run.op})


def _pairs(dag: TrainingDAG) -> Iterator[tuple[int, int]]:
    """Yield the overlap groups of one F and one B on the same devices, as the nodes of the two chunks."""
    for lanes in dag.overlaps:
        if [len(lane) for lane in lanes] == [1, 1]:
            a, b = (dag.nodes[lane[0]] for lane in lanes)
            if (
                isinstance(a, Chunk)
                and isinstance(b, Chunk)
                and {a.kind, b.kind} == {"F", "B"}
                and a.devices == b.devices
            ):
                yield a.id, b.id


class _Rules:
    """The entries of a table for passes, such as `F` and `F[PP=0]`."""

    def __init__(self) -> None:
        # Kind of pass -> names of tags -> values of these tags -> key and duration of the entry.
        self._by: dict[str, dict[tuple[str, ...], dict[tuple[object, ...], tuple[str, Number]]]] = {}
        # The keys with tags that have not matched a chunk.
        self._unused: set[str] = set()

    def add(self, key: str, kind: str, tags: _Tags, duration: Number) -> None:
        """Add an entry for chunks of this kind with these tags.

        Raises:
            SimulationError: Another entry has the same kind and tags.
        """
        names, values = tuple(tag for tag, _ in tags), tuple(value for _, value in tags)
        same = self._by.setdefault(kind, {}).setdefault(names, {})
        if values in same:
            raise SimulationError(
                f"durations: {same[values][0]!r} and {key!r} are the same entry. Give it once [PIPER-T001]"
            )
        same[values] = (key, duration)
        if tags:
            self._unused.add(key)

    def matching(self, chunk: Chunk) -> list[_Entry]:
        """Return all entries that apply to a chunk, sorted by their number of tags. Mark them as used."""
        found: list[_Entry] = []
        for names, entries in self._by.get(chunk.kind, {}).items():
            entry = entries.get(tuple(chunk.tags.get(name) for name in names))
            if entry is not None:
                found.append((len(names), *entry))
                self._unused.discard(entry[0])
        return sorted(found, key=lambda entry: entry[0])

    def check_used(self) -> None:
        """Check that each entry with tags has matched a chunk.

        Raises:
            SimulationError: An entry with tags has matched no chunk.
        """
        # An entry without tags may match nothing, because one table may serve schedules with and without
        # split backward passes.
        if self._unused:
            raise SimulationError(
                f"durations: no chunk has the pass and the tags of {min(self._unused)!r}. {LISTED} [PIPER-T001]"
            )


def _most_specific(chunk: Chunk, found: list[_Entry]) -> Number:
    """Return the duration of the most specific entry that applies to a chunk.

    Args:
        chunk: The chunk.
        found: The result of `_Rules.matching` for the chunk. The last entry is the most specific.

    Raises:
        SimulationError: `found` is empty, or its last two entries have equally many tags.
    """
    if not found:
        raise SimulationError(
            f"durations: {_name(chunk)} has no duration. Give one for {chunk.kind!r} [PIPER-T001]"
        )
    if len(found) > 1 and found[-1][0] == found[-2][0]:
        one, other = found[-2][1], found[-1][1]
        raise SimulationError(
            f"durations: {one!r} and {other!r} are equally specific for {_name(chunk)}. Give a duration for "
            f"{chunk.label!r} [PIPER-T001]"
        )
    return found[-1][2]


def _tags(key: str, text: str | None) -> _Tags:
    """Parse the text in the brackets of a key, such as `PP=0,MB=3`. None is a key without brackets.

    Raises:
        SimulationError: A part of the text is not a tag with an index.
    """
    found: dict[str, int] = {}
    for part in (text or "").split(",") if text else []:
        tag, _, value = part.strip().rpartition("=")
        if not tag or not value.isdecimal():
            raise SimulationError(
                f"durations: {key!r}: {part!r} is not a tag with an index. Give for example 'F[PP=0,MB=3]'"
                " [PIPER-T001]"
            )
        found[tag] = int(value)
    return tuple(sorted(found.items()))


def _name(chunk: Chunk) -> str:
    return f"%{chunk.id} {chunk.label}"


def checked(what: str, value: object, positive: bool = False) -> Number:
    """Return the value if it is 0, or a number from 1e-15 to 1e15.

    Args:
        what: The name of the value in the error.
        value: The value.
        positive: Whether the value must not be 0.

    Raises:
        SimulationError: The value has the wrong type or lies outside of these limits.
    """
    if not isinstance(value, int | float | Fraction) or not is_number(value, positive):
        raise SimulationError(
            f"{what} is {shown(value)}. Give {'' if positive else '0, or '}a number from 1e-15 to 1e15 "
            "[PIPER-T001]"
        )
    return value


def read_durations(path: str | PathLike[str]) -> dict[str, Number]:
    """Read a table of durations from a JSON file that holds one object. The entries are not checked;
    `simulate` checks them.

    Raises:
        SimulationError: The file does not exist, cannot be read as JSON, or does not hold an object.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise SimulationError(
            f"durations file {name_of(path)} does not exist. Give the path of a JSON file [PIPER-T001]"
        ) from None
    except (OSError, ValueError) as error:
        raise SimulationError(
            f"durations file {name_of(path)} cannot be read as JSON: {explained(error)} [PIPER-T001]"
        ) from None
    if not isinstance(content, dict):
        raise SimulationError(
            f"durations file {name_of(path)} holds {kind_of(content)}. Write an object such "
            f"as {json.dumps(DEFAULT)} [PIPER-T001]"
        )
    return content
