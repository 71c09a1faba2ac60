"""Photograph a written page: ``python docs/figures/page_shots.py PAGE.html PICTURE.png``.

Needs the development packages and chromium.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]


def main() -> None:
    """Open the page as asked for, and write the picture."""
    options = argparse.ArgumentParser(description="Photograph a written page.")
    options.add_argument("page", type=Path)
    options.add_argument("picture", type=Path)
    options.add_argument("--from", dest="heading", help="Begin at the heading with these words.")
    options.add_argument("--width", type=int, default=1280)
    options.add_argument("--height", type=int, default=900)
    given = options.parse_args()
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        size = {"width": given.width, "height": given.height}
        page = browser.new_page(viewport=size)
        page.goto(given.page.resolve().as_uri())
        bars = "document.querySelectorAll('nav').forEach(x => { x.style.position = 'static' })"
        page.evaluate(bars)  # a bar that stays on top would hide the heading
        if given.heading:
            heading = page.get_by_role("heading", name=given.heading).first
            heading.evaluate("x => scrollTo(0, x.getBoundingClientRect().top + scrollY - 12)")
        page.wait_for_timeout(500)
        page.screenshot(path=str(given.picture))
        browser.close()


if __name__ == "__main__":
    main()
