"""Anchors of headings: GitHub's, and the number alone for a section of the theory."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def slug(heading: str) -> str:
    """What follows the # in a link between pages: "T14. Expansion" answers to t14."""
    if number := re.match(r"T\d+[a-z]?\b", heading):
        return number[0].lower()
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def name_sections(app: Sphinx, document: nodes.document) -> None:
    """The same anchor in the page itself, for links from outside."""
    for section in document.findall(nodes.section):
        anchor = section.get("slug", "")
        if re.fullmatch(r"t\d+[a-z]?", anchor) and anchor not in section["ids"]:
            section["ids"].append(anchor)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("doctree-read", name_sections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
