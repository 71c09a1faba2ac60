"""Progress of commands on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cumulant.core.progress import Progress

__all__ = ["Shown"]

# Seconds: before a bar appears, before the first line, between two lines.
BAR, LINE, EVERY = 0.5, 2.0, 10.0


class Shown:
    """A `ProgressCallback` for the time of a ``with`` block; short work shows nothing.

    Args:
        what: is being done, where the progress does not say.
        quiet: show nothing.
    """

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self._what, self._quiet = what, quiet
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), console=self.console, transient=True)
        self._task = self._bar.add_task(escape(what), total=None)
        self._next = time.monotonic() + (BAR if self.console.is_terminal else LINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:  # otherwise rich writes an empty line
            self._bar.stop()

    def __call__(self, progress: Progress, /) -> None:
        what = progress.what or self._what
        if self.console.is_terminal:
            said, done = escape(what), progress.done
            self._bar.update(self._task, description=said, completed=done, total=progress.total)
        if self._quiet or time.monotonic() < self._next:
            return
        if self.console.is_terminal:
            self._bar.start()
            return
        of = "" if progress.total is None else f" of {_number(progress.total)}"
        count = f" ({_number(progress.done)}{of})" if of or progress.done else ""
        typer.echo(f"cumulant: {what}{count}", err=True)
        self._next = time.monotonic() + EVERY


def _number(x: float) -> str:
    """Steps in full: 70000, not 7e+04."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.4g}"
