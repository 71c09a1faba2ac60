"""`cumulant bench`: ratios against the real alternative, measured in one run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cumulant.bench.timing import Row, machine, markdown
from cumulant.errors import InputError

bench = typer.Typer(
    help="Time Cumulant against the real alternative, interleaved in one run.",
)


@bench.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    """Time Cumulant against the real alternative, interleaved in one run."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.command()
def calculus(
    rounds: Annotated[
        int, typer.Option(help="Rounds for short shapes; long ones take half as many.")
    ] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Only the smallest shape.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write a Markdown table here.")
    ] = None,
) -> None:
    """Attention and its derivatives against torch's attention.

    About five minutes; --quick takes ten seconds.
    """
    from cumulant.bench.calculus import run

    if rounds < 1:
        raise InputError(f"--rounds must be at least 1, not {rounds}.")
    if output is not None:
        if not output.parent.is_dir():
            raise InputError(f"--output: there is no folder {output.parent}; make it first.")
        if output.is_dir() or not os.access(output.parent, os.W_OK):
            raise InputError(f"--output: cannot write a file at {output}; name a file.")
    errors = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    ) as progress:
        task = progress.add_task("measuring", total=None)

        def tick(what: str, total: int) -> None:
            progress.update(task, description=what, total=total, advance=1)

        try:
            rows = run(rounds=rounds, quick=quick, tick=tick)
        except KeyboardInterrupt:
            typer.echo("cumulant: interrupted; nothing was written", err=True)
            raise typer.Exit(130) from None
    command = "cumulant bench calculus" + (" --quick" if quick else "")
    if output is not None:
        output.write_text(markdown("What the calculus of attention costs", command, rows))
    if as_json:
        report = {"machine": machine(), "rows": [r.as_dict() for r in rows]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(rows)


def _show(rows: list[Row]) -> None:
    table = Table(title="Ratios of time (lower is better)", caption=machine())
    for name in ("shape", "quantity", "against"):
        table.add_column(name)
    for name in ("ms", "ratio", "aim"):
        table.add_column(name, justify="right")
    for r in rows:
        style = "green" if r.met else "yellow"
        table.add_row(
            r.shape,
            r.quantity,
            r.against,
            f"{r.milliseconds:.1f}",
            f"[{style}]{r.ratio:.2f}[/{style}]",
            f"{r.at_most:.2f}" + ("" if r.met else " missed"),
        )
    Console().print(table)
