"""The files of a recording: `piper/plan.json` and `piper/step_<number>.json` in the trainer's log directory.

All times are in seconds, all sizes in bytes. A plan file (`plan_2.json` and so on for other batch sizes) has
these keys::

    version, kind="plan", directives [JSON objects], verification (text or null), samples
    rows    [[device, stream], ...]
    nodes   {id: {label, kind, tags, devices, stream, bytes, origin, placed_by, text}}
    colors {kind of a box or node: "#rrggbb"}
    edges   [[from, to, 1 if it carries data or 0, index of the directive that ordered it or null], ...]
    step    the planned step: the plan in virtual time, each instruction with its recorded duration

A step file has these keys::

    version, kind="step", plan (name of its plan file), number (of the batch), global_step
    batch_time, samples_per_second, tokens_per_second (null if unknown)
    bytes_moved {operation: bytes}
    fixed   {device: {parameters, optimizer}}: the bytes that stay between steps
    durations           {"%12" or an operation: seconds}, a table for `simulate`
    planned_step_time   seconds of the plan in virtual time with these durations
    step    the recorded step

In plan files and step files, `step` has the content of `Simulation.to_json` with `boxes` instead of the
timeline. A box is::

    [row, start, end, node, kind]   kind: a pass, an operation, or on streams with chunks `wait` (for
                                    communication only) or `idle` (for other work)

With local SGD, a plan file also has a row `[device, "replicas"]` for each device, and the node `EXCHANGE`, whose bytes
are the bytes that device 0 exchanges in a round. If an exchange follows a recorded step, the step has its boxes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_piper.common.limits import shown
from lightning_piper.common.regular_files import open_regular
from lightning_piper.common.user_files import parse_json
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.text import line_of
from lightning_piper.ops.base import INSTRUCTIONS
from lightning_piper.plan import instructions as ins
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.engine import Trace
from lightning_piper.simulate.figures import Simulation
from lightning_piper.viz.colors import BOOKKEEPING, color, rank

VERSION = 1
FOLDER = "piper"
# Maximum bytes of a file to read: about a million boxes. The TensorBoard tab has the same limit.
LIMIT = 64 << 20

WAITING, IDLE = "#e58a8a", "#f4f1ec"  # colors of time without computation
EXCHANGING = "#6fa8dc"

Row = tuple[int, str]  # (device, stream)
EXCHANGE = -1  # number of the node of exchanges of local SGD, which are not in the graph


def plan_json(
    compiled: Compiled, step: Mapping[str, Any], verification: str | None, exchanged: int | None = None
) -> dict[str, Any]:
    """Return the content of a plan file.

    Args:
        compiled: The program.
        step: The planned step, from `step_of`.
        verification: The report of a verification by execution, or None.
        exchanged: The bytes that device 0 exchanges in a round of local SGD; None without local SGD.
    """
    dag, rows = compiled.dag, rows_of(compiled.plans)
    nodes = {str(i): _node(dag, node) for i, node in dag.nodes.items()}
    if exchanged is not None:
        devices = sorted(compiled.plans)
        rows += [(device, "replicas") for device in devices]
        nodes[str(EXCHANGE)] = {
            "label": "exchange", "kind": "exchange", "tags": {}, "devices": devices, "stream": "replicas",
            "bytes": exchanged, "origin": None, "placed_by": None, "text": "exchange of local SGD",
        }  # fmt: skip
    edges = [[a, b, int(data["data"]), data["order"]] for a, b, data in dag.graph.edges(data=True)]
    return {
        "version": VERSION,
        "kind": "plan",
        "samples": dag.size,
        "directives": [directive.to_json() for directive in compiled.program],
        "verification": verification,
        "rows": [list(row) for row in rows],
        "colors": _colors(dag) | ({} if exchanged is None else {"exchange": EXCHANGING}),
        "nodes": nodes,
        "edges": sorted(edges, key=lambda edge: edge[:2]),
        "step": step,
    }


# Operations of instructions (`Instruction.op`) that do not have boxes, or whose boxes have their node's
# color.
_WITHOUT_BOX = ("run", "send", "retire", "post", "wait")


def _colors(dag: TrainingDAG) -> dict[str, str]:
    """Return kind of a box or node -> "#rrggbb", in the order of a legend."""
    nodes = {node.kind if isinstance(node, Chunk) else node.label: node for node in dag.nodes.values()}
    found = {}
    for kind, node in sorted(nodes.items(), key=lambda item: rank(item[0])):
        found[kind] = color(kind) if isinstance(node, Chunk) or node.communicates else BOOKKEEPING
    operations = sorted(op for op in INSTRUCTIONS if op not in _WITHOUT_BOX)
    return {**found, **{op: color(op) for op in operations}, "wait": WAITING, "idle": IDLE}


def _node(dag: TrainingDAG, node: Node) -> dict[str, Any]:
    """Return the entry of a node in a plan file."""
    kind = node.kind if isinstance(node, Chunk) else node.label
    about = {
        "label": node.label,
        "kind": kind,
        "tags": dict(node.tags),
        "devices": list(node.devices),
        "stream": node.stream,
    }
    directives = {"origin": node.origin, "placed_by": node.placed_by}
    return {
        **about,
        "bytes": sum(value.nbytes for value in node.outputs),
        **directives,
        "text": line_of(dag, node),
    }


def rows_of(plans: Mapping[int, Plan]) -> list[Row]:
    """Return device and stream of each row of a timeline, by device. The stream `compute` comes first."""
    found = []
    for device, plan in sorted(plans.items()):
        found += [
            (device, stream) for stream in sorted(plan.rows, key=lambda stream: (stream != "compute", stream))
        ]
    return found


def step_of(plans: Mapping[int, Plan], figures: Simulation, trace: Trace) -> dict[str, Any]:
    """Return `figures` as JSON data, with boxes in place of its timeline. The boxes of waits come from
    `trace`, on streams that run chunks."""
    rows = {row: i for i, row in enumerate(rows_of(plans))}
    boxes: list[list[Any]] = []
    for span in figures.timeline:
        boxes.append(
            [rows[span.device, span.stream], _time(span.start), _time(span.end), span.node, span.kind]
        )
    computing = {
        (d, i.stream) for d, plan in plans.items() for i in plan.instructions if isinstance(i, ins.Run)
    }
    for held in trace.held:
        if (held.device, held.stream) not in computing:
            continue
        for start, end, kind in ((held.start, held.since, "idle"), (held.since, held.end, "wait")):
            if end > start:
                boxes.append([rows[held.device, held.stream], _time(start), _time(end), held.node, kind])
    step = figures.to_json()
    del step["timeline"]
    return {**step, "boxes": sorted(boxes, key=lambda box: (box[0], box[1], box[2]))}


def exchange_boxes(plans: Mapping[int, Plan], times: Mapping[int, tuple[float, float]]) -> list[list[Any]]:
    """Return the boxes of an exchange of local SGD.

    Args:
        plans: The plans of a local replica.
        times: Device -> start and end of the exchange, in seconds from the start of the step before it.
    """
    first = len(rows_of(plans))
    rows = {device: first + i for i, device in enumerate(sorted(plans))}
    return [
        [rows[device], _time(start), _time(end), EXCHANGE, "exchange"]
        for device, (start, end) in sorted(times.items())
    ]


def _time(value: Any) -> float:
    return round(float(value), 9)


def bytes_moved(plans: Mapping[int, Plan]) -> dict[str, int]:
    """Return the bytes that a step communicates, by operation.

    A message counts once. A collective counts the whole tensor, once for each group.
    """
    total: Counter[str] = Counter()
    for device, plan in plans.items():
        for instruction in plan.instructions:
            if isinstance(instruction, ins.SendInstruction):
                total["send"] += sum(spec.nbytes for spec in instruction.tensors)
            elif isinstance(instruction, ins.Collective) and device == min(instruction.members):
                total[instruction.op] += instruction.nbytes
    return dict(sorted(total.items()))


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader gets the old content or the new one, never a part. Make its folder if
    necessary.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # Mode x fails if the name exists. Mode w would follow an existing link.
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in its shortest form with `write_text`."""
    write_text(path, json.dumps(content, separators=(",", ":")))


