"""A recorded step as Chrome trace events that open in https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MICROSECOND = 1e6  # microseconds per second, because the format counts in microseconds


def chrome_trace(plan: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """Return the JSON text of a trace. Devices are processes, streams are threads, messages are arrows,
    memory is a counter.

    Args:
        plan: The content of a plan file.
        step: The content of one of its step files.
    """
    events: list[dict[str, Any]] = []
    for thread, (device, stream) in enumerate(plan["rows"]):
        events.append(
            {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}
        )
        events.append(
            {"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": stream}}
        )
        events.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": device,
                "tid": thread,
                "args": {"sort_index": thread},
            }
        )
    for row, start, end, number, kind in step["step"]["boxes"]:
        device, node = plan["rows"][row][0], plan["nodes"][str(number)]
        about = {
            "node": f"%{number}",
            "directive": node["origin"],
            "bytes": node["bytes"],
            "text": node["text"],
            **node["tags"],
        }
        name = f"{kind} for {node['label']}" if kind in ("wait", "idle") else node["label"]
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": kind,
                "pid": device,
                "tid": row,
                "ts": start * MICROSECOND,
                "dur": (end - start) * MICROSECOND,
                "args": about,
            }
        )
    events += _arrows(plan, step["step"]["boxes"])
    for device, figures in step["step"]["devices"].items():
        for kind, curve in figures["memory_by_kind"].items():
            for time, level in curve:
                events.append(
                    {
                        "ph": "C",
                        "name": kind,
                        "pid": int(device),
                        "ts": time * MICROSECOND,
                        "args": {"bytes": level},
                    }
                )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _arrows(plan: Mapping[str, Any], boxes: list[list[Any]]) -> list[dict[str, Any]]:
    """Return arrows from the start of each send to the end of its receive. A send whose receive has no box
    has no arrow."""
    # (node of a receive, device) -> (row, end in seconds)
    ends: dict[tuple[int, int], tuple[int, float]] = {}
    for row, _, end, number, kind in boxes:
        if kind == "recv":
            ends[number, plan["rows"][row][0]] = (row, end)
    receives = {
        source: target for source, target, *_ in plan["edges"] if plan["nodes"][str(target)]["kind"] == "recv"
    }
    events: list[dict[str, Any]] = []
    for row, start, _, number, kind in boxes:
        if kind != "send" or number not in receives:
            continue
        device, target = plan["rows"][row][0], receives[number]
        group_rank = plan["nodes"][str(number)]["devices"].index(device)
        peer = plan["nodes"][str(target)]["devices"][group_rank]
        if (target, peer) in ends:
            to, end = ends[target, peer]
            link = {"cat": "message", "name": "message", "id": f"{number}.{device}"}
            events.append({"ph": "s", **link, "pid": device, "tid": row, "ts": start * MICROSECOND})
            events.append({"ph": "f", "bp": "e", **link, "pid": peer, "tid": to, "ts": end * MICROSECOND})
    return events
