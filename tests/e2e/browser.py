"""Headless Chromium, driven by chromedriver over the WebDriver protocol (W3C), with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from pegboard.conformance.servers import free_ports

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_PATIENCE_S = 30.0
DOWN, ENTER, LEFT, RIGHT = "\ue015", "\ue007", "\ue012", "\ue014"


def missing() -> str:
    """Return what is not installed, "" where nothing is."""
    return ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


class Element:
    """An element of the page."""

    def __init__(self, browser: Browser, ident: str) -> None:
        self._browser = browser
        self._path = f"/element/{ident}"

    def click(self) -> None:
        self._browser.command("POST", f"{self._path}/click", {})

    def type(self, text: str) -> None:
        self._browser.command("POST", f"{self._path}/value", {"text": text})

    @property
    def text(self) -> str:
        return str(self._browser.command("GET", f"{self._path}/text"))


class Browser:
    """One window. Every wait ends with an error after half a minute."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        try:
            made = self.command("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        except BaseException:
            self._connection.close()
            raise
        self._session = f"/session/{made['sessionId']}"

    def close(self) -> None:
        try:
            self.command("DELETE", "")
        finally:
            self._connection.close()

    def command(self, method: str, path: str, body: object = None) -> Any:
        """Send a command of the protocol; its value. Raises RuntimeError with what the driver says is wrong."""
        sent = None if body is None else json.dumps(body)
        self._connection.request(method, self._session + path, sent, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        value = json.loads(answer.read())["value"]
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {value.get('message', value)}")
        return value

    def open(self, url: str) -> None:
        self.command("POST", "/url", {"url": url})

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Have a screen of so many CSS pixels, of a device that prefers light or dark pages."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def _devtools(self, name: str, params: object) -> None:
        self.command("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a function body of JavaScript returns."""
        return self.command("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector: str) -> Element:
        found = self.command("POST", "/element", {"using": "css selector", "value": selector})
        return Element(self, found[_ELEMENT])

    def press(self, keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        actions = [
            action for key in keys for action in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        self.command("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def until(self, script: str, *arguments: object, seconds: float = _PATIENCE_S) -> Any:
        """Wait until a function body returns something true, and return that."""
        ends = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > ends:
                shown = self.run("return document.body.innerText")
                raise AssertionError(f"it never came: {script}\nThe page shows:\n{shown}\n{self.log()}")
            time.sleep(0.05)
        return found

    def shows(self, selector: str, text: str, *, seconds: float = _PATIENCE_S) -> None:
        """Wait until an element shows a text."""
        script = "const e = document.querySelector(arguments[0]); return e && e.innerText.includes(arguments[1])"
        self.until(script, selector, text, seconds=seconds)

    def log(self) -> list[str]:
        """Return what the browser has logged of the page since the last call: errors, refused code, failed loads."""
        return [entry["message"] for entry in self.command("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("GET", "/screenshot")))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, and its driver, which end with the block."""
    (port,) = free_ports(1)
    command = ["chromedriver", f"--port={port}", "--log-level=OFF"]
    quiet = subprocess.DEVNULL
    driver = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        browser = _connected(port)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        # The whole group: a browser may outlive a driver that fails.
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def _connected(port: int) -> Browser:
    ends = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return Browser(port)
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)
