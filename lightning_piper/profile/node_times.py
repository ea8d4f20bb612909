"""The times at which a node ran, from the files of a recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.ir.text import line_of
from lightning_piper.profile.files import read_json, steps_in


def when_it_ran(compiled: Compiled, node: int, folder: Path) -> list[str]:
    """Return a line for each time that a node ran, in each recorded step and in its planned step. Example:
    "ran in step 7 on device 0, stream compute: 1.200 to 1.900 ms (0.700)". `lightning-piper explain`
    prints the lines.

    Args:
        compiled: The program of the node.
        node: The node's id.
        folder: A log directory with a recording of that program.

    Raises:
        PiperError: The folder does not have a recording, or the recording is invalid or of another program.
    """
    paths = steps_in(folder)
    if not paths:
        raise PiperError(
            f"there is no recording in {str(folder)!r}. Give the log directory of a run with "
            "PiperStrategy(profile=...) [PIPER-R001]"
        )
    lines: list[str] = []
    for path in paths:
        step = read_json(path)
        try:
            lines += _times(compiled, node, path, step)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise PiperError(
                f"{str(path)!r} or its plan is not a valid recording ({type(error).__name__}: {error}). "
                "Record again with PiperStrategy(profile=...) [PIPER-R002]"
            ) from error
    return lines


def _times(compiled: Compiled, node: int, path: Path, step: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each time at which a node ran, in the planned step and in the recorded one.

    Raises:
        PiperError: The step was recorded with another program or batch size.
        ValueError: The step names a plan outside of its folder. Other exceptions show other invalid content.
    """
    if Path(step["plan"]).name != step["plan"]:
        raise ValueError(f"the plan is {step['plan']!r}, which is not a file in the same folder")
    plan = read_json(path.parent / step["plan"])
    recorded = plan["nodes"].get(str(node))
    if recorded is None or recorded["text"] != line_of(compiled.dag, compiled.dag.nodes[node]):
        found = "no such node" if recorded is None else f"the node {recorded['text']!r}"
        raise PiperError(
            f"{str(path)!r} was recorded with another module, program or batch size: it has {found}. Give the "
            "module, the directives and the batch of that run. If its batches had several sizes, record again with "
            "drop_last=True [PIPER-R002]"
        )
    for what, source in (("planned", plan), ("ran", step)):
        for row, start, end, number, kind in source["step"]["boxes"]:
            device, stream = plan["rows"][row]
            if number == node and kind not in ("wait", "idle"):
                where = f"on device {device}, stream {stream}"
                yield (
                    f"{what} in step {step['number']} {where}: {_ms(start)} to {_ms(end)} ms "
                    f"({_ms(end - start)})"
                )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
