"""Controls a headless Chromium through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # containers often lack user namespaces
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def missing() -> str | None:
    """Returns the first required program that is not installed, or None."""
    return next((n for n in ("chromium", "chromedriver") if shutil.which(n) is None), None)


class Browser:
    """A browser window; each method sends a WebDriver command."""

    def __init__(self, address: str, profile: Path):
        self.address = address
        options = {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        options["binary"] = shutil.which("chromium")
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        wanted["goog:loggingPrefs"] = {"browser": "ALL"}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{session['sessionId']}"

    def call(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, page: Path) -> None:
        self.call("POST", "/url", {"url": page.resolve().as_uri()})

    def script(self, body: str, *arguments):
        return self.call("POST", "/execute/sync", {"script": body, "args": list(arguments)})

    def find(self, selector: str) -> str:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{next(iter(found.values()))}"

    def click(self, selector: str) -> None:
        self.call("POST", f"{self.find(selector)}/click", {})

    def keys(self, selector: str, text: str) -> None:
        self.call("POST", f"{self.find(selector)}/value", {"text": text})

    def resize(self, width: int, height: int) -> None:
        """Resizes the page, because the window cannot be as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def devtools(self, command: str, parameters: dict) -> None:
        self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def console(self) -> list[str]:
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Opens a browser with a new profile in `folder`; closes it and its driver on exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "chromedriver.log", "w") as log:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=log)
    try:
        _wait(f"http://127.0.0.1:{port}")
        window = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield window
        finally:
            window.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(timeout=20)


def _wait(address: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{address}/status", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
