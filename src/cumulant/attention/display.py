"""`Attended` in a notebook: statistics and small histograms of its fields."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cumulant.attention.held import Held
from cumulant.attention.source import FIELDS
from cumulant.core.eager import tracing
from cumulant.core.errors import InputError, UnknownFieldError
from cumulant.core.lazy import Mode
from cumulant.core.typed import tolist
from cumulant.pages.cards import Markup, card, facts, note, table
from cumulant.pages.charts import bars
from cumulant.pages.numbers import number

if TYPE_CHECKING:
    from cumulant.attention.attended import Attended

__all__ = ["as_html"]

PAIRS = 2**24  # of queries and keys: as many are computed in about a tenth of a second
ENTRIES = 2**18  # of a field that statistics are taken of
BINS = 24
SCALARS = ("log_normalizer", "entropy", "effective_keys", "score_max", "score_variance")
LABELS = {
    "mean": "output E[v], entries",
    "log_normalizer": "log-normalizer G",
    "key_mean": "mean key E[k], entries",
    "entropy": "entropy (nats)",
    "effective_keys": "effective keys",
    "score_mean": "mean score",
    "score_variance": "score variance",
    "value_variance": "variance of the values, entries",
    "score_max": "largest score",
    "score_max_key": "key of the largest score",
}


def as_html(a: Attended) -> str:
    """The card: fields that are there, and the scalar ones if they cost next to nothing.

    Nothing is computed that belongs to a transform, has no values, is large, or would wait for
    other ranks. What is computed is read without gradients and so is kept for that mode alone.
    """
    about, keys = repr(a).partition("(")[2].partition(";")[0], _keys(a)
    numbers = _eager(Mode.now()) and _eager(a._made) and not tracing()
    if not numbers or a._source.device.type == "meta":
        return card("Attended", about, note("Its fields have no values here."))
    with torch.no_grad():
        found, why = _fields(a, keys)
        rows = [_row(name, x) for name, x in found.items() if x.numel()]
    shape = tuple(a._source.shape)
    told: list[tuple[str, object]] = [("batch", shape[:-2] or "none"), ("queries", shape[-2])]
    told += [("keys", "not known" if keys is None else keys), ("features of values", shape[-1])]
    parts = [facts(told)]
    if rows:
        parts.append(table(["", "smallest", "median", "largest", "distribution"], rows))
    empty = int((found["log_normalizer"] == -math.inf).sum()) if "log_normalizer" in found else 0
    if empty:
        parts.append(note(f"{empty:,} of {math.prod(shape[:-1]):,} queries see no key."))
    missing = [name for name in (*FIELDS, "effective_keys") if name not in found]
    if missing:
        parts.append(note(f"{why}: {', '.join(missing)}."))
    return card("Attended", about, *parts)


def _eager(mode: Mode) -> bool:
    """Whether tensors made in this mode belong to no transform and no dual level."""
    return not mode.transforms and mode.dual_level < 0


def _keys(a: Attended) -> int | None:
    try:
        return a._source.keys
    except UnknownFieldError:
        return None


def _fields(a: Attended, keys: int | None) -> tuple[dict[str, Tensor], str]:
    """Fields by name, and why others are not among them."""
    source, found = a._source, dict[str, Tensor]()
    held = source.fields if isinstance(source, Held) else ()
    pairs = math.prod(source.shape[:-1]) * (keys or 0)
    why = "Not computed yet"
    if isinstance(source, Held):
        why = "Not known"
    elif source.over_ranks:
        why = "Not computed, since all ranks must ask together"
    elif pairs > PAIRS:
        why = f"Not computed yet, for {pairs:.1e} pairs take time"
    cheap = not isinstance(source, Held) and not source.over_ranks and pairs <= PAIRS
    for name in (*SCALARS, *(n for n in FIELDS if n not in SCALARS)):
        there = next((x for (n, mode), x in a._kept.items() if n == name and _eager(mode)), None)
        try:
            if there is not None:
                found[name] = there.detach()
            elif name in held or (cheap and name in SCALARS):
                found[name] = getattr(a, name).detach()
        except (InputError, UnknownFieldError):  # an input changed in place
            why = "Not computed before an input was changed in place"
    return found, why


def _row(name: str, x: Tensor) -> list[object]:
    flat = x.reshape(-1)
    flat = flat[:: math.ceil(flat.numel() / ENTRIES)].double().cpu()
    known = flat[flat.isfinite()]
    if not known.numel():
        return [LABELS[name], "–", "–", "–", ""]
    low, high = float(known.min()), float(known.max())
    middle = number(float(known.quantile(0.5)))
    return [LABELS[name], number(low), middle, number(high), _histogram(known, low, high, name)]


def _histogram(x: Tensor, low: float, high: float, name: str) -> Markup:
    if not high > low:
        return Markup("all equal")
    counts: list[float] = tolist(torch.histc(x, BINS, low, high))
    return bars(counts, f"histogram of {name} from {number(low)} to {number(high)}")
