"""`cumulant`: the commands and how they fail."""

from __future__ import annotations

import io
import re
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from cumulant.core.errors import GroupError, InputError
from cumulant.core.files import printable

# Each command: its module, the function or application in it, and a line for --help. A command is
# imported when it runs. It imports torch and the library within its functions or in a file
# `..._run.py`, so that no --help waits for them.
COMMANDS = {
    "report": ("report", "report", "Write one self-contained page with every result."),
    "claims": ("claims", "claims", "Test every claim of the paper and its drafts."),
    "study": ("study", "study", "Answer a question by training variants, with a verdict."),
    "lens": ("lens", "lens", "Show what attention does in a model, token by token."),
    "serve": ("serve", "serve", "Show what attention does with your own text, in the browser."),
    "filter": ("filter", "app", "Find the regimes and the hidden states of a series."),
    "simulate": ("simulate", "simulate", "Simulate a cloud of points that attends to itself."),
    "bench": ("bench", "bench", "Time Cumulant against the real alternative, in one run."),
    "doctor": ("doctor", "doctor", "Show versions and engines, or check derivatives."),
}


class _Deferred(TyperCommand):
    """A command known by its line of help, until it is called."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        module, name, _ = COMMANDS[self.name or ""]
        found = getattr(import_module(f"cumulant.cli.{module}"), name)
        if not isinstance(found, typer.Typer):
            whole = typer.Typer(add_completion=False)
            whole.command(self.name)(found)
            found = whole
        return get_command(found).make_context(info_name, args, *rest, **more)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            raise InputError(f"there is no command {cmd_name!r}; there are {', '.join(COMMANDS)}.")
        return _Deferred(cmd_name, help=COMMANDS[cmd_name][2])


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True
    ),
) -> None:
    """Cumulant, the calculus of attention.

    \b
    cumulant lens                what attention does in a small model, as a page
    cumulant serve               the same for text that you type, in the browser
    cumulant filter --example    regimes of a time series
    cumulant claims --quick      the paper's claims, tested in minutes
    cumulant doctor              what is installed and which engine runs

    Each command has its own --help, with examples.
    """
    if show:
        from cumulant import __version__

        typer.echo(f"cumulant {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# What typer raises for options and values it cannot read; the class comes from its copy of click.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]


def _usage(error: Any) -> str:
    """Typer's message in one line, and where to read more; typer would print a box."""
    said = " ".join(str(error.format_message()).split()).rstrip(".")
    said = re.sub(r"Invalid value for '([^']+)': Input should (be [^,]+).*", r"\1 must \2", said)
    return f"{said}; see {getattr(error.ctx, 'command_path', 'cumulant')} --help."


def main() -> None:
    """Run the command; bad input prints one line and exits with 2, lost processes exit with 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # formulas on a terminal without such characters
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _USAGE as error:
        typer.echo(f"cumulant: {printable(_usage(error))}", err=True)
        sys.exit(2)
    except InputError as error:
        typer.echo(f"cumulant: {printable(error)}", err=True)
        sys.exit(2)
    except GroupError as error:
        typer.echo(f"cumulant: {printable(error)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("cumulant: interrupted", err=True)
        sys.exit(130)
