"""`read_series`: observations from CSV files, as people and programs write them."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import dropwhile, islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.errors import InputError

__all__ = ["Series", "counted", "listed", "read_series", "text_of"]

MISSING = {"", "na", "n/a", "nan", "null", "none", "."}
# A first column of this name holds times, even if they are numbers.
LABELS = {
    *("", "date", "day", "id", "index", "label", "month", "observation_date", "period"),
    *("quarter", "row", "step", "t", "time", "timestamp", "week", "year"),
}
# 1,5 and 1,234: the second may also be a thousand and some.
DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d*|,\d+)([eE][+-]?\d+)?")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
# Meant as a number, but not one: 1.234,5 or 1 234 or a typographic minus. Never taken for text.
UNITS = re.compile(r"[$€£¥(+\-−]*\s?\d[\d.,'’ \u00a0\u202f]*\s?[%$€£¥)]+|[$€£¥]\s?[+\-−]?\d[\d.,]*")
ALMOST = re.compile(r"[+\-−]?(\d{1,3}(([,.'’ \u00a0\u202f])\d{3})(\3\d{3})*([.,]\d+)?|\d+(\.\d+)?)")


class Series(NamedTuple):
    """Observations ``(T, p)``, NaN where missing; a label for each step; names of the columns.

    ``labels`` is None if the file has no column of times; ``skipped`` names the columns of text
    that were left out.
    """

    values: Tensor
    labels: list[str] | None
    names: list[str]
    skipped: tuple[str, ...] = ()


class _Cells(NamedTuple):
    """A file as text: names of the columns, the rows with the numbers of their lines."""

    path: Path
    mark: str
    names: list[str]
    lines: list[tuple[int, list[str]]]

    def column(self, k: int) -> list[str]:
        return [row[k] for _, row in self.lines]


def read_series(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Series:
    """Observations from a CSV file with a header row, in double precision.

    Commas, semicolons or tabs separate. Empty cells, NA and nan are missing, and a row of empty
    cells (``,,``) is a step without observations. Blank lines are skipped, except that in a file
    with one column a blank line between others is a missing value. Between semicolons or tabs,
    ``1,5`` is 1.5; thousands separators are an error.

    Args:
        path: the file, in UTF-8.
        columns: the columns to take, in this order. By default all that hold numbers, except a
            first column of times: text, or a name like date, time or year. Columns with more text
            than numbers are named in ``skipped``; numbers with a unit (``5 %``) are an error.

    Raises:
        InputError: names the file, the line and the column.

    >>> import pathlib, tempfile, cumulant as cm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "series.csv")
    ...     _ = path.write_text("date,rate,note\\n2020-01,1.5,\\n2020-02,NA,closed\\n")
    ...     series = read_series(path)
    >>> series.values.flatten().tolist(), series.labels, series.names
    ([1.5, nan], ['2020-01', '2020-02'], ['rate'])
    """
    cells = _read(Path(path))
    names = cells.names
    first = cells.column(0)
    first_is_label = len(names) > 1 and (_is_text(first) or names[0].lower() in LABELS)
    if columns is None:
        able = range(first_is_label, len(names))
        chosen = [k for k in able if not _is_text(cells.column(k))]
        skipped = [k for k in able if k not in chosen]
        _check_units(cells, skipped)
        if not chosen:
            raise InputError(f"{path}: no column holds numbers; the columns are {listed(names)}.")
    else:
        chosen, skipped = _chosen(cells, columns), []
    comma = _decimal_comma(cells, chosen)
    rows = [[_number(cells, line, k, row[k], comma) for k in chosen] for line, row in cells.lines]
    labels = first if first_is_label and 0 not in chosen else None
    values = torch.tensor(rows, dtype=torch.float64)
    return Series(values, labels, [names[k] for k in chosen], tuple(names[k] for k in skipped))


def _check_units(cells: _Cells, skipped: Sequence[int]) -> None:
    """A column of numbers with units is not text to be left out."""
    for k in skipped:
        present = [(n, row[k]) for n, row in cells.lines if row[k].lower() not in MISSING]
        found = [(n, x) for n, x in present if UNITS.fullmatch(x)]
        if 2 * len(found) > len(present):
            line, text = found[0]
            raise InputError(
                f"{cells.path}: line {line}, column {cells.names[k]!r}: {text!r} is not a finite "
                "number; write numbers without units, or choose other columns."
            )


def _chosen(cells: _Cells, columns: Sequence[str]) -> list[int]:
    """Where the columns of these names are."""
    path, places = cells.path, {name: k for k, name in enumerate(cells.names)}
    if absent := [name for name in columns if name not in places]:
        raise InputError(
            f"{path} has no column {absent[0]!r}; its columns are {listed(cells.names)}."
        )
    chosen = [places[name] for name in columns]
    if len(set(chosen)) != len(chosen) or not chosen:
        raise InputError(f"{path}: columns must name each column once, not {listed(columns)}.")
    return chosen


def _read(path: Path) -> _Cells:
    """The cells of a file, checked to be a table."""
    text = _table_text(path)
    mark = _mark(path, text)
    rows = list(dropwhile(lambda row: not any(map(str.strip, row[1])), _rows(path, text, mark)))
    header = [x.strip() for x in rows[0][1]]
    if any(map(_is_number, header)) and all(_is_number(x) for x in header if x):
        shown = mark.join(header)[:60]
        raise InputError(
            f"{path}: the first line must name the columns, but holds numbers: {shown}"
        )
    lines = _body(rows[1:], len(header))
    _check_widths(path, lines, len(header))
    # A separator at the end of every line makes no column.
    kept = [k for k, x in enumerate(header) if k == 0 or x or any(row[k] for _, row in lines)]
    names = [header[k] or ("" if k == 0 else f"column {k + 1}") for k in kept]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{path}: two columns are called {repeated[0]!r}; rename one.")
    return _Cells(path, mark, names, [(n, [row[k] for k in kept]) for n, row in lines])


def _table_text(path: Path) -> str:
    """The text of a file that holds more than separators."""
    text = text_of(path)
    if not text.strip():
        raise InputError(f"{path} is empty.")
    if not text.strip(' \t\r\n,;"'):
        raise InputError(f"{path} holds empty cells only.")
    if "\0" in text:
        raise InputError(f"{path} holds NUL characters, so it is not a text file in UTF-8.")
    return text


def _check_widths(path: Path, lines: list[tuple[int, list[str]]], width: int) -> None:
    if not lines:
        raise InputError(f"{path} has a header but no rows.")
    for n, row in lines:
        if len(row) != width:
            raise InputError(
                f"{path}: line {n} has {counted(len(row), 'cell')}, but the header has {width}."
            )


def _rows(path: Path, text: str, mark: str) -> Iterator[tuple[int, list[str]]]:
    """Rows as they are, each with the number of its last line."""
    reader = csv.reader(io.StringIO(text), delimiter=mark, strict=True)
    try:
        yield from ((reader.line_num, row) for row in reader)
    except csv.Error as error:
        raise InputError(f"{path} is not a CSV file: line {reader.line_num}: {error}.") from None


def _body(rows: list[tuple[int, list[str]]], width: int) -> list[tuple[int, list[str]]]:
    """Rows below the header, cells stripped, without blank lines; in one column these are cells."""

    def is_blank(row: list[str]) -> bool:  # a quoted empty cell is no blank line
        return not row or (len(row) == 1 and row[0].isspace())

    if width == 1:
        ended = list(dropwhile(lambda row: is_blank(row[1]), reversed(rows)))[::-1]
        return [(n, [x.strip() for x in row] or [""]) for n, row in ended]
    return [(n, [x.strip() for x in row]) for n, row in rows if not is_blank(row)]


def _mark(path: Path, text: str) -> str:
    """The separator: it cuts the header and the row below into equally many cells."""
    widths: dict[str, list[int]] = {}
    for mark in ",;\t":
        widths[mark] = []
        try:
            filled = (row for _, row in _rows(path, text, mark) if any(map(str.strip, row)))
            widths[mark] += (len(row) for row in islice(filled, 2))
        except InputError:  # quotes that make no sense under this separator
            pass
    able = [mark for mark, found in widths.items() if len(set(found)) == 1 and found[0] > 1]
    if len(able) > 1:
        raise InputError(
            f"{path}: the header can be cut at {' and at '.join(map(repr, able))}; put quotes "
            "around names that hold a separator."
        )
    return able[0] if able else max(widths, key=lambda mark: widths[mark][:1] or [0])


def text_of(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}.") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file in UTF-8.") from None


def _value(text: str) -> float | None:
    """The number that a cell is, written with a decimal point."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    """Whether a cell is meant as a number, by whatever decimal mark."""
    return _value(text) is not None or bool(DECIMAL_COMMA.fullmatch(text) or ALMOST.fullmatch(text))


def _is_text(cells: Sequence[str]) -> bool:
    """Whether more cells of a column are text than numbers."""
    present = [x for x in cells if x.lower() not in MISSING]
    return 2 * sum(map(_is_number, present)) < len(present)


def _decimal_comma(cells: _Cells, chosen: Sequence[int]) -> bool:
    """Whether commas in cells are decimal: some must be, and no cell may have a decimal point."""
    if cells.mark == ",":
        return False
    commas: list[str] = []
    point = None
    for _, row in cells.lines:
        for x in (row[k] for k in chosen):
            if "," in x and DECIMAL_COMMA.fullmatch(x):
                commas.append(x)
            elif point is None and "." in x and _value(x) is not None:
                point = x
    if commas and point is not None:
        raise InputError(
            f"{cells.path} holds {commas[0]!r} and {point!r}: write all numbers with a decimal "
            "point, or all with a decimal comma."
        )
    if commas and all(map(THOUSANDS.fullmatch, commas)):
        raise InputError(
            f"{cells.path}: {commas[0]!r} may be {commas[0].replace(',', '.')} or "
            f"{commas[0].replace(',', '')}; write numbers with a decimal point and without "
            "thousands separators."
        )
    return bool(commas)


def _number(cells: _Cells, line: int, k: int, text: str, comma: bool) -> float:
    if text.lower() in MISSING:
        return math.nan
    plain = text.replace(",", ".") if comma and DECIMAL_COMMA.fullmatch(text) else text
    value = _value(plain)
    if value is None or not math.isfinite(value):
        remedy = "leave a cell empty if it is missing"
        if value is None and _is_number(text):
            remedy = "write numbers with a decimal point and without thousands separators"
        raise InputError(
            f"{cells.path}: line {line}, column {cells.names[k]!r}: {text!r} is not a finite "
            f"number; {remedy}."
        )
    return value


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names with commas between, the first few where there are many."""
    shown = ", ".join(x or '""' for x in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def counted(n: int, what: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{n} {what}{'s' * (n != 1)}"
