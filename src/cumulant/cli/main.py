"""`cumulant`: the commands and how they fail."""

from __future__ import annotations

import io
import sys

import typer

from cumulant.cli.bench import bench
from cumulant.cli.claims import claims
from cumulant.cli.doctor import doctor
from cumulant.cli.filter import filter_series
from cumulant.cli.lens import lens
from cumulant.cli.report import report
from cumulant.cli.simulate import simulate
from cumulant.core.errors import GroupError, InputError
from cumulant.core.files import printable

app = typer.Typer(
    help="Cumulant, the calculus of attention.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command()(report)
app.command()(claims)
app.command()(simulate)
app.command("filter")(filter_series)
app.command()(lens)
app.command()(doctor)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True
    ),
) -> None:
    """Cumulant, the calculus of attention."""
    if show:
        from cumulant import __version__

        typer.echo(f"cumulant {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command; bad input prints one line and exits with 2, lost processes exit with 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # formulas on a terminal without such characters
            stream.reconfigure(errors="replace")
    try:
        app()
    except InputError as error:
        typer.echo(f"cumulant: {printable(error)}", err=True)
        sys.exit(2)
    except GroupError as error:
        typer.echo(f"cumulant: {printable(error)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("cumulant: interrupted", err=True)
        sys.exit(130)
