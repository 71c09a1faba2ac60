"""What changed between two examinations, against what chance alone would change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cumulant.lens.files import part_name, read_table
from cumulant.lens.patterns import PATTERNS
from cumulant.lens.tables import pandas

if TYPE_CHECKING:
    from cumulant.lens.examination import Examination

__all__ = ["chance"]

# Means over tokens, so that they can be taken over parts of the texts.
MEANS = (
    *("entropy", "effective_keys", "log_normalizer", "score_variance", "self_mass", "sink_mass"),
    *PATTERNS,
)
DRAWS = 999
# With fewer texts than this, each is cut into so many pieces.
TEXTS, PIECES = 8, 8
_WHERE = ["layer", "head"]


def chance(first: Examination, second: Examination, *, seed: int = 0) -> Any:
    """A table with `noise` and `p` by (layer, head, statistic); empty where there is no null.

    The units are texts, or eighths of texts if there are few. If both examinations read the same
    texts (two models, two checkpoints), a unit's change has a random sign under the null; otherwise
    the units of both are shuffled. `noise` is the 95 % quantile of the absolute change. `p` is that
    of the largest change among all heads and statistics, in units of its deviation, so that the
    best of many does not pass for a finding: where nothing changed, one comparison in twenty has
    any p below 0.05.
    """
    if not (_tokens(first) and _tokens(second)):
        return pandas().DataFrame({"statistic": [], "layer": [], "head": [], "noise": [], "p": []})
    names = [n for n in MEANS if _has(first, n) and _has(second, n)]
    # Names alone do not tell texts apart: those without one are numbered.
    same = _texts(first) == _texts(second) and first.shown == second.shown
    pieces = 1 if min(len(_texts(x)) for x in (first, second)) >= TEXTS else PIECES
    units = [_units(x, names, pieces) for x in (first, second)]
    a, b = (x.to_numpy(dtype=float) for x in units)
    generator = np.random.default_rng(seed)
    if same and a.shape == b.shape and (units[0].index == units[1].index).all():
        observed, drawn = _signs(b - a, generator)
    else:
        observed, drawn = _shuffles(a, b, generator)
    deviation = drawn.std(0)
    scale = np.where(deviation > 0, deviation, np.inf)
    size, sizes = np.abs(observed) / scale, np.abs(drawn) / scale
    columns = units[0].columns
    largest = sizes.max(1)
    p = (1 + (largest[:, None] >= size).sum(0)) / (1 + len(largest))
    noise = np.quantile(np.abs(drawn), 0.95, axis=0)
    table = pandas().DataFrame({"noise": noise, "p": p}, index=columns)
    table.index.names = ["statistic", *_WHERE]
    return table[np.isfinite(observed)].reset_index()


def _tokens(examination: Examination) -> bool:
    """Whether there is a table of tokens, and one of inputs."""
    kept = "tokens" in examination.tables
    if not kept and examination.folder is not None:
        kept = (examination.folder / "tokens.parquet" / part_name(0)).exists()
    return kept and len(examination.inputs()) > 0


def _has(examination: Examination, name: str) -> bool:
    return name in set(examination.heads().columns)


def _texts(examination: Examination) -> list[tuple[str, int]]:
    inputs: Any = examination.inputs()
    return list(zip(inputs["text"].tolist(), inputs["tokens"].tolist(), strict=True))


def _parts(examination: Examination) -> Iterator[Any]:
    """The table of tokens, some inputs at a time."""
    if "tokens" in examination.tables or examination.folder is None:
        yield examination.table()
        return
    for part in range(examination.parts or 0):
        yield read_table(examination.folder / "tokens.parquet" / part_name(part))


def _units(examination: Examination, names: list[str], pieces: int) -> Any:
    """Means of every unit (rows: input, piece) for every statistic and head (columns)."""
    found: list[Any] = []
    for table in _parts(examination):
        length = 1 + table.groupby(["input", "layer"])["token"].transform("max")
        piece = table["token"] * pieces // length
        keys = [table["input"], piece.rename("piece"), table["layer"], table["head"]]
        found.append(table[names].astype("Float64").groupby(keys).mean())
    return pandas().concat(found).unstack(_WHERE)


def _signs(change: NDArray[Any], generator: np.random.Generator) -> tuple[Any, Any]:
    """The mean change of the units, and the same with random signs."""
    there = np.isfinite(change)
    count = np.where(there.any(0), there.sum(0), np.nan)
    change = np.where(there, change, 0.0)
    signs = generator.choice([-1.0, 1.0], (DRAWS, len(change)))
    return change.sum(0) / count, signs @ change / count


def _shuffles(a: NDArray[Any], b: NDArray[Any], generator: np.random.Generator) -> tuple[Any, Any]:
    """The difference of the means of two sets of units, and of random sets as large."""
    both = np.concatenate([a, b])
    there = np.isfinite(both).astype(float)
    values = np.where(there > 0, both, 0.0)
    second = np.zeros((1 + DRAWS, len(both)))
    second[0, len(a) :] = 1
    for row in second[1:]:
        row[generator.permutation(len(both))[: len(b)]] = 1

    def mean(which: NDArray[Any]) -> NDArray[Any]:
        count = which @ there
        return which @ values / np.where(count > 0, count, np.nan)

    found = mean(second) - mean(1 - second)
    return found[0], np.nan_to_num(found[1:])
