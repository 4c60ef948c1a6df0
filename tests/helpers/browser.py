"""Controls a headless Chromium through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.launching import wait_for

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
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # even if $http_proxy is set


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
            with DIRECT.open(request, timeout=240) as answer:
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
    path = folder / "chromedriver.log"
    with open(path, "w") as log:
        # chromedriver finds a free port itself; another process could take one that we find
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=log, stderr=log)
    try:
        port = wait_for(lambda: _port(driver, path), "chromedriver to start")
        window = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield window
        finally:
            window.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(timeout=60)


def _port(driver: subprocess.Popen, log: Path) -> str | None:
    """Returns the port from the line that chromedriver prints once it accepts connections."""
    assert driver.poll() is None, log.read_text()
    found = re.search(r"started successfully on port (\d+)", log.read_text())
    return found and found[1]
