"""`cumulant report`: everything on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cumulant.cli.claims import count
from cumulant.cli.progress import Shown
from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, write_file
from cumulant.core.lock import locked
from cumulant.core.progress import Progress
from cumulant.pages import ready

PAGE = "report.html"


def report(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the page and its data.")
    ] = Path("cumulant-report"),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small experiments and the shortest benchmarks; less than four minutes."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed; the same seed gives the same numbers.")
    ] = 0,
) -> None:
    """Write one self-contained page with every result: report.html.

    It has the ledger of all claims with figures, the lens on a small model and a
    page of Darwin, the fixed point of attention, a time series with two regimes,
    benchmark ratios of this machine, and two interactive panels.

    \b
    cumulant report                      less than half an hour; cumulant-report/report.html
    cumulant report --quick -o look/

    To resume an interrupted run, repeat the command.
    """
    from cumulant import __version__
    from cumulant.lab.claims.record import tally
    from cumulant.lab.report import LOCK, finish, gather, render

    ready()  # before the work, not after it
    make_folder(output)
    with locked(output / LOCK), Shown("the report") as progress:
        try:
            parts = gather(output, seed=seed, quick=quick, version=__version__, progress=progress)
            progress(Progress(0, None, "the page"))
            write_file(output / PAGE, render(parts, output))
            finish(output)
        except KeyboardInterrupt:
            typer.echo(
                f"cumulant: interrupted; finished parts are kept in {output}; run the same command "
                "again to resume",
                err=True,
            )
            raise typer.Exit(130) from None
        except OSError as error:
            raise InputError(f"cannot write to {output}: {error.strerror or error}.") from None
    rows = parts.ledger["claims"]
    console = Console(highlight=False, emoji=False)
    console.print(f"{count(len(rows))}: {tally(rows)}.")
    for note in parts.notes:
        console.print(f"[yellow]{escape(note)}[/yellow]")
    where = escape(str((output / PAGE).resolve()))
    console.print(f"The report is {where}", soft_wrap=True)
    departed = [row["id"] for row in rows if row["departs"]]
    if departed:
        typer.echo(f"cumulant: departs from its recorded verdict: {', '.join(departed)}", err=True)
        raise typer.Exit(1)
