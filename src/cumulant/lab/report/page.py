"""The report: every result of the library, in one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cumulant.core.describing import described_fields
from cumulant.lab.claims.claim import EVIDENCE
from cumulant.lab.report.answers import PAGE as ANSWERS
from cumulant.lab.report.answers import answers
from cumulant.lab.report.documents import Links
from cumulant.lab.report.entries import KINDS, Kind, Shown, shown
from cumulant.lens.report import ReportData, findings
from cumulant.lens.report import page as lens
from cumulant.lens.report.numbers import shortened
from cumulant.lens.report.payload import payload, shown_texts
from cumulant.pages import assemble, count, finite, mathml, number
from cumulant.pages.numbers import flat

__all__ = ["Parts", "render"]

PACKAGES = (*lens.PACKAGES, "cumulant.lab.report")
BASE = ("base.js", "plot.js")
SCRIPTS = ("query.js", "cloud.js", "ledger.js", "series.js", "benchmarks.js")
# Of the lens' sections these; the others are in its own report.
LENS_SECTIONS = ("maps", "tokens", "depth")

FORMULAS = (
    (
        "The log-normalizer",
        r"G(q) = \log \sum_j e^{\langle k_j,\, q\rangle}",
        "The logarithm of the total mass after the tilt. The panel draws its contours.",
    ),
    (
        "Its gradient",
        r"\nabla G(q) = \sum_j p_j\, k_j = \operatorname{E}[k]",
        "The mean under the tilt: the attention output, with the keys as values.",
    ),
    (
        "Its Hessian",
        r"\nabla^2 G(q) = \operatorname{Cov}[k]",
        "The covariance under the tilt: how far the output moves when the query moves.",
    ),
)


@dataclass(frozen=True)
class Parts:
    """What the report shows; what is None or empty leaves its section out.

    Attributes:
        ledger: ``version``, ``seed``, ``quick`` and ``claims``, the rows of `claims.Entry`.
        figures: SVG that matplotlib wrote in house style, by the id of the claim.
        lens: an examination of a model.
        series: a filtered series: ``title``, ``source``, ``dates``, ``observed``, ``mean``,
            ``low``, ``high``, ``modes``, ``probabilities`` (for each mode, over time),
            ``log_likelihood`` and ``sentences``.
        benchmarks: ``machine``, ``busy`` (what disturbed the measurements, in words), and ``rows``,
            those of `bench.Row` with the name of their ``bench`` and the ``recorded`` ratio.
        run: facts about how all this was made.
        notes: what could not be made, and why.
    """

    ledger: Mapping[str, Any]
    figures: Mapping[str, str] = field(default_factory=dict[str, str])
    lens: ReportData | None = None
    series: Mapping[str, Any] | None = None
    benchmarks: Mapping[str, Any] | None = None
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Sequence[str] = ()

    __repr__ = described_fields


def render(parts: Parts, folder: Path | None = None) -> str:
    """The report as one self-contained HTML page.

    Args:
        parts: ledger, pictures, and whatever else there is.
        folder: where the page will be, for links to the files of experiments and tests; without it
            they are named only.

    Returns:
        HTML with its style, scripts and data inside; its content security policy lets it run its
        own script and nothing else, and load nothing.

    Raises:
        InputError: jinja2 or latex2mathml is not installed, or a picture is no SVG.
    """
    rows = [dict(row) for row in parts.ledger.get("claims", ())]
    series = parts.series if parts.series and parts.series["dates"] else None
    links = Links((str(row["id"]) for row in rows), folder)
    entries = [shown(row, parts.figures.get(str(row["id"])), links) for row in rows]
    benchmarks = (parts.benchmarks or {}).get("rows", ())
    busy = str((parts.benchmarks or {}).get("busy", ""))
    data: dict[str, Any] = {
        "series": series and _series(series),
        "benchmarks": [{k: shortened(v) for k, v in row.items()} for row in benchmarks],
    }
    common = BASE
    if parts.lens is not None:
        data, common = data | payload(parts.lens), lens.SCRIPTS
    values = {
        "version": parts.ledger.get("version", ""),
        "formulas": [(title, mathml(tex), says) for title, tex, says in FORMULAS],
        "entries": entries,
        "kinds": _kinds(entries),
        "evidence": _evidence(entries),
        "slips": [(e.id, slip) for e in entries for slip in e.slips],
        "tally": ", ".join(kind.counted(amount) for kind, amount in _kinds(entries)),
        "departures": [e.id for e in entries if e.departs],
        "answers": answers(links) if rows else [],
        "answers_file": links.file(f"docs/{ANSWERS}"),
        "theory_file": links.file("docs/theory.md"),
        "lens": _lens(parts.lens),
        "series": series,
        "log_likelihood": number(series["log_likelihood"], 6) if series else "",
        "benchmarks": _grouped(benchmarks),
        "machine": (parts.benchmarks or {}).get("machine", ""),
        "busy": busy,
        "cost": _cost(benchmarks, bool(busy)),
        "run": flat(parts.run),
        "notes": list(parts.notes),
    }
    return assemble(PACKAGES, scripts=(*common, *SCRIPTS), data=data, values=values)


def _kinds(entries: Sequence[Shown]) -> list[tuple[Kind, int]]:
    """The verdicts there are, and how many entries have them."""
    amounts = {kind: sum(e.kind is kind for e in entries) for kind in KINDS}
    return [(kind, amount) for kind, amount in amounts.items() if amount]


def _evidence(entries: Sequence[Shown]) -> list[tuple[str, str, int]]:
    """The kinds of evidence there are: name, what it means, how many entries rest on it."""
    amounts = Counter(e.evidence for e in entries)
    return [(name, says, amounts[name]) for name, says in EVIDENCE.items() if amounts[name]]


def _lens(data: ReportData | None) -> dict[str, Any] | None:
    if data is None:
        return None
    found = findings(data)
    telling = [f for f in found if f.section == "depth"] + found
    return {
        "title": data.title,
        "takeaway": f"{telling[0].headline}." if found else "There is nothing to report.",
        "scale": lens.scale(data),
        "findings": found,
        "captions": lens.captions(found),
        "sections": [name for name in lens.sections(data) if name in LENS_SECTIONS],
        "notes": [*data.notes, *shown_texts(data)[1]],
    }


def _series(series: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the chart draws."""
    columns = ("observed", "mean", "low", "high")
    return {
        "dates": [str(date) for date in series["dates"]],
        "modes": [str(mode) for mode in series["modes"]],
        "probabilities": [[shortened(p, 4) for p in row] for row in series["probabilities"]],
        **{name: [shortened(x) for x in series[name]] for name in columns},
    }


def _grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, str]]]]:
    """The table of ratios, bench after bench, in words."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        words = {name: str(row[name]) for name in ("shape", "quantity", "against")}
        amounts = {name: f"{number(row[name])} {row['unit']}" for name in ("amount", "baseline")}
        ratios = {name: number(row[name]) for name in ("ratio", "recorded")}
        cells = {**words, **amounts, **ratios}
        groups.setdefault(str(row["bench"]), []).append(cells)
    return list(groups.items())


def _cost(rows: Sequence[Mapping[str, Any]], busy: bool) -> str:
    """What the ratios say, in a sentence; on a busy machine, that they say little."""
    ratios = [float(row["ratio"]) for row in rows if finite(row["ratio"])]
    if not ratios:
        return ""
    less = sum(ratio < 1 for ratio in ratios)
    if busy:
        return (
            "The machine was busy, so this run says little about speed; the recorded ratios stand "
            "beside it."
        )
    return (
        f"In {less} of {count(len(ratios), 'comparison')} the library takes less than the "
        "alternative."
    )
