"""Debian's Chromium without a screen, spoken to by its own protocol over a pipe: what a page looks like to a reader."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

CHROMIUM = shutil.which("chromium")
WIDTHS, SCHEMES = (390, 1200), ("light", "dark")
#: Contrast that WCAG 2.2 (1.4.3, AA) asks of text.
_LEAST_CONTRAST = 4.5
#: Text whose contrast with the first ground behind it is too low, and boxes that reach past the window's right edge
#: without a box around them that scrolls.
_LOOK = """(least => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c[3] > 0) return c; } return rgb('white'); };
  const pale = [], wide = [];
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || style.visibility === 'hidden') continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (own) {
      const ink = rgb(e.namespaceURI.endsWith('svg') ? style.fill : style.color);
      const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x);
      if ((a + 0.05) / (b + 0.05) < least) pale.push(e.tagName + ': ' + e.textContent.trim().slice(0, 40));
    }
    let scrolls = false;
    for (let p = e; p; p = p.parentElement) scrolls ||= ['auto', 'scroll'].includes(getComputedStyle(p).overflowX);
    if (!scrolls && box.right > innerWidth + 1) wide.push(e.tagName + ': ' + Math.round(box.right));
  }
  if (document.documentElement.scrollWidth > innerWidth) wide.push('page: ' + document.documentElement.scrollWidth);
  return {pale, wide};
})"""


class Seen(NamedTuple):
    """A page at one width in one scheme: what is wrong with it, and its text. errors: of the console."""

    errors: list[str]
    pale: list[str]
    wide: list[str]
    text: str


class Browser:
    """One page, at addresses of this machine. Not for several threads."""

    def __init__(self, profile: Path) -> None:
        ours, theirs, told, tells = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (*os.pipe(), *os.pipe()))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = [str(CHROMIUM), *options, "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(  # it reads at 3 and writes at 4
            ["bash", "-c", f'exec "$0" "$@" 3<&{ours} 4>&{tells}', *command],
            pass_fds=(ours, tells), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours)
        os.close(tells)
        self._to, self._from = os.fdopen(theirs, "wb"), os.fdopen(told, "rb")
        self._number, self._events, self._rest, self._pictures = 0, list[dict[str, Any]](), b"", 0
        targets = self._ask("Target.getTargets", session=None)["targetInfos"]
        (page,) = (t["targetId"] for t in targets if t["type"] == "page")
        self._session = self._ask("Target.attachToTarget", session=None, targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def close(self) -> None:
        self._to.close()
        self._from.close()
        self._process.terminate()
        self._process.wait(20)

    def look(self, address: str, width: int, scheme: str, until: str = "true") -> Seen:
        """The page once the expression `until` holds there, ten seconds at most. SECURE_FVI_PICTURES names a folder
        that is to have a picture of each."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=media)
        self._ask("Page.navigate", url="about:blank")
        self._events.clear()
        self._ask("Page.navigate", url=address)
        last = time.monotonic() + 10
        while not self.says(f"document.readyState === 'complete' && ({until})"):
            assert time.monotonic() < last, self.says("document.body.innerText")
            time.sleep(0.02)
        found = self.says(f"{_LOOK}({_LEAST_CONTRAST})")
        if folder := os.environ.get("SECURE_FVI_PICTURES"):
            self._pictures += 1
            shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            Path(folder, f"{self._pictures:03}-{width}-{scheme}.png").write_bytes(base64.b64decode(shot))
        return Seen(self._errors(), found["pale"], found["wide"], self.says("document.body.innerText"))

    def says(self, expression: str) -> Any:
        """What a JavaScript expression comes to in the page."""
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _errors(self) -> list[str]:
        found = []
        for event in self._events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
                found.append(str(event["params"]["args"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(event["params"]["entry"]["text"])
        return found

    def _ask(self, method: str, session: str | None = "", **asked: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": asked}
        if session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            if "method" in told:
                self._events.append(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._from.read1(1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told
