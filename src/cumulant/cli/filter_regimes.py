"""`cumulant filter --regimes`: a ready model from options, and what to know about a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import typer

from cumulant.core.errors import InputError
from cumulant.core.files import printable
from cumulant.filtering.dates import calendar_of
from cumulant.filtering.ready import autoregression, switching_mean_variance
from cumulant.filtering.series import Series, listed
from cumulant.filtering.structure import ReadyModel

__all__ = ["Regimes", "told_about"]

STARTS = 4
MOST_REGIMES, MOST_LAGS = 9, 12
MOST_HISTORIES = 64  # that the exact filter of an autoregression may keep


class Regimes(NamedTuple):
    """What the options ask for."""

    names: int | list[str]
    switching: list[str]
    order: int
    starts: int

    @classmethod
    def asked(
        cls,
        regimes: str | None,
        switching: str | None,
        order: int | None,
        starts: int | None,
        file: bool,
    ) -> Regimes | None:
        """The options, checked; None if none of them was given."""
        if regimes is None:
            if switching is not None or order is not None or starts is not None:
                raise InputError("--switching, --ar and --starts go with --regimes.")
            return None
        if file:
            raise InputError("--regimes makes and fits its own model; leave out --model and --fit.")
        order = 0 if order is None else order
        if not 0 <= order <= MOST_LAGS:
            raise InputError(f"--ar must be from 0 to {MOST_LAGS}, not {order}.")
        starts = STARTS if starts is None else starts
        if not 1 <= starts <= 1000:
            raise InputError(f"--starts must be from 1 to 1000, not {starts}.")
        what = [x.strip() for x in (switching or "mean").split(",")]
        able = ["mean", "variance", *(["coefficients"] if order else [])]
        if set(what) - set(able):
            raise InputError(f"--switching must name some of {', '.join(able)}, not {switching!r}.")
        return cls(_names(regimes), what, order, starts)

    @property
    def collapse(self) -> str | int:
        """The filter that is exact for the model, if it keeps few enough histories."""
        count = self.names if isinstance(self.names, int) else len(self.names)
        exact = self.order > 1 and count**self.order <= MOST_HISTORIES
        return self.order + 1 if exact else "gpb2"

    def model(self) -> ReadyModel:
        """The model, before it has seen the series."""
        if self.order:
            return autoregression(self.order, regimes=self.names, switching=self.switching)
        return switching_mean_variance(self.names, switching=self.switching)


def _names(regimes: str) -> int | list[str]:
    if regimes.strip().isdecimal() and len(regimes) < 10:
        count = int(regimes)
        if not 1 <= count <= MOST_REGIMES:
            raise InputError(f"--regimes must be from 1 to {MOST_REGIMES}, not {count}.")
        return count
    names = [x.strip() for x in regimes.split(",")]
    if not 2 <= len(names) <= MOST_REGIMES or len(set(names)) < len(names) or not all(names):
        raise InputError(
            f"--regimes must be a number from 1 to {MOST_REGIMES}, or different names separated by "
            f"commas, not {regimes!r}."
        )
    return names


def told_about(path: Path, series: Series) -> None:
    """Say what was left out, and refuse dates that do not run forward."""
    if series.skipped:
        names = printable(listed([repr(x) for x in series.skipped]))
        typer.echo(f"cumulant: columns of text are left out: {names}", err=True)
    found = None if series.labels is None else calendar_of(series.labels)
    if found is None or series.labels is None:
        return
    if found.backward is not None:
        t = found.backward
        raise InputError(
            f"{path}: dates must run forward, but {series.labels[t]} comes after "
            f"{series.labels[t - 1]} (row {t + 1}). Sort the rows by date, one series to a file."
        )
    if not found.even and len(series.labels) > 2:
        typer.echo(
            "cumulant: the dates are not evenly spaced; each row counts as one step. Add rows with "
            "empty cells for steps that are missing",
            err=True,
        )
