"""Texts of the documentation that the page shows, and where the files it names stand."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from urllib.parse import quote

import cumulant
from cumulant.pages.markdown import sections

__all__ = ["Links", "derivations", "document", "read"]

_PACKAGE = Path(cumulant.__file__).resolve().parent
# A checkout has the documentation beside the sources; a wheel carries a copy of what is shown here
# (hatch_build.py).
COPY = _PACKAGE / "lab" / "report" / "docs"
CHECKOUT = _PACKAGE.parents[1] if _PACKAGE.parent.name == "src" else None


def document(name: str) -> Path | None:
    """A file of ``docs/`` by its path from there; None if this installation lacks it."""
    folders = (COPY,) if CHECKOUT is None else (CHECKOUT / "docs", COPY)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def read(name: str) -> str:
    """The text of a page of the documentation; "" if this installation lacks it."""
    path = document(name)
    return path.read_text(encoding="utf-8") if path is not None else ""


def derivations() -> dict[str, str]:
    """What the theory says of each statement, by its number; files of tests are named elsewhere."""
    return _derivations(read("theory.md"))


@cache
def _derivations(theory: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for heading, body in sections(theory).items():
        if number := re.match(r"T\d+[a-z]?\b", heading):
            found[number[0]] = re.sub(r"\n\nLaw: .*\Z", "", body, flags=re.DOTALL)
    return found


class Links:
    """Addresses of a page in a folder: claims lead within the page, files to the checkout.

    Args:
        claims: ids of the claims that the page has.
        folder: where the page will be; without it only claims have addresses.
    """

    def __init__(self, claims: Iterable[str], folder: Path | None = None) -> None:
        self._claims = {name.lower(): name for name in claims}
        self._folder = folder.resolve() if folder is not None else None

    def file(self, path: str) -> str | None:
        """The address of a file by its path from the root of the repository, if it is there."""
        plain, _, anchor = path.partition("#")
        if self._folder is None or CHECKOUT is None or not (CHECKOUT / plain).is_file():
            return None
        try:
            way = Path(os.path.relpath(CHECKOUT / plain, self._folder)).as_posix()
        except ValueError:  # another drive
            return None
        return quote(way) + (f"#{anchor}" if anchor else "")

    def __call__(self, address: str) -> str | None:
        """The address of a link in a text of ``docs/``."""
        if address.startswith(("https://", "http://")):
            return address
        page, _, anchor = address.partition("#")
        if page.rpartition("/")[2] in ("", "ledger.md", "theory.md") and anchor:
            # The theory has T34 as one, where the ledger may judge its halves.
            named = sorted(x for x in self._claims if re.fullmatch(re.escape(anchor) + "[ab]?", x))
            return f"#{quote(self._claims[named[0]])}" if named else None
        return self.file(f"docs/{page}")
