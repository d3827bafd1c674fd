"""A headless Chromium, driven through a pipe (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (1280, 390)
"""Pixels: a desk's screen and a phone."""
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run")


CUT = """JSON.stringify((() => {
  const found = [], wide = document.documentElement.clientWidth;
  const named = (e) => `${e.tagName} #${e.id} .${e.className.baseVal ?? e.className} `
    + (e.textContent || '').trim().slice(0, 40);
  if (document.documentElement.scrollWidth > wide) found.push('the page');
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || !box.height || style.visibility === 'hidden'
      || e.closest('.code pre')) continue;
    const chart = e.closest('svg');
    if (chart && chart !== e) {
      const own = chart.getBoundingClientRect();
      if (e.tagName === 'text' && (box.left < own.left - 2 || box.right > own.right + 2
        || box.top < own.top - 2 || box.bottom > own.bottom + 2)) found.push(named(e));
      continue;
    }
    if (box.right > wide + 1 || box.left < -1) found.push(named(e));
    if (style.overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1
      && e.tagName !== 'TEXTAREA') found.push(named(e));
  }
  return found;
})())"""
"""Lines of a program may scroll; nothing else may."""


class Page:
    """One page. ``asked``: every address that it requested; ``errors``: what its
    scripts threw, and errors that its console shows."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._held, self._count, self._session = b"", 0, ""
        self.asked: list[str] = []
        self.errors: list[str] = []
        made = self.call("Target.createTarget", url="about:blank")
        where = {"targetId": made["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **where)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._count += 1
        said: dict[str, object] = {
            "id": self._count,
            "method": method,
            "params": params,
        }
        if self._session:
            said["sessionId"] = self._session
        os.write(self._target, json.dumps(said).encode() + b"\0")
        while (message := self._read()).get("id") != self._count:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, url: str) -> None:
        """Go to an address, and return once it is there."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === '{url}' && document.readyState === 'complete'")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            assert select.select([self._source], [], [], 60)[0], "the browser is silent"
            self._held += os.read(self._source, 1 << 16)
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        said = message.get("method") == "Runtime.consoleAPICalled"
        if said and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        entry = params.get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry["level"] == "error":
            self.errors.append(json.dumps(entry))

    def evaluate(self, script: str) -> Any:  # noqa: ANN401
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Until ``script`` is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < until, f"never: {script}"
            time.sleep(0.05)

    def looks(self, width: int, height: int, dark: bool = False) -> None:
        """The window's size, and what the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def cut(self) -> list[str]:
        """Elements that reach beyond the window's sides, that hold more than they show,
        or whose text leaves its chart."""
        return json.loads(self.evaluate(CUT))

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browsing(folder: Path) -> Generator[Page]:
    """A page of a browser whose profile is in ``folder``."""
    assert CHROMIUM
    its_source, target = os.pipe()
    source, its_target = os.pipe()

    def wire() -> None:
        """Chromium reads from 3 and writes to 4."""
        spare = [os.dup(its_source), os.dup(its_target)]
        for place, end in zip((3, 4), spare, strict=True):
            os.dup2(end, place)

    process = subprocess.Popen(
        [CHROMIUM, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}"],
        preexec_fn=wire,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_source)
    os.close(its_target)
    try:
        yield Page(source, target)
    finally:
        process.kill()
        process.wait()
        os.close(source)
        os.close(target)
