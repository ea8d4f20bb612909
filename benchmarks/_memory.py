"""Measures the peak bytes of live tensors during a step with torch's profiler, and the bytes of messages."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from lightning_piper.runtime.same_machine.shared_blocks import shared_blocks

MB = 2**20


def peak_of(build: Callable[[], Callable[[int], Any]]) -> float:
    """Return the peak MB in the third step, counted from before the model is built."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        for i in range(2):
            step(i)
        with record_function("the measured step"):
            step(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begin = min(float(e["ts"]) for e in events if e.get("name") == "the measured step")
    live = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"])):
        live += int(event["args"]["Bytes"])
        if float(event["ts"]) >= begin:
            peak = max(peak, live)
    return peak / MB


def of_messages() -> float:
    """Return the MB of shared memory that this process keeps for messages to other processes of its
    machine.
    """
    return os.fstat(shared_blocks().file).st_blocks * 512 / MB


def growth_of(step: Callable[[], Any]) -> int:
    """Return the maximum of bytes allocated minus bytes freed during the step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    del result
    grown = most = 0
    for event in _allocations(profiler):
        grown += int(event["args"]["Bytes"])
        most = max(most, grown)
    return most


def _allocations(profiler: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"]))