def read_json(path: Path) -> dict[str, Any]:
    """Read a plan or step file.

    Raises:
        PiperError: The file is missing, is not a recording, is larger than `LIMIT`, or has another version.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LIMIT:
                raise PiperError(
                    f"{str(path)!r} has {size} bytes, but a file of a recording may have at most {LIMIT} "
                    "bytes. Record a program with fewer microbatches [PIPER-R002]"
                )
            content = parse_json(file.read(size).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise PiperError(
            f"{str(path)!r} cannot be read as a recording: {error}. Record again with "
            "PiperStrategy(profile=...) [PIPER-R002]"
        ) from None
    if not isinstance(content, dict) or "version" not in content:
        raise PiperError(
            f"{str(path)!r} is not a recording: it has no key 'version'. Record again with "
            "PiperStrategy(profile=...) [PIPER-R002]"
        )
    if content["version"] != VERSION:
        raise PiperError(
            f"{str(path)!r} is a recording of version {shown(content['version'])}, but this package reads version "
            f"{VERSION}. Record again with the installed package [PIPER-R002]"
        )
    return content


def steps_in(folder: Path) -> list[Path]:
    """Return the step files of a log directory (or of its folder `piper`), sorted by number. Empty if there
    are none."""
    folder = folder if folder.name == FOLDER else folder / FOLDER
    return sorted(folder.glob("step_*.json"), key=lambda path: (len(path.name), path.name))
