"""Which machine this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def machine() -> str:
    """Return a text that is the same for two processes if they share cores and memory.

    On Linux, it identifies the running kernel, so containers of one machine have the same text. A host name does
    not identify a machine. Containers of several machines may have one name, and containers of one machine may
    have several names.
    """
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.is_file() else platform.node()
