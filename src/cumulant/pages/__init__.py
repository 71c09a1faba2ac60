"""Shared code for HTML pages: single-file assembly, typeset mathematics, formatted numbers."""

from __future__ import annotations

from cumulant.pages.assembling import assemble, ready
from cumulant.pages.film import film_page
from cumulant.pages.formulas import mathml
from cumulant.pages.numbers import count, deviation, finite, number, share
from cumulant.pages.typeset import typeset

__all__ = [
    "assemble",
    "count",
    "deviation",
    "film_page",
    "finite",
    "mathml",
    "number",
    "ready",
    "share",
    "typeset",
]
