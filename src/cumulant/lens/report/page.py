"""The page: one file that asks nothing of the network, made from the tables of an examination."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import Any, NamedTuple

from cumulant.errors import InputError
from cumulant.lens.report.definitions import HEADS, definitions
from cumulant.lens.report.findings import findings
from cumulant.lens.report.numbers import Frame, column, count, has, number
from cumulant.lens.report.payload import embedded, payload, shown_texts
from cumulant.lens.report.typeset import typeset

__all__ = ["ReportData", "Text", "render"]

# In this order they make one program.
SCRIPTS = ("base.js", "plot.js", "heads.js", "tokens.js", "charts.js")


class Text(NamedTuple):
    """A text of the token view; ``target`` is the decoder's side of an encoder-decoder model."""

    name: str
    tokens: list[str]
    target: list[str] = []  # noqa: RUF012 - never changed


@dataclass(frozen=True)
class ReportData:
    """What a report shows; a table that is None or empty leaves its sections out.

    ``texts[i]`` is input i of the tokens table; ``top[i][layer][head][token]`` lists up to five
    pairs (key, weight) of the largest weights, key -1 being the sink logit.
    """

    title: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokens: Frame | None = None
    heads: Frame | None = None
    layers: Frame | None = None
    expansions: Frame | None = None
    partition: Frame | None = None
    texts: Sequence[Any] = ()
    top: Any = ()
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        texts = [Text(str(t[0]), *([str(x) for x in part] for part in t[1:])) for t in self.texts]
        object.__setattr__(self, "texts", texts)


def render(data: ReportData) -> str:
    """The report as one self-contained HTML page.

    Args:
        data: the tables, texts and facts of an examination.

    Returns:
        HTML with its style, script and data inside; its content security policy lets it run its
        own script and nothing else, and load nothing.

    Raises:
        InputError: jinja2 is not installed.
    """
    try:
        jinja2 = import_module("jinja2")
    except ModuleNotFoundError:
        raise InputError("reports need jinja2: pip install 'cumulant[report]'.") from None
    trusted = import_module("markupsafe").Markup  # comes with jinja2
    folder = files("cumulant.lens.report")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(fact=_fact, typeset=typeset)
    template = environment.from_string((folder / "template.html").read_text(encoding="utf-8"))
    found = findings(data)
    page: str = template.render(
        title=data.title,
        facts=[(name, value) for name, value in _flat(data.facts) if value != data.title],
        run=_flat(data.run),
        notes=[*data.notes, *shown_texts(data)[1]],
        findings=found,
        captions={f.section: f.sentence for f in reversed(found)},
        definitions=definitions(_tables(data)),
        sections=_sections(data),
        scale=_scale(data),
        style=trusted((folder / "style.css").read_text(encoding="utf-8")),
        script=trusted(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=trusted(embedded(payload(data))),
    )
    # A file name may hold bytes that are no text; a page must be encodable all the same.
    return page.encode("utf-8", "replace").decode("utf-8")


def _sections(data: ReportData) -> list[str]:
    """The sections that have something to show, in the order of the page."""
    there = {
        "maps": has(data.heads, "layer", "head") and any(has(data.heads, s.column) for s in HEADS),
        "tokens": bool(shown_texts(data)[0]),
        "depth": has(data.expansions, "layer", "median"),
        "classes": has(data.heads, "class"),
        "energy": has(data.heads, "energy_change"),
        "shape": any(has(data.layers, c) for c in ("participation_ratio", "anisotropy")),
        "sensitivity": has(data.layers, "sensitivity_qk") or has(data.layers, "sensitivity_vo"),
        "partition": has(data.partition, "radius", "mean"),
        "link": has(data.heads, "link_linear") or has(data.heads, "link_trained"),
        "definitions": bool(definitions(_tables(data))),
        "run": bool(data.run),
    }
    return [name for name, shown in there.items() if shown]


def _tables(data: ReportData) -> dict[str, Frame | None]:
    names = ("tokens", "heads", "layers", "expansions", "partition")
    return {name: getattr(data, name) for name in names}


def _scale(data: ReportData) -> str:
    """How much was looked at: `72 heads in 6 layers, 130 tokens`."""
    parts: list[str] = []
    if has(data.heads, "layer"):
        layers = len(set(column(data.heads, "layer")))
        parts.append(
            f"{count(len(column(data.heads, 'layer')), 'head')} in {count(layers, 'layer')}"
        )
    # The run knows best: of many texts, the table of tokens has only the first.
    texts, tokens = data.run.get("texts"), data.run.get("tokens")
    if not (isinstance(texts, int) and isinstance(tokens, int)) and has(
        data.tokens, "input", "token"
    ):
        texts = int(data.tokens["input"].nunique())
        tokens = len(data.tokens[["input", "token"]].drop_duplicates())
    if isinstance(texts, int) and isinstance(tokens, int):
        parts.append(f"{count(tokens, 'token')} of {count(texts, 'text')}")
    return ", ".join(parts)


def _flat(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Facts in one level: `versions: {torch: 2}` becomes `versions torch: 2`."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        label = str(name).replace("_", " ")
        if isinstance(value, Mapping):
            rows += [(f"{label} {inner}", x) for inner, x in _flat(dict(value))]
        elif value is not None:
            rows.append((label, value))
    return rows


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(_fact(v) for v in value)
    return str(value)
