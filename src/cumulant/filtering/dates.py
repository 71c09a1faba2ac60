"""Dates that label the rows of a file: whether they run forward and evenly, and what comes next."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Calendar", "calendar_of"]


class Way(NamedTuple):
    """A way to write dates: how to read one as year, month, day, and how to write one.

    A month or a day that is not written is 1; `unit` is the number of months that one step at
    least takes, 0 if days are written.
    """

    pattern: re.Pattern[str]
    order: str
    form: str
    unit: int


def _way(pattern: str, order: str, form: str, unit: int = 0) -> Way:
    return Way(re.compile(pattern), order, form, unit)


WAYS = (
    _way(r"(\d{4})", "y", "{y:04d}", 12),
    _way(r"(\d{4})[ -]?[Qq]([1-4])", "yq", "{y:04d}{mark}{q}", 3),
    _way(r"(\d{4})[-/.](\d{1,2})", "ym", "{y:04d}{mark}{m:02d}", 1),
    _way(r"(\d{1,2})[-/.](\d{4})", "my", "{m:02d}{mark}{y:04d}", 1),
    _way(r"(\d{4})[Mm](\d{1,2})", "ym", "{y:04d}{mark}{m:02d}", 1),
    _way(r"(\d{4})(\d{2})(\d{2})", "ymd", "{y:04d}{m:02d}{d:02d}"),
    _way(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})", "ymd", "{y:04d}{mark}{m:02d}{mark}{d:02d}"),
    _way(r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})", "dmy", "{d:02d}{mark}{m:02d}{mark}{y:04d}"),
    _way(r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})", "mdy", "{m:02d}{mark}{d:02d}{mark}{y:04d}"),
)


class Calendar(NamedTuple):
    """The dates of a file: in one known way of writing, first to last.

    ``backward`` is the first row that is not after the row before it, None if all are; ``even``
    says whether all steps are as long: days, or months (at the same day, or at their ends).
    """

    dates: list[date]
    backward: int | None
    even: bool
    ahead: Callable[[int], list[str]] | None


def calendar_of(labels: Sequence[str]) -> Calendar | None:
    """The dates that labels are; None if they are not, or could be read in two ways."""
    able = [(way, found) for way in WAYS if (found := _read(way, labels)) is not None]
    regular = [(way, found) for way, found in able if _pace(way, found) is not None]
    chosen = regular if len(regular) == 1 else able
    if len(chosen) != 1:
        return None
    way, found = chosen[0]
    behind = (t for t in range(1, len(found)) if found[t] <= found[t - 1])
    pace = _pace(way, found)
    if pace is None:
        return Calendar(found, next(behind, None), False, None)
    mark = _mark(labels[0])

    def ahead(steps: int) -> list[str]:
        return [_written(way, pace(h), mark) for h in range(1, steps + 1)]

    return Calendar(found, next(behind, None), True, ahead)


def _read(way: Way, labels: Sequence[str]) -> list[date] | None:
    out: list[date] = []
    for label in labels:
        match = way.pattern.fullmatch(label.strip())
        if match is None:
            return None
        part = dict(zip(way.order, map(int, match.groups()), strict=True))
        month = part.get("m", 3 * part.get("q", 1) - 2)
        try:
            out.append(date(part["y"], month, part.get("d", 1)))
        except ValueError:
            return None
    return out


def _pace(way: Way, found: Sequence[date]) -> Callable[[int], date] | None:
    """The date so many steps after the last, if all steps are as long."""
    if len(found) < 3:
        return None
    last = found[-1]
    months = [12 * d.year + d.month for d in found]
    gaps = {b - a for a, b in pairwise(months)}
    ends = all(d.day == calendar.monthrange(d.year, d.month)[1] for d in found)
    if len(gaps) == 1 and (step := gaps.pop()) > 0 and (ends or len({d.day for d in found}) == 1):

        def monthly(h: int) -> date:
            year, month = divmod(months[-1] - 1 + h * step, 12)
            size = calendar.monthrange(year, month + 1)[1]
            return date(year, month + 1, size if ends else min(last.day, size))

        return monthly
    days = {(b - a).days for a, b in pairwise(found)}
    if way.unit == 0 and len(days) == 1 and (pace := days.pop()) > 0:
        return lambda h: last + timedelta(days=h * pace)
    return None


def _mark(label: str) -> str:
    """What stands between the parts."""
    found = re.search(r"[^0-9]+", label.strip())
    return found[0] if found else ""


def _written(way: Way, day: date, mark: str) -> str:
    quarter = (day.month + 2) // 3
    return way.form.format(y=day.year, m=day.month, d=day.day, q=quarter, mark=mark)
