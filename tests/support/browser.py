"""Headless Chromium, driven over its DevTools pipe with the standard library alone."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PATIENCE = 20.0
"""Seconds to wait for an answer."""
OPTIONS = (
    "--headless",
    "--no-sandbox",  # containers run tests as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""The browser's executable; None if it is not installed."""
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; `make browser` installs it")


class Browser:
    """One Chromium process. Use it as a context; `open` gives a tab."""

    def __enter__(self) -> "Browser":
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; copies out of their way come first.
        to_read, to_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read, to_write))

        def connect() -> None:
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        self._number, self._rest, self.events = 0, b"", []
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: object) -> dict:
        """Call a DevTools method and wait for its result; events on the way are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Wait for an event of a tab."""
        while not any(event.get("method") == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._next())

    def open(self, path: Path | str, width: int = 1200, height: int = 800, *, dark: bool = False) -> "Tab":
        """A file, or an address, in a tab of its own, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.call("Page.navigate", session, url=path if isinstance(path, str) else path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return Tab(self, session)

    def _next(self) -> dict:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium gave no answer within {PATIENCE:.0f} seconds")
            self._rest += os.read(self._read, 1 << 20)
            if self._process.poll() is not None:
                raise OSError(f"chromium ended with code {self._process.returncode}")
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Tab:
    """A loaded page."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session

    def evaluate(self, expression: str) -> object:
        """The value of a JavaScript expression; its errors are raised."""
        result = self._browser.call("Runtime.evaluate", self._session, expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def problems(self) -> list[str]:
        """What the console shows of errors and warnings: scripts, refused loads, broken markup."""
        self.evaluate("0")  # events before this answer have arrived with it
        errors = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session or "method" not in event:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                errors.append(params["exceptionDetails"]["text"])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                errors.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                errors.append(str(params["args"]))
        return errors

    def screenshot(self, path: Path) -> Path:
        """The whole page as a PNG."""
        self._browser.call("Page.bringToFront", self._session)  # tabs behind others are not drawn
        size = self._browser.call("Page.getLayoutMetrics", self._session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._browser.call("Page.captureScreenshot", self._session, clip=clip, captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
