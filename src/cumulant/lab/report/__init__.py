"""One HTML page that shows the library: claims with verdicts, panels, a model, a series, ratios."""

from __future__ import annotations

from cumulant.lab.report.gathering import LOCK, finish, gather
from cumulant.lab.report.page import Parts, render

__all__ = ["LOCK", "Parts", "finish", "gather", "render"]
