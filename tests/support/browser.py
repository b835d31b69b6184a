"""A real browser in a test: Chromium over its debugging pipe (Chrome DevTools Protocol), without a driver to install.

Messages are JSON that ends in a zero byte, read by the browser from its file 3 and written to its file 4
(--remote-debugging-pipe)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_PATIENCE_S = 30.0


class Browser:
    """One Chromium; `errors` holds what any of its tabs wrote to the console as an error or threw."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        words += ["--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]
        words += ["--disable-gpu-compositing", "--disable-threaded-compositing"]  # nobody looks at it
        words += [f"--user-data-dir={profile}", "about:blank"]
        wrapped = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *words]
        self._process = subprocess.Popen(wrapped, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._left, self._replies = 0, b"", dict[int, dict[str, Any]]()
        self.errors: list[str] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        end = time.monotonic() + _PATIENCE_S
        while self._count not in self._replies:
            assert time.monotonic() < end, f"no answer to {method}"
            self._read(1.0)
        reply = self._replies.pop(self._count)
        assert "error" not in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def _read(self, seconds: float) -> None:
        if not select([self._in], [], [], seconds)[0]:
            return
        *whole, self._left = (self._left + os.read(self._in, 1 << 20)).split(b"\0")
        for message in map(json.loads, whole):
            if "id" in message:
                self._replies[message["id"]] = message
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(str(message["params"]["entry"]))
            elif message["method"] == "Runtime.consoleAPICalled" and message["params"]["type"] == "error":
                self.errors.append(json.dumps(message["params"]["args"])[:500])

    def tab(self, url: str) -> Tab:
        """Open a page in a tab of its own."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable", session)
        self.send("Page.navigate", session, url=url)
        return Tab(self, session)

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command about this page and return its result."""
        return self._browser.send(method, self._session, **params)

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """Wait until an expression is true of the page, which may not be there yet, and return its value."""
        script = f"(() => {{ try {{ return {script}; }} catch {{ return false; }} }})()"
        end = time.monotonic() + _PATIENCE_S
        while not (value := self.value(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.value('document.body.innerText')[:2000]}"
            time.sleep(0.02)
        return value

    def set(self, control: str, value: object) -> None:
        """Give a control a value, as a user does."""
        self.value(
            f"(() => {{ const c = document.getElementById({json.dumps(control)}); c.value = {json.dumps(str(value))};"
            "c.dispatchEvent(new Event('input', {bubbles: true}));"
            "c.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def click(self, control: str) -> None:
        """Click a control."""
        self.value(f"document.getElementById({json.dumps(control)}).click()")

    def picture(self, file: Path, width: int, height: int, dark: bool = False, whole: bool = False) -> None:
        """Write what the page looks like as PNG."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.5)
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run a browser."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
