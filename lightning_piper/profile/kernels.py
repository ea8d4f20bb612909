"""torch.profiler over the recorded steps: operators and kernels, labelled with the node that they belong to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch.profiler import profile, supported_activities


class Kernels:
    """The profiler of one process, started and stopped with the recorded steps."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Start, unless it runs already."""
        if self._profile is None:
            self._profile = profile(activities=supported_activities(), acc_events=True)
            self._profile.start()

    def stop(self) -> str | None:
        """Stop; the Chrome trace as JSON text, None if it did not run."""
        if self._profile is None:
            return None
        running, self._profile = self._profile, None
        running.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.json"
            running.export_chrome_trace(str(path))
            return path.read_text(encoding="utf-8")
