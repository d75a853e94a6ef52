"""A browser without a window, driven over the WebDriver protocol with nothing but the standard library.

*Takes* `chromium` and `chromedriver` from the system (Debian: `apt-get install chromium chromium-driver`). *Gives* a
`Browser` that opens pages, runs scripts, moves the pointer and tells what the console said.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MISSING = next((name for name in ("chromium", "chromedriver") if shutil.which(name) is None), None)
"""What is not installed."""
REASON = f"{MISSING} is not installed (Debian: apt-get install chromium chromium-driver)"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,900"]


class Browser:
    """One session of a browser."""

    def __init__(self, base: str) -> None:
        self._base = base
        wanted = {"goog:chromeOptions": {"args": OPTIONS}, "goog:loggingPrefs": {"browser": "ALL"}}
        found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{found['sessionId']}"

    def _ask(self, method: str, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._base + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, address: str) -> None:
        """Load a page."""
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """The result of a script: it must `return` it."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def type(self, selector: str, text: str) -> None:
        """Type into the element that a selector finds."""
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click the element that a selector finds."""
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"/element/{found[ELEMENT]}/click", {})

    def point(self, x: int, y: int) -> None:
        """Move the pointer to a place of the window."""
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
        action = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._ask("POST", "/actions", {"actions": [action]})

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def messages(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the session."""
        self._ask("DELETE", "")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser for a `with` block."""
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            found = Browser(f"http://127.0.0.1:{_port(process)}")
            try:
                yield found
            finally:
                found.close()
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip(". \n").rpartition(" ")[2])
    raise AssertionError("chromedriver did not start")
