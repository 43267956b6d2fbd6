"""A headless Chromium, controlled through the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
_NAVIGATED = ("navigated or closed", "Cannot find default execution context", "Execution context was destroyed")
"""Texts in the errors of scripts that were interrupted by a navigation."""


class NavigationError(Exception):
    """The tab opened another page while a script ran."""


class Page:
    """One tab of the browser.

    Attributes:
        problems: errors of the browser, for example a failed request; errors and warnings that scripts write to the
            console; and exceptions of scripts.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=300))
            self._note(message)
            if message.get("id") == self._number:
                if any(text in message.get("error", {}).get("message", "") for text in _NAVIGATED):
                    raise NavigationError
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: Any) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(str(parameters["entry"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str(parameters["args"]))

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, timeout: float = 300) -> None:
        """Wait until a JavaScript expression is true. An exception counts as false."""
        end, text = time.monotonic() + timeout, ""
        while time.monotonic() < end:
            with contextlib.suppress(NavigationError):  # an earlier click may open another page meanwhile
                if self.run(f"(() => {{ try {{ return !!({script}) }} catch {{ return false }} }})()"):
                    return
                text = self.run("document.body?.innerText")
        raise AssertionError(f"{script} is still not true. The page shows:\n{text}\n{str(self.problems)[:2000]}")

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element."""
        place = f"document.querySelector('{selector}')"
        self.run(f"{place}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """Press and release a key. ``code`` is its Windows key code.

        If ``key`` is one character, the browser types this character.
        """
        text = {"text": key} if len(key) == 1 else {}
        for kind, more in (("keyDown" if text else "rawKeyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def layout(self, width: int, height: int, *, dark: bool = False) -> None:
        """Show the page in a window of this size, in light or dark colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """Start a browser with an empty profile in ``folder``. Skip the test if Chromium or websockets is missing."""
    if not PROGRAM:
        pytest.skip("needs Chromium, which is not installed")
    client = pytest.importorskip("websockets.sync.client", reason="needs websockets, which is not installed")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--allow-pre-commit-input"]  # otherwise Chromium drops keys and clicks before it shows the page
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-background-networking"]
    # The client must not give up while the browser is slow, or while the test reads no events.
    patient = {"max_size": None, "max_queue": None, "open_timeout": 300, "ping_interval": None}
    process = subprocess.Popen([PROGRAM, *options, "about:blank"], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        found = next(filter(None, (re.search(r"DevTools listening on (ws://\S+)", line) for line in process.stderr)))
        with client.connect(found[1], **patient) as socket:
            socket.send(json.dumps({"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
            target = json.loads(socket.recv())["result"]["targetId"]
        address = f"{found[1].split('/devtools')[0]}/devtools/page/{target}"
        with client.connect(address, **patient) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()
