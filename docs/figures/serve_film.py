"""Film the web application: ``python docs/figures/serve_film.py`` writes serve.png and serve.gif.

Needs the development packages and chromium.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
TEXT = "The trophy does not fit in the suitcase because it is too big."


class Film:
    """Frames of a page, each with how long it is shown."""

    def __init__(self, page: Page) -> None:
        self.page, self.frames, self.times = page, [], []

    def shoot(self, seconds: float) -> None:
        picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        self.frames.append(picture.resize((800, round(800 * picture.height / picture.width))))
        self.times.append(int(1000 * seconds))

    def settled(self, seconds: float) -> None:
        self.page.wait_for_timeout(400)
        self.page.wait_for_selector("body:not([data-busy])")
        self.shoot(seconds)

    def write(self, path: Path) -> None:
        small = [x.quantize(96, dither=Image.Dither.NONE) for x in self.frames]
        more = {"append_images": small[1:], "duration": self.times, "loop": 0, "optimize": True}
        small[0].save(path, save_all=True, **more)


def play(page: Page) -> Film:
    """Use the application, frame by frame."""
    film = Film(page)
    page.fill("#text-a", "The trophy")
    film.settled(0.7)
    for end in (24, 41, len(TEXT)):
        page.fill("#text-a", TEXT[:end])
        film.settled(0.5)
    page.locator(".token").nth(10).click()
    film.settled(1.2)
    for name in ("received", "class", "entropy"):
        page.select_option("#statistic", name)
        film.settled(0.9)
    for layer, head in ((1, 3), (3, 7)):
        page.locator('[data-plot="map"] .cell').nth(12 * layer + head).click()
        film.settled(1.0)
    page.mouse.move(5, 5)
    page.locator("#head").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('head').scrollIntoView()")
    film.settled(2.0)
    page.evaluate("document.getElementById('change').scrollIntoView()")
    film.settled(0.8)
    for kind in ("uniform", "skip"):
        page.click(f"[data-change={kind}]")
        page.mouse.move(5, 5)
        film.settled(1.6)
    page.evaluate("document.getElementById('tangent').scrollIntoView()")
    page.fill("#toward", "car")
    page.press("#toward", "Enter")
    page.wait_for_selector('[data-plot="tangent"] svg')
    page.evaluate("document.getElementById('tangent').scrollIntoView()")
    film.settled(2.4)
    return film


def main() -> None:
    """Serve, film, write."""
    command = [sys.executable, "-m", "cumulant", "serve", "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().strip()
        if not re.match("http://127", address):
            raise SystemExit("the server did not start")
        with sync_playwright() as runner:
            browser = runner.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
            page = browser.new_page(viewport={"width": 1000, "height": 860})
            page.set_default_timeout(120_000)
            page.goto(address)
            page.wait_for_selector("body[data-ready]")
            film = play(page)
            film.write(FOLDER / "serve.gif")
            film.frames[9].save(FOLDER / "serve.png", optimize=True)
            browser.close()
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
