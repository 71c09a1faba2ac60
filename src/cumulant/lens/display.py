"""`Examination` in a notebook: what it found in a sentence or two, and maps of layers and heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cumulant.lens.columns import COLUMNS
from cumulant.lens.report.findings import findings
from cumulant.lens.report.numbers import column
from cumulant.lens.report.page import ReportData
from cumulant.pages.cards import HUES, Markup, card, columns, facts, note
from cumulant.pages.charts import heat
from cumulant.pages.numbers import fact, number

if TYPE_CHECKING:
    from cumulant.lens.examination import Examination

__all__ = ["as_html"]

MAPS = ("entropy", "effective_keys", "sink_mass", "score_variance")
FACTS = ("type", "layers", "heads", "parameters")
SENTENCES = 3
CELLS = 20_000  # of one map; beyond them a table is no picture


def as_html(found: Examination) -> str:
    """The card. It reads the small tables only, never that of the tokens."""
    model, run = found.facts, found.run
    told = [(n, fact(model[n])) for n in FACTS if model.get(n) is not None]
    told += [(n, fact(run[n])) for n in ("inputs", "tokens") if run.get(n) is not None]
    heads: Any = found.tables.get("heads")
    kinds = dict.fromkeys(column(heads, "attention")) or {None: None}
    parts = [facts(told), _sentences(found)]
    for kind in kinds:
        maps = [_map(heads, name, kind, HUES[0]) for name in MAPS]
        parts.append(columns(*(x for x in maps if x is not None)))
    if heads is not None and len(heads):
        parts.append(
            note("Maps: layers down, heads across, counted from 0; stronger color, larger value.")
        )
    parts += [note(x) for x in found.notes[:SENTENCES]]
    tables = ", ".join(f".{n}()" for n in ("table", "heads", "layers"))
    parts.append(note(f"All numbers: {tables}; .report(path) writes the interactive page."))
    return card("Examination", str(model.get("name", "a model")), *parts)


def _sentences(found: Examination) -> Markup:
    data = ReportData(
        title=str(found.facts.get("name", "a model")),
        facts=found.facts,
        heads=found.tables.get("heads"),
        layers=found.tables.get("layers"),
        partition=found.tables.get("partition"),
        run=found.run,
    )
    return Markup("".join(note(f"{x.headline}. {x.sentence}") for x in findings(data)[:SENTENCES]))


def _map(heads: Any, name: str, kind: str | None, hue: str) -> tuple[str, Markup] | None:
    """One statistic as a map with its range for a title; None if there are no numbers."""
    rows: dict[int, dict[int, float]] = {}
    kinds = column(heads, "attention") or [None] * len(column(heads, "layer"))
    cells = zip(column(heads, "layer"), column(heads, "head"), column(heads, name), strict=False)
    for own, (layer, head, value) in zip(kinds, cells, strict=False):
        if own == kind and value is not None:
            rows.setdefault(int(layer), {})[int(head)] = float(value)
    values = [v for row in rows.values() for v in row.values()]
    if not values or len(values) > CELLS:
        return None
    width = 1 + max(h for row in rows.values() for h in row)
    grid = [[rows.get(i, {}).get(j, math.nan) for j in range(width)] for i in range(max(rows) + 1)]
    unit = COLUMNS[name].unit if name in COLUMNS else ""
    said = f"{name.replace('_', ' ')}, {number(min(values))} to {number(max(values))}"
    said += f" {unit}" if unit in ("nats",) else ""
    said += f" ({kind})" if kind is not None and kind != "self" else ""
    return said, heat(grid, f"map of {said}", hue=hue)
