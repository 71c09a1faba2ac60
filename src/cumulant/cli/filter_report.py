"""What `cumulant filter` says at the end, and the example that it leaves behind."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table as RichTable

from cumulant.cli.text import as_text
from cumulant.core.files import write_file
from cumulant.filtering.fitting import Fit
from cumulant.filtering.model_files import EXAMPLE, example_files
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.series import Series
from cumulant.filtering.summary import Summary
from cumulant.filtering.tables import ModeSummary, RegimeChange, labels_of

__all__ = ["Learned", "copy_example", "run_again", "tell", "tell_json"]


class Learned(NamedTuple):
    """What ``--fit`` made of each regime of the file, the fit, and where its model is.

    A model that ``--regimes`` made has a summary instead of changes.
    """

    regimes: list[RegimeChange]
    found: Fit
    path: Path
    summary: Summary | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.found
        table = {} if self.summary is None else self.summary.as_dict()
        design = getattr(found.model, "design", None)
        return {
            **({"about": str(design)} if design is not None else {}),
            "log_likelihood": found.log_likelihood,
            "aic": found.aic,
            "bic": found.bic,
            "hqic": found.hqic,
            "steps": found.steps,
            "converged": found.converged,
            "status": str(found.status),
            "message": found.message,
            "model": str(self.path),
            **(table or {"regimes": [change._asdict() for change in self.regimes]}),
        }


SHOWN = 3  # episodes of each mode in the printed table


def copy_example(folder: Path) -> list[Path]:
    """The example's files, to be changed and tried; those changed already are left alone."""
    copied: list[Path] = []
    for source in example_files():
        target = folder / source.name
        content = source.read_bytes()
        if not target.exists():
            copied.append(write_file(target, content))
        elif target.read_bytes() != content:
            typer.echo(f"cumulant: {target} was changed before, and is left as it is", err=True)
    return copied


def run_again(folder: Path) -> str:
    """The command that filters the copies."""
    series, model = (shlex.quote(str(folder / name)) for name in EXAMPLE)
    where = "" if folder == Path("cumulant-filter") else f" -o {shlex.quote(str(folder))}"
    return f"cumulant filter {series} --model {model}{where}"


def tell_json(
    series: Series,
    post: Posterior,
    modes: list[ModeSummary],
    written: list[Path],
    again: str | None,
    learned: Learned | None,
) -> None:
    """The summary for machines, alone on standard output."""
    report: dict[str, Any] = {
        "log_likelihood": _log_likelihood(post, learned),
        "steps": post.steps,
        "observed": int((~series.values.isnan()).sum()),
        "collapse": post.scheme.name,
        "columns": series.names,
        "modes": [mode.as_dict(labels_of(series)) for mode in modes],
        "written": [str(p) for p in written],
    }
    if learned is not None:
        report["fit"] = learned.as_dict()
    if again is not None:
        report["again"] = again
    typer.echo(json.dumps(report))


def _log_likelihood(post: Posterior, learned: Learned | None) -> float:
    """Of the fit, which may take the first observations as given, or of all observations."""
    if learned is not None and learned.summary is not None:
        return learned.found.log_likelihood
    return float(post.log_likelihood)


def tell(
    series: Series,
    post: Posterior,
    modes: list[ModeSummary],
    written: list[Path],
    again: str | None,
    learned: Learned | None,
) -> None:
    """The summary for people."""
    labels = labels_of(series)
    console = Console()
    ready = learned is not None and learned.summary is not None
    if learned is not None and ready:
        _tell_summary(console, series, learned)
    title = f"{', '.join(series.names)}: {labels[0]} to {labels[-1]}"
    shown = RichTable("mode", title=as_text(title))
    shown.add_column("share of time", justify="right")
    shown.add_column("expected duration", justify="right")
    shown.add_column("longest episodes (steps)")
    for mode in modes:
        long = "varies" if mode.duration is None else f"{mode.duration:.3g} steps"
        long = "no end" if mode.duration == math.inf else long
        lines = [
            f"{labels[e.first]} to {labels[e.last]} ({e.steps})" for e in mode.episodes[:SHOWN]
        ]
        more = len(mode.episodes) - SHOWN
        lines += [f"and {more} more"] if more > 0 else []
        told = "\n".join(map(as_text, lines)) or "never the most probable"
        shown.add_row(as_text(mode.name), f"{mode.share:.1%}", long, told)
    console.print(shown)
    cells = series.values.numel()
    gone = int(series.values.isnan().sum())
    missing = f", {gone} of {cells} observations missing" if gone else ""
    # What a fit takes as given does not count in its likelihood, which the table shows.
    steps = f"{post.steps} steps{missing}"
    likelihood = f"log-likelihood {float(post.log_likelihood):.3f} ({steps})"
    console.print(steps if ready else likelihood)
    if learned is not None and not ready:
        console.print("fitted; each regime keeps the name of the one in the model it matches:")
        for change in learned.regimes:
            console.print(f"  {change}", markup=False, soft_wrap=True, highlight=False)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if again is not None:
        console.print("change the model and run again:", markup=False)
        console.print(f"  {again}", markup=False, soft_wrap=True, highlight=False)


def _tell_summary(console: Console, series: Series, learned: Learned) -> None:
    """What was fitted in a sentence, and the table of its estimates."""
    labels, found = labels_of(series), learned.found
    design = getattr(found.model, "design", "a model")
    count = f"{found.observation_count} observations"
    told = (
        f"Fitted by maximum likelihood: {design}. The series is {series.names[0]}, "
        f"{labels[0]} to {labels[-1]}, {count}."
    )
    console.print(told, markup=False, highlight=False)
    console.print(str(learned.summary), markup=False, highlight=False, soft_wrap=True)
