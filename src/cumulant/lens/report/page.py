"""The page: one file that asks nothing of the network, made from the tables of an examination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cumulant.core.describing import described_fields
from cumulant.lens.report.definitions import HEADS, definitions
from cumulant.lens.report.findings import Finding, findings
from cumulant.lens.report.numbers import Frame, column, has
from cumulant.lens.report.payload import payload, shown_texts
from cumulant.pages import assemble, count
from cumulant.pages.numbers import flat

__all__ = ["PACKAGES", "SCRIPTS", "ReportData", "Text", "captions", "render", "scale", "sections"]

PACKAGES = ("cumulant.pages", "cumulant.lens.report")
SCRIPTS = ("base.js", "plot.js", "heads.js", "pictures.js", "tokens.js", "charts.js")


class Text(NamedTuple):
    """A text of the token view; ``target`` is the decoder's side of an encoder-decoder model."""

    name: str
    tokens: list[str]
    target: list[str] = []  # noqa: RUF012 - never changed

    __repr__ = described_fields


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
    pictures: Sequence[Mapping[str, Any]] = ()
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Sequence[str] = ()

    __repr__ = described_fields

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
    found = findings(data)
    values = {
        "title": data.title,
        "facts": [(name, value) for name, value in flat(data.facts) if value != data.title],
        "run": flat(data.run),
        "notes": [*data.notes, *shown_texts(data)[1]],
        "findings": found,
        "captions": captions(found),
        "definitions": definitions(_tables(data)),
        "sections": sections(data),
        "scale": scale(data),
    }
    return assemble(PACKAGES, scripts=SCRIPTS, data=payload(data), values=values)


def captions(found: Sequence[Finding]) -> dict[str, str]:
    """What the figures of each section show, as far as it was found."""
    return {f.section: f.sentence for f in reversed(found)}


def sections(data: ReportData) -> list[str]:
    """The sections that have something to show, in the order of the page."""
    there = {
        "maps": has(data.heads, "layer", "head") and any(has(data.heads, s.column) for s in HEADS),
        "pictures": bool(data.pictures) and bool(shown_texts(data)[0]),
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


def scale(data: ReportData) -> str:
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
        noun = "image" if data.pictures else "text"
        parts.append(f"{count(tokens, 'token')} of {count(texts, noun)}")
    return ", ".join(parts)
