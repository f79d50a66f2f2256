"""A real Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.shared_cluster import PATIENCE_S, wait


class Browser:
    """One page of a browser."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=PATIENCE_S, suppress_origin=True)
        self._sent = 0
        #: What the browser has complained of: exceptions, and what the console or a policy says.
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": given}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._sent:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:2000])
        elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Open a page."""
        assert "errorText" not in (answer := self.call("Page.navigate", url=url)), answer

    def tell(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise's, once it has one."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def await_(self, expression: str) -> float:
        """Wait until an expression is true; after how many seconds it was."""
        began = time.monotonic()
        wait(lambda: self.tell(expression), what=expression)
        return time.monotonic() - began

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def size(self, width: int, height: int, *, scale: float = 1, mobile: bool = False) -> None:
        """Have a screen of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        """Have a user who prefers the "light" or the "dark" scheme of colours."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def names(self, role: str) -> list[str]:
        """The names that assistive technology finds for everything of this role."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        found = [one for one in nodes if not one["ignored"] and one.get("role", {}).get("value") == role]
        return [one.get("name", {}).get("value", "") for one in found]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        self.call("Browser.close")
        self._socket.close()


@contextmanager
def opened(chromium: str) -> Iterator[Browser]:
    """A browser with an empty page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        command += ["--disable-breakpad", "--disable-crash-reporter"]
        process = subprocess.Popen(
            [*command, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": profile},
        )
        try:
            port = Path(profile, "DevToolsActivePort")
            wait(lambda: port.exists() and port.read_text().count("\n") >= 1, what="the browser's port")
            browser = _first_page(port.read_text().split()[0])
            try:
                yield browser
            finally:
                browser.close()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()


def _first_page(port: str) -> Browser:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=PATIENCE_S) as answer:
        pages = [one for one in json.load(answer) if one["type"] == "page"]
    return Browser(pages[0]["webSocketDebuggerUrl"])
