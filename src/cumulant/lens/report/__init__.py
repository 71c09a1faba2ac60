"""One HTML file that shows what a model's attention did: maps, tokens, depth, and what it means."""

from __future__ import annotations

from cumulant.lens.report.findings import Finding, findings
from cumulant.lens.report.page import ReportData, Text, render

__all__ = ["Finding", "ReportData", "Text", "findings", "render"]
