"""Seconds of processors that this process and those that it has started took."""

from __future__ import annotations

import os

elsewhere = 0.0  # of processes that a server has started


def seconds() -> float:
    times = os.times()
    return elsewhere + times.user + times.system + times.children_user + times.children_system
