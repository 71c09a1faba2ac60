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
from cumulant.lab.claims.record import tally
from cumulant.lab.report import LOCK, finish, gather, render
from cumulant.pages import ready

PAGE = "report.html"


def report(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the page and what it shows.")
    ] = Path("cumulant-report"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Small experiments, one benchmark: a minute and a half.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed finds the same numbers.")] = 0,
) -> None:
    """Make one page of everything: report.html, for any browser, asking nothing of the network.

    The ledger of all claims with pictures, the lens on a small model and a page
    of Darwin, the answer to what the fixed point of attention is, a series with
    two regimes, benchmark ratios of this machine, and two panels to play with.

    \b
    cumulant report                      some minutes; cumulant-report/report.html
    cumulant report --quick -o look/

    After an interruption the same command resumes where the run stopped.
    """
    from cumulant import __version__

    ready()  # before the work, not after it
    make_folder(output)
    with locked(output / LOCK), Shown("the report") as progress:
        try:
            parts = gather(output, seed=seed, quick=quick, version=__version__, progress=progress)
            progress(Progress(0, None, "the page"))
            write_file(output / PAGE, render(parts))
            finish(output)
        except KeyboardInterrupt:
            typer.echo(
                f"cumulant: interrupted; finished parts are kept in {output}; run the same command "
                "again to resume",
                err=True,
            )
            raise typer.Exit(130) from None
        except OSError as error:
            raise InputError(f"cannot write into {output}: {error.strerror or error}.") from None
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
