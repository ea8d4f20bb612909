"""Processor seconds of this process and of the processes that it has started."""

from __future__ import annotations

import os

elsewhere = 0.0  # seconds of processes that a server has started


def seconds() -> float:
    times = os.times()
    return elsewhere + times.user + times.system + times.children_user + times.children_system
