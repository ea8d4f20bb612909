"""Controls a headless Chromium by the DevTools protocol over a pair of pipes, so that no library is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
LIMIT = 300.0  # seconds, longer than anything here takes on a slow machine


def found_browser() -> str | None:
    """The path of a browser; None if this machine has none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page of a browser. Close it at the end.

    Args:
        path: The path of the browser.
        profile: A folder for the files of the browser.
        width, height: The size of the page in pixels.
    """

    def __init__(self, path: str, profile: Path, width: int = 1500, height: int = 1300) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def pipes() -> None:  # the browser reads from descriptor 3 and writes to 4
            source, target = os.dup(to_browser), os.dup(from_browser)
            os.dup2(source, 3)
            os.dup2(target, 4)

        self._process = subprocess.Popen(
            [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={width},{height}",
             "about:blank"],
            preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []  # errors that the page's console has shown
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.problems.append(
                f"{details.get('url', '')}: "
                f"{details.get('exception', {}).get('description', details['text'])}"
            )
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            entry = event["params"]["entry"]
            self.problems.append(f"{entry.get('url', '')}: {entry['text']}")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression (awaited if it is a promise)."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, what: str, expression: str, good: Callable[[Any], bool] = bool) -> Any:
        """Evaluate an expression again and again until `good` accepts its value, and return the value.

        Raises:
            AssertionError: `good` accepted no value in time.
        """
        end = time.monotonic() + LIMIT
        value = None
        while time.monotonic() < end:
            # Each evaluation waits for the page's next frame, so that this loop does not spin.
            value = self.run(
                f"new Promise(done => requestAnimationFrame(() => done((() => {{ {expression} }})())))"
            )
            if good(value):
                return value
        raise AssertionError(
            f"waited in vain for {what}; the last value is {value!r}; the page says {self.problems}"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event at a point of the page: `mouseMoved`, `mousePressed`, `mouseReleased` or
        `mouseWheel`.
        """
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT)
        os.close(self._read)
        os.close(self._write)
