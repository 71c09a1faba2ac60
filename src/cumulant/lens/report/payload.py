"""What the page's script reads: the tables as columns, the shown texts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cumulant.lens.columns import COLUMNS
from cumulant.lens.pairs import Pairs
from cumulant.lens.report.definitions import HEADS, SUBLAYERS, TOKENS, Shown
from cumulant.lens.report.numbers import Frame, column, has, shortened, shortened_all
from cumulant.pages import typeset

if TYPE_CHECKING:
    from cumulant.lens.report.page import ReportData, Text

__all__ = ["MOST_TEXTS", "MOST_TOKENS", "payload", "shown_texts"]

MOST_TEXTS, MOST_TOKENS = 3, 512
# Rows (layer, head, token) of the token view: at some 130 bytes each, about 10 MB of HTML.
MOST_ROWS = 80_000
FEWEST_TOKENS = 64


def payload(data: ReportData) -> dict[str, Any]:
    """Everything the charts draw, in plain lists and numbers of few digits."""
    texts, _ = shown_texts(data)
    return {
        "statistics": {
            "heads": [_described(s) for s in HEADS if has(data.heads, s.column)],
            "tokens": [_described(s) for s in TOKENS if texts and has(data.tokens, s.column)],
        },
        "sublayers": [list(pair) for pair in SUBLAYERS],
        "heads": _table(data.heads),
        "layers": _table(data.layers),
        "expansions": _table(data.expansions),
        "partition": _table(data.partition),
        "pictures": [dict(data.pictures[i]) for i, _ in texts if i < len(data.pictures)],
        "texts": [_text(data, data.tokens, i, text) for i, text in texts],
    }


def shown_texts(data: ReportData) -> tuple[list[tuple[int, Text]], list[str]]:
    """The texts (input, text) the token view can afford to show, and what to say of the rest."""
    if not has(data.tokens, "layer", "head", "token", "input"):
        return [], []
    if not any(has(data.tokens, s.column) for s in TOKENS):
        return [], []
    known = set(data.tokens["input"].unique().tolist())
    examined = [(i, text) for i, text in enumerate(data.texts) if i in known and text.tokens]
    if not examined:
        return [], []
    calls = len(data.tokens[["layer", "head"]].drop_duplicates())
    texts = examined[:MOST_TEXTS]
    affordable = MOST_ROWS // calls
    while len(texts) > 1 and affordable // len(texts) < FEWEST_TOKENS:
        texts.pop()
    limit = max(FEWEST_TOKENS, min(MOST_TOKENS, affordable // len(texts)))
    notes: list[str] = []
    if len(texts) < len(data.texts):
        notes.append(f"The token view shows {len(texts)} of {len(data.texts)} texts.")
    cut = [t.name for _, t in texts if max(len(t.tokens), len(t.target)) > limit]
    if cut:
        notes.append(f"The token view shows the first {limit} tokens of {', '.join(cut)}.")
    short = [(i, t._replace(tokens=t.tokens[:limit], target=t.target[:limit])) for i, t in texts]
    return short, notes


def _described(statistic: Shown) -> dict[str, Any]:
    known = COLUMNS.get(statistic.column)
    return {
        **{"column": statistic.column, "label": statistic.label, "kind": statistic.kind},
        "definition": [list(piece) for piece in typeset(known.definition)] if known else [],
    }


def _table(frame: Frame | None) -> dict[str, list[Any]] | None:
    if frame is None or frame.empty:
        return None
    names = [str(name) for name in frame.columns if has(frame, name)]
    return {name: [shortened(cell) for cell in column(frame, name)] for name in names}


def _text(data: ReportData, tokens: Frame, index: int, text: Text) -> dict[str, Any]:
    """One text: its tokens and, for each layer, statistics (head, token) and largest weights."""
    rows = tokens[tokens["input"] == index]
    # A cross-attention layer and a decoder's own have as many queries as the target has tokens.
    limit = max(len(text.tokens), len(text.target))
    rows = rows[rows["token"] < limit]
    modules = _modules(data.heads)
    calls: dict[str, Any] = {}
    for layer, part in rows.groupby("layer"):
        number = int(str(layer))
        cross = str(part["attention"].iloc[0]) == "cross" if "attention" in part else False
        decoder = bool(text.target) and (cross or "decoder" in modules.get(number, ""))
        size = int(part["token"].max()) + 1
        heads = sorted({int(h) for h in part["head"].tolist()})
        calls[str(number)] = {
            "heads": heads,
            "queries": "target" if decoder else "tokens" if not cross else "numbers",
            "keys": "target" if decoder and not cross else "tokens",
            "size": size,
            "statistics": {
                s.column: _grid(part, s.column, heads, size)
                for s in (*TOKENS, Shown("visible", "Visible keys", "number"))
                if has(part, s.column)
            },
            "top": [_top(data.top, index, number, h, size) for h in heads],
        }
    return {"name": text.name, "tokens": text.tokens, "target": text.target, "calls": calls}


def _modules(heads: Frame | None) -> dict[int, str]:
    if not has(heads, "layer", "module"):
        return {}
    pairs = zip(column(heads, "layer"), column(heads, "module"), strict=True)
    return {int(layer): str(module) for layer, module in pairs}


def _grid(part: Frame, name: str, heads: Sequence[int], size: int) -> list[list[Any]]:
    """The column as rows of heads, None where a token has no value."""
    grid = np.full((len(heads), size), np.nan)
    numbers: NDArray[Any] = part["head"].to_numpy()
    places = np.searchsorted(heads, numbers)
    grid[places, part["token"].to_numpy()] = part[name].to_numpy(dtype=float, na_value=np.nan)
    return shortened_all(grid, 4)


def _top(top: Any, text: int, layer: int, head: int, size: int) -> list[list[Any]]:
    """Key, weight, key, weight, ... of each token; nothing where the examination kept nothing."""
    rows: Sequence[Sequence[tuple[Any, Any]]]
    try:
        known = top[text][layer]
        if isinstance(known, Pairs):
            flat = known.flat(head, size, decimals=4)
        else:
            rows = known[head][:size]
            flat = [[x for j, w in row for x in (int(j), round(float(w), 4))] for row in rows]
    except (IndexError, KeyError, TypeError):
        flat = []
    return flat + [[]] * (size - len(flat))
