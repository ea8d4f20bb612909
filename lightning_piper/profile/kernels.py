"""torch.profiler in recorded steps: operators and kernels, labeled with their node."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch.profiler import profile, supported_activities


class Kernels:
    """The torch profiler of one process, which runs in recorded steps."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Start the profiler if it does not run yet."""
        if self._profile is None:
            self._profile = profile(activities=supported_activities(), acc_events=True)
            self._profile.start()

    def stop(self) -> str | None:
        """Stop. Returns the Chrome trace as JSON text, or None if the profiler was not running."""
        if self._profile is None:
            return None
        running, self._profile = self._profile, None
        running.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.json"
            running.export_chrome_trace(str(path))
            return path.read_text(encoding="utf-8")
