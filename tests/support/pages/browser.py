"""A headless Chromium for tests of pages. They skip where none is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 30.0  # seconds; no test comes near them

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

_WAIT = """new Promise((resolve, reject) => {
  const until = performance.now() + %d;
  const look = () => {
    let value = null;
    try { value = %s } catch { }
    value ? resolve(value) : performance.now() > until ? reject(new Error("never")) : setTimeout(look, 20);
  };
  look();
})"""


class Browser:
    """Headless Chromium, controlled by the DevTools protocol over two pipes."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def pipes() -> None:  # the browser reads from descriptor 3 and writes to 4
            copies = os.dup(to_browser), os.dup(from_browser)
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-extensions", "--disable-background-networking", "--no-proxy-server",
             f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            close_fds=False, preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._num, self.session = b"", 0, ""
        self.errors: list[str] = []  # of the page's console and of its content policy
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, scheme: str = "light") -> None:
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Page.navigate", url=url)

    def run(self, expression: str) -> object:
        """Return the value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, id: str) -> str:
        return str(self.run(f"document.getElementById({id!r}).textContent"))

    def click(self, id: str) -> None:
        self.run(f"document.getElementById({id!r}).click()")

    def click_through(self, id: str, path: str) -> None:
        """Click what leads to the page of this path, and wait until the browser is there."""
        self.run(f"setTimeout(() => document.getElementById({id!r}).click())")  # after the answer to this call
        until = time.monotonic() + 2 * PATIENCE
        reached = ""
        while not reached.endswith(path):
            assert time.monotonic() < until, f"{id} leads to {reached or 'no other page'}"
            event = self._receive()
            if event.get("method") == "Page.frameNavigated":
                reached = event["params"]["frame"]["url"]

    def fill(self, id: str, value: object) -> None:
        self.run(f"document.getElementById({id!r}).value = {json.dumps(value)}")

    def wait_for(self, expression: str) -> object:
        """Wait until the expression is true and return its value."""
        return self.run(_WAIT % (PATIENCE * 1000, expression))

    def wait_for_text(self, id: str, part: str) -> None:
        self.wait_for(f"document.getElementById({id!r}).textContent.includes({json.dumps(part)})")

    def close(self) -> None:
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def _call(self, method: str, **params: object) -> dict:
        self._num += 1
        message = {"id": self._num, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < until:
            answer = self._receive()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._num:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError(f"{method} was not answered")

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Yield a browser with this folder for its profile, and end it."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
