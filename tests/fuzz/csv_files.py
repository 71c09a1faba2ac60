"""Random CSV files: `read_series` agrees with pandas, and damaged files are one clear error.

python tests/fuzz/csv_files.py --rounds 10000 --seed 7
"""

from __future__ import annotations

import csv
import io
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas

import cumulant as cm
from fuzz import driver

NAMES = ("a", "rate", "GDP, real", "x;y", 'the "old" one', "größe", "b\tc", "two\nlines", "1st")
MISSING = ("", "NA", "nan", "null", "none", ".", "N/A", "NaN")
TEXTS = ("closed", "1.2.2020", "n, m", "x;y", 'he said "no"', "5 %", "a\nb", "2020-01-05")


class Made(NamedTuple):
    """A file, and how pandas is to read it."""

    content: bytes
    mark: str
    decimal: str


def make(rng: random.Random) -> Made:
    """A table as some program might write it."""
    mark, width, length = rng.choice(",;\t"), rng.randint(1, 6), rng.randint(1, 12)
    decimal = rng.choice(".,") if mark != "," and width > 1 else "."
    # The name of a single column that holds a separator would be cut at it.
    names = rng.sample(NAMES, width) if width > 1 else [rng.choice(("a", "größe", "two\nlines"))]
    labels = width > 1 and rng.random() < 0.5
    notes = width > 2 and rng.random() < 0.3
    if labels:
        names[0] = rng.choice(("date", "t", "Year"))

    def number() -> str:
        if rng.random() < 0.2:
            return rng.choice(MISSING)
        value = rng.choice((rng.gauss(0, 1), rng.gauss(0, 1e6), rng.gauss(0, 1e-9)))
        shown = repr(value) if rng.random() < 0.5 else f"{value:.{rng.randint(0, 5)}f}"
        return shown.replace(".", decimal)

    rows: list[list[str]] = []
    for k in range(length):
        row = [number() for _ in names]
        if labels:
            row[0] = f"day {k}"
        if notes:
            row[-1] = rng.choice(TEXTS)
        rows.append(row)
    return Made(_written(rng, mark, names, rows), mark, decimal)


def _written(rng: random.Random, mark: str, names: list[str], rows: list[list[str]]) -> bytes:
    end = rng.choice(("\n", "\r\n"))
    text = io.StringIO()
    quoting = rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    out = csv.writer(text, delimiter=mark, lineterminator=end, quoting=quoting)
    out.writerow(names)
    for row in rows:
        padded = [f" {x} " if x and rng.random() < 0.05 else x for x in row]
        out.writerow(padded)
        if len(names) > 1 and rng.random() < 0.05:
            text.write(end)  # a blank line is no row
    whole = text.getvalue()
    if rng.random() < 0.3:
        whole = whole.removesuffix(end)
    elif rng.random() < 0.3:
        whole += end * rng.randint(1, 3)
    return ("\ufeff" * (rng.random() < 0.2) + whole).encode()


def expected(made: Made) -> Any:
    """Every cell by pandas, as text."""
    return pandas.read_csv(
        io.BytesIO(made.content),
        sep=made.mark,
        dtype=str,
        keep_default_na=False,
        encoding="utf-8-sig",
    )


def check_whole(rng: random.Random, folder: Path) -> bytes | None:
    """A sound file: its numbers, labels and names are those that pandas sees; None if they are."""
    made = make(rng)
    path = folder / "series.csv"
    path.write_bytes(made.content)
    table = expected(made)
    cells = {str(n).strip(): [x.strip() for x in table[n]] for n in table.columns}
    try:
        found = cm.filtering.read_series(path)
    except cm.InputError as error:
        return None if _rightly_refused(cells, made, str(error)) else made.content
    for k, name in enumerate(found.names):
        want = [_number(x, made.decimal) for x in cells[name]]
        if not np.array_equal(found.values[:, k].numpy(), want, equal_nan=True):
            return made.content
    if found.labels is not None and found.labels != next(iter(cells.values())):
        return made.content
    left = [n for n in cells if n not in found.names]
    labeled = [next(iter(cells))] if found.labels is not None else []
    told = sorted(left) == sorted([*found.skipped, *labeled]) or not left
    return None if told and all(_is_text(cells[n], made.decimal) for n in left) else made.content


def _number(text: str, decimal: str) -> float:
    missing = {x.lower() for x in MISSING}
    return float("nan") if text.lower() in missing else float(text.replace(decimal, "."))


def _is_text(cells: list[str], decimal: str) -> bool:
    """Whether at least half of what is there is no number."""
    wrong = there = 0
    for x in cells:
        try:
            there += x.lower() not in {y.lower() for y in MISSING}
            _number(x, decimal)
        except ValueError:
            wrong += 1
    return 2 * wrong >= there


def _rightly_refused(cells: dict[str, list[str]], made: Made, said: str) -> bool:
    """Errors a sound file may meet: what it says can be read in two ways, or is no number."""
    flat = [x for column in cells.values() for x in column]
    if "may be" in said:  # all decimal commas stand before three digits
        return made.decimal == ","
    if "no column holds numbers" in said:
        return all(_is_text(column, made.decimal) for column in cells.values())
    if "is not a finite number" in said:
        return any(x in TEXTS for x in flat)
    if "can be cut at" in said:
        return any(mark in name for name in cells for mark in ",;\t")
    return "has a header but no rows" in said and not flat


def check_damaged(rng: random.Random, folder: Path) -> bytes | None:
    """A file with bytes changed, lost or doubled: a series, or one clear line."""
    content = bytearray(make(rng).content)
    for _ in range(rng.randint(1, 6)):
        k = rng.randrange(len(content) + 1)
        some = rng.choice((b"", b"\0", b'"', b"\n", b"\r", b",", b";", b"\t", b"\xff", b"1,234"))
        content[k : k + rng.randint(0, 3)] = some
    path = folder / "series.csv"
    path.write_bytes(content)
    try:
        found = cm.filtering.read_series(path)
    except cm.InputError as error:
        return None if str(path) in str(error) else bytes(content)
    except Exception:
        return bytes(content)
    sound = found.values.shape == (len(found.values), len(found.names)) and len(found.names)
    return None if sound and not found.values.isinf().any() else bytes(content)


def check(seed: int) -> str | None:
    """What is wrong with a sound file and a damaged one, with the file; None if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        for each in (check_whole, check_damaged):
            wrong = each(random.Random(f"{seed} {each.__name__}"), Path(folder))
            if wrong is not None:
                return f"{each.__name__}: {wrong!r}"
    return None


if __name__ == "__main__":
    sys.exit(driver.main(check, "csv_files", __doc__, rounds=2000))
