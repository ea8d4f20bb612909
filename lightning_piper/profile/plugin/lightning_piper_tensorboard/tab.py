"""The server of the tab: it lists the recordings and serves their files and the page. It imports neither
torch nor lightning.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.backend.http_util import Respond
from tensorboard.plugins.base_plugin import FrontendMetadata, TBPlugin
from werkzeug import Request, Response

from .scan import RecordedRun, Refused, number_of, read, roots_of, scan

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css"}
RESCAN = 5.0  # seconds between two scans while the tab has nothing to show


class PiperTab(TBPlugin):  # type: ignore[misc]  # TensorBoard has no annotations
    """The tab; see `tensorboard.plugins.base_plugin.TBPlugin`."""

    plugin_name = "piper"

    def __init__(self, context: Any) -> None:
        flags = getattr(context, "flags", None)
        self._roots = roots_of(context.logdir, getattr(flags, "logdir_spec", None))
        self._runs: dict[str, RecordedRun] = {}
        self._scanned = float("-inf")
        self._lock = threading.Lock()

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/index.js", tab_name="Piper")

    def is_active(self) -> bool:
        """Return whether the last scan found a recording. If not, start a thread that scans the disk again,
        because TensorBoard calls this often and must not wait."""
        if not self._runs and time.monotonic() - self._scanned > RESCAN:
            self._scanned = time.monotonic()
            threading.Thread(target=self._scan, daemon=True).start()
        return bool(self._runs)

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return route -> application that answers its requests, and start the first scan."""
        apps: dict[str, Callable[..., Any]] = {
            "/runs": Request.application(self._serve_runs),
            "/file": Request.application(self._serve_file),
        }
        for path in STATIC.iterdir():
            if path.suffix in TYPES:
                apps[f"/{path.name}"] = _static(path)
        self.is_active()
        return apps

    def _scan(self) -> dict[str, RecordedRun]:
        """Scan the log directories, and return name -> run. Other requests use the same result until the next
        scan."""
        found = scan(self._roots)
        with self._lock:
            self._runs = found
        return found

    def _serve_runs(self, request: Request) -> Response:
        """Serve {"runs": [{"name", "steps": [{"file", "number"}]}]} as JSON, after a new scan."""
        runs = []
        for name, run in self._scan().items():
            steps = sorted((file for file in run.files if file.startswith("step_")), key=number_of)
            runs.append(
                {"name": name, "steps": [{"file": file, "number": number_of(file)} for file in steps]}
            )
        return _respond(request, json.dumps({"runs": runs}))

    def _serve_file(self, request: Request) -> Response:
        """Serve a file of a run. The scan must have found the run and the file, because request arguments are
        never joined to a path.
        """
        run, name = request.args.get("run", ""), request.args.get("name", "")
        with self._lock:
            found = self._runs.get(run)
        if found is None or name not in found.files:
            return _missing(request, f"there is no recording {name!r} of a run {run!r} in the log directory")
        try:
            content = read(found, name)
        except Refused as error:
            return _missing(request, f"{name!r} of run {run!r} {error}")
        return _respond(request, content)


def _respond(
    request: Request, content: str | bytes, kind: str = "application/json", code: int = 200
) -> Response:
    response: Response = Respond(request, content, kind, code=code)
    return response


def _missing(request: Request, problem: str) -> Response:
    """Return a response with the status 404 and {"error": problem} as JSON."""
    return _respond(request, json.dumps({"error": problem}), code=404)


def _static(path: Path) -> Callable[..., Any]:
    """Return the application that serves a file of the page. It reads the file at each request."""

    @Request.application
    def serve(request: Request) -> Response:
        return _respond(request, path.read_text(encoding="utf-8"), TYPES[path.suffix])

    return serve
