"""`cumulant claims`: the paper's claims as experiments, each with a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from cumulant.cli.progress import Shown
from cumulant.core.errors import InputError

if TYPE_CHECKING:
    from cumulant.lab.claims.record import Keeper


def claims(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Claims to run, such as T14 or simclr; repeatable or comma-separated."),
    ] = None,
    evidence: Annotated[
        str | None,
        typer.Option(help="Only claims with this evidence: identity, simulation or empirical."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Small experiments; all claims take less than a minute."),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed; on one machine a seed repeats every number.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for claims.json, ledger.md and figures."),
    ] = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="Run only these claims again in the ledger of -o; keep the others."
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Claims at once, each on one thread. Default: the processors."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger as JSON.")] = False,
) -> None:
    """Test every claim of the paper and its drafts.

    Each claim, T1 to T42 and the systems the paper relies on, is an experiment
    whose numbers decide: it holds, holds with a correction (the draft's form
    fails and the corrected one passes), does not hold in general, or is open.

    \b
    cumulant claims --quick              all of them, in less than a minute
    cumulant claims --only T14           one, with its numbers, bounds and reasons
    cumulant claims --evidence empirical claims decided by trained models or text
    cumulant claims -o ledger/           with figures and a page; about five minutes
    cumulant claims -o ledger/ --only T14 --update    run T14 again, keep the others
    cumulant claims --json | jq '.claims[] | {id, verdict}'

    With -o, repeat the command to resume an interrupted run. The exit code is 1
    if an experiment crashes or departs from its recorded verdict.
    """
    from cumulant import __version__
    from cumulant.lab.claims.ledger import select
    from cumulant.lab.claims.record import keeper

    names = [name for given in only or () for name in given.split(",") if name.strip()]
    if only and not names:
        raise InputError("--only needs a claim's id, such as T14.")
    chosen = select(names, evidence=evidence)
    if not chosen:
        raise InputError(f"none of the selected claims has {evidence} evidence.")
    shown = Console(stderr=as_json, highlight=False, emoji=False)
    with keeper(
        chosen, seed=seed, quick=quick, folder=output, version=__version__, update=update
    ) as keep:
        if keep.done:
            typer.echo(f"cumulant: resuming after {count(keep.done)} in {output}", err=True)
        try:
            with Shown("claims") as progress:
                for row in keep.run_all(processes, progress):
                    if not as_json:
                        _tell(progress.console, shown, row, numbers=bool(names))
        except KeyboardInterrupt:
            typer.echo(f"cumulant: interrupted; {_left(keep, output)}", err=True)
            raise typer.Exit(130) from None
        ledger = keep.finish()
    if as_json:
        typer.echo(json.dumps(ledger, indent=1, allow_nan=False))
    _end(ledger["claims"], output, keep, None if as_json else shown)


def count(n: int) -> str:
    """`1 claim`, `2 claims`."""
    return f"{n} claim" if n == 1 else f"{n} claims"


def _left(keep: Keeper, output: Path | None) -> str:
    """What an interrupted run leaves behind."""
    if output is None:
        return "nothing was written"
    done = f"{keep.done} of {len(keep.claims)} claims are kept in {output}"
    return f"{done}; run the same command again to resume"


def _tell(above: Console, shown: Console, row: dict[str, Any], *, numbers: bool) -> None:
    """Print one claim's verdict, above the progress bar if there is one; asked for, its numbers."""
    from cumulant.lab.claims.claim import CORRECTED, FAILS, HOLDS, OPEN, correction_title
    from cumulant.lab.claims.record import bound, measured, outcome

    styles = {HOLDS: "green", CORRECTED: "cyan", FAILS: "red", OPEN: "yellow"}
    console = above if above.is_terminal and shown.is_terminal else shown
    said = outcome(row)
    style = styles.get(said, "red")
    head = f"[bold]{row['id']:>4}[/bold]  [{style}]{said}[/]  {escape(row['title'])}"
    console.print(head)
    said = row["crash"] or row["not_run"] or row["finding"]
    console.print(Padding(escape(said), (0, 0, 0, 6)), style="dim")
    if not numbers or not row["numbers"]:
        return
    table = Table("number", "measured", "should be", "speaks for", box=None, padding=(0, 2, 0, 0))
    for x in row["numbers"]:
        form = "" if x["form"] == "noted" else x["form"]
        table.add_row(escape(f"{x['says']} ({x['name']})"), measured(x), bound(x), form)
    console.print(Padding(table, (1, 0, 0, 6)))
    correction = correction_title(row["verdict"])
    for head, words in (("Bounds", row["bounds"]), (correction, row["correction"])):
        if words:
            console.print(Padding(f"[bold]{head}.[/bold] {escape(words)}", (1, 0, 0, 6)))
    where = f"{row['source']}; experiment {row['experiment']}"
    console.print(Padding(escape(where), (1, 0, 1, 6)), style="dim")


def _end(
    rows: list[dict[str, Any]], output: Path | None, keep: Keeper, shown: Console | None
) -> None:
    """Print the totals and set the exit code."""
    from cumulant.lab.claims.record import LEDGER, measured, tally

    unrun = [row for row in rows if row["not_run"]]
    if shown is not None:
        shown.print(f"\n{count(len(rows))}: {tally(rows)}.")
        if output is not None:
            shown.print(f"The ledger is in {escape(str(output))}: {LEDGER}, ledger.md, figures.")
    if output is not None and not keep.pictures:
        typer.echo("cumulant: no figures; they need: pip install '.[plot]'", err=True)
    reasons = dict.fromkeys(row["not_run"] for row in unrun)
    lines = [
        f"{', '.join(x['id'] for x in unrun if x['not_run'] == why)} not run: {why}"
        for why in reasons
    ]
    if unrun and len(unrun) == len(rows):
        raise InputError("; ".join(lines))
    for line in lines:
        typer.echo(f"cumulant: {line}", err=True)
    departed = [row for row in rows if row["departs"]]
    for row in departed:
        failed = [x for x in row["numbers"] if x["outcome"] == "failed"]
        why = row["crash"] or "; ".join(f"{x['name']} is {measured(x)}" for x in failed)
        typer.echo(
            f"cumulant: {row['id']} departs from its recorded verdict, {row['recorded']}: "
            f"{row['verdict']}" + (f" ({why})" if why else ""),
            err=True,
        )
    if departed:
        raise typer.Exit(1)
