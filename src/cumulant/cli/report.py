"""`cumulant report`: everything on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cumulant.cli.claims import count
from cumulant.cli.progress import progress_bar
from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, write_file
from cumulant.lab.claims.record import tally
from cumulant.lab.report import finish, gather, render
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

    An interrupted run goes on where it stopped if the same command is given again.
    """
    from cumulant import __version__

    ready()  # before the work, not after it
    make_folder(output)
    with progress_bar() as progress:
        task = progress.add_task("the report", total=None)
        latest = ""

        def tell(what: str, done: int, total: int) -> None:
            nonlocal latest
            part = what.split(":")[0].split(" ")[0]
            if not progress.console.is_terminal and part != latest:
                typer.echo(f"cumulant: {what}", err=True)  # somebody may be reading a log
            latest = part
            progress.update(task, description=escape(what), completed=done, total=total or None)

        try:
            parts = gather(output, seed=seed, quick=quick, version=__version__, tell=tell)
            tell("the page", 0, 0)
            page = render(parts)
        except KeyboardInterrupt:
            typer.echo(
                f"cumulant: interrupted; what was finished is kept in {output}; give the same "
                "command again to go on",
                err=True,
            )
            raise typer.Exit(130) from None
        except OSError as error:
            raise InputError(f"cannot write into {output}: {error.strerror or error}.") from None
    write_file(output / PAGE, page)
    finish(output)
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
