"""A browser without a window, spoken to over two pipes in the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--force-color-profile=srgb"),
    "--remote-debugging-pipe",
)
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
KEYS |= {"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "End": 35}

# The contrast ratio (WCAG 2) of an element's text or fill with what lies behind it.
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas'); canvas.width = canvas.height = 1;
  const pen = canvas.getContext('2d', { willReadFrequently: true });
  const rgb = (color, under) => {
    pen.clearRect(0, 0, 1, 1);
    if (under) { pen.fillStyle = under; pen.fillRect(0, 0, 1, 1); }
    pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => {
    const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = c.map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const behind = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const color = getComputedStyle(n).backgroundColor;
      if (!/, 0\\)$|transparent|\\/ 0\\)$/.test(color)) return color;
    }
    return 'white';
  };
  const found = [];
  for (const node of document.querySelectorAll('main *, header *, nav *')) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest('option, noscript, script')) continue;
    const style = getComputedStyle(node);
    const rect = node.ownerSVGElement && node.parentElement.querySelector(':scope > rect');
    const ground = rect ? getComputedStyle(rect).fill : behind(node);
    const ink = node.ownerSVGElement ? style.fill : style.color;
    const name = node.className.baseVal || node.className;
    found.push([ratio(rgb(ink, ground), rgb(ground)), node.textContent.trim().slice(0, 30), name]);
  }
  return found.filter(([r]) => r < 4.5).concat([[found.length, 'checked', '']]);
})()
"""


def find_browser() -> str:
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise AssertionError(
        f"the report is tested in a real browser, and none of {', '.join(NAMES)} is on the PATH: "
        "install chromium (Debian: apt-get install chromium)"
    )


class Browser:
    """One browser with one page; close it, or use it in a with statement."""

    def __init__(self) -> None:
        program = find_browser()
        self.profile = tempfile.mkdtemp(prefix="browser")
        command_read, self.commands = os.pipe()
        self.answers, answer_write = os.pipe()

        def descriptors() -> None:  # the protocol reads from 3 and writes to 4
            high = fcntl.fcntl(answer_write, fcntl.F_DUPFD, 10)
            os.dup2(command_read, 3)
            os.dup2(high, 4)

        self.process = subprocess.Popen(
            [program, *QUIET, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=descriptors,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self.buffer, self.number, self.session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = 0
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in (self.commands, self.answers):
            os.close(descriptor)
        try:
            self.process.wait(5)  # it ends itself when its pipe closes
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        return self._until(lambda m: m.get("id") == self.number, method)

    def _until(self, wanted: Any, what: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self.buffer:
                raw, self.buffer = self.buffer.split(b"\0", 1)
                message = json.loads(raw)
                self._note(message)
                if wanted(message):
                    assert "error" not in message, f"{what}: {message['error']}"
                    return message.get("result", message)
            left = end - time.monotonic()
            assert left > 0, f"the browser did not answer {what} in {seconds} s"
            if select.select([self.answers], [], [], left)[0]:
                part = os.read(self.answers, 1 << 20)
                assert part, f"the browser went away during {what}"
                self.buffer += part

    def _note(self, message: dict[str, Any]) -> None:
        method, p = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = p["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value")) for a in p["args"]))
        elif method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.errors.append(p["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(p["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded += 1

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The page, loaded and settled; errors and requests are counted from here."""
        self.errors.clear()
        self.requests.clear()
        self.viewport(width, height)
        self.media(dark=dark)
        before = self.loaded
        self.call("Page.navigate", url=path.resolve().as_uri())
        if self.loaded == before:
            self._until(lambda m: m.get("method") == "Page.loadEventFired", f"loading {path}")
        self.settle()

    def settle(self) -> None:
        """Two frames later: layout, observers and redraws are done."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def viewport(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )

    def media(self, *, dark: bool = False, kind: str = "") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[scheme, still])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def place(self, script: str) -> tuple[float, float]:
        """The middle of an element on the screen, scrolled to if need be."""
        return tuple(
            self.run(
                f"(() => {{ const e = {script}; e.scrollIntoView({{block: 'center'}});"
                " const b = e.getBoundingClientRect();"
                " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
            )
        )

    def hover(self, script: str) -> None:
        x, y = self.place(script)
        self.settle()
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, script: str) -> None:
        x, y = self.place(script)
        self.settle()
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            rest = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **rest)
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)
        self.settle()

    def choose(self, identity: str, value: str) -> None:
        """A choice from a select element."""
        self.run(
            f"(() => {{ const s = document.getElementById('{identity}'); s.value = '{value}';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            picture = self.call(
                "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
            )
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def pdf(self) -> bytes:
        printed = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=False)
        return base64.b64decode(printed["data"])


def keep(browser: Browser, tmp_path: Path, name: str, *, whole: bool = True) -> None:
    picture = browser.screenshot(tmp_path / f"{name}.png", whole=whole)
    assert picture.stat().st_size > 5000
    if folder := os.environ.get("CUMULANT_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, folder)


def serious(browser: Browser) -> list[list[str]]:
    """What axe finds wrong with the page as it is that would stop somebody: rule and element."""
    axe = files("axe_playwright_python") / "axe.min.js"
    browser.run(axe.read_text(encoding="utf-8") + ";0")
    return browser.run(
        "axe.run(document, { resultTypes: ['violations'] }).then(r => r.violations"
        ".filter(v => ['serious', 'critical'].includes(v.impact))"
        ".flatMap(v => v.nodes.map(n => [v.id, n.html.slice(0, 200)])))"
    )
