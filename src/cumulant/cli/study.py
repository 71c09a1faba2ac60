"""`cumulant study`: questions that are answered by training."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.cli.progress import Shown
from cumulant.core.errors import InputError
from cumulant.core.lock import locked

if TYPE_CHECKING:
    from cumulant.lab.studies.results import Results
    from cumulant.lab.studies.study import Study

Only = Annotated[
    list[str] | None,
    typer.Option(help="Variants to run; repeatable or comma-separated. Default: all."),
]


def study(
    name: Annotated[str | None, typer.Argument(help="A study's name, or a TOML file.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the studies and exit.")] = False,
    only: Only = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small problem, to see it work; it decides nothing.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results; the same folder resumes."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Runs at once, each on one thread. Default: the processors.")
    ] = os.cpu_count() or 1,
    minutes: Annotated[
        float | None, typer.Option(help="Budget of real time; default: that of the study.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file for language studies; default: Austen's novels.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Answer a question by training: variants, seeds, one search for all, a rule.

    A study is a file that names variants, seeds, a budget and a decision rule.
    Every variant gets the same search over learning rate and temperature, then
    runs of its own seeds; the rule, fixed in the file, turns them into a verdict
    with 95 % intervals over seeds. A run that diverges is a result.

    \b
    cumulant study --list
    cumulant study why-exponential --quick       to see it work, in a minute
    cumulant study which-weights -o results/     the whole study; -o resumes
    cumulant study mine.toml -o results/         a study of your own
    cumulant study why-exponential --only exp,relu2 --json --quick

    With -o, a killed study resumes where it was when the command is repeated, and
    ends with the same numbers. The folder then holds results.json, results.md,
    curves.parquet, curves.png and, if it is installed, TensorBoard files.
    """
    if listed:
        _list(as_json)
        return
    if name is None:
        raise InputError("name a study or a TOML file; `cumulant study --list` lists the studies.")
    from cumulant.lab.bench.timing import load, machine
    from cumulant.lab.studies.conducting import conduct
    from cumulant.lab.studies.reading import read
    from cumulant.lab.studies.results import Results, can_save, json_text, save

    chosen = _chosen(read(name), only, quick, minutes, text)
    shown = Console(stderr=as_json, highlight=False, emoji=False)
    about = {"command": _command(), "machine": machine(), "load": load(), "quick": quick}
    with ExitStack() as stack:
        if output is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = output
            can_save()
            stack.enter_context(locked(folder / "lock"))
        progress = stack.enter_context(Shown(chosen.name))
        begun = time.monotonic()
        try:
            runs = conduct(chosen, folder / "runs", processes=processes, progress=progress)
        except KeyboardInterrupt:
            kept = "nothing was written" if output is None else "run the same command to resume"
            typer.echo(f"cumulant: interrupted; {kept}", err=True)
            raise typer.Exit(130) from None
        results = Results(chosen, runs, {**about, "wall": round(time.monotonic() - begun, 1)})
        if output is not None:
            save(results, folder)
    if as_json:
        typer.echo(json_text(results.as_dict()), nl=False)
    _show(shown, results, output)


def _chosen(
    given: Study, only: list[str] | None, quick: bool, minutes: float | None, text: Path | None
) -> Study:
    from cumulant.lab.studies.reading import selected

    names = [x.strip() for part in only or () for x in part.split(",") if x.strip()]
    if only and not names:
        raise InputError(f"--only names no variant; the variants are {', '.join(given.variants)}.")
    chosen = selected(given, names)
    chosen = chosen.quickly() if quick else chosen
    if minutes is not None:
        if not minutes > 0:
            raise InputError(f"--minutes must be positive, not {minutes:g}.")
        chosen = replace(chosen, minutes=minutes)
    if text is not None:
        if "text" not in chosen.settings:
            raise InputError(f"{chosen.name} reads no text.")
        chosen = replace(chosen, settings={**chosen.settings, "text": str(text)})
    return chosen


def _command() -> str:
    return " ".join(["cumulant", *sys.argv[1:]])


def _list(as_json: bool) -> None:
    from cumulant.lab.studies.reading import known, read
    from cumulant.lab.workers import duration

    found = [read(path) for path in known().values()]
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": x.name,
                "title": x.title,
                "question": x.question,
                "minutes": x.minutes,
                "variants": list(x.variants),
            }
            for x in found
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    grid = Table(box=None, pad_edge=False)
    for heading in ("study", "question", "runs", "budget"):
        grid.add_column(heading, overflow="fold")
    for x in found:
        runs = len([*x.tuning_jobs()]) + len(x.variants) * len(x.seeds)
        grid.add_row(x.name, escape(x.question), str(runs), duration(60 * x.minutes))
    Console().print(grid)


def _show(shown: Console, results: Results, output: Path | None) -> None:
    from cumulant.lab.studies.judging import judgments, table
    from cumulant.lab.studies.tasks import objective_of

    study = results.study
    objective = objective_of(study.task)
    grid = Table(title=study.title, title_justify="left", box=None)
    for heading in ("variant", "rate", "beta", "diverged", objective):
        grid.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in table(study, results.runs):
        mean, half = row.get(objective, [float("nan"), 0.0])
        cells = [f"{row[n]:g}" if n in row else "-" for n in ("rate", "beta")]
        grid.add_row(row["variant"], *cells, row["diverged"], f"{mean:.3f} ± {half:.3f}")
    shown.print(grid)
    lines, verdict = judgments(study, results.runs)
    for x in lines:
        shown.print(
            f"  {x.measured.outcome:>9}  {escape(x.rule.says)}: {x.interval.mean:.3g} "
            f"\\[{x.interval.low:.3g}, {x.interval.high:.3g}]"
        )
    told = "quick, so it decides nothing: " if results.about.get("quick") else ""
    shown.print(f"\n{told}{verdict}.")
    if output is not None:
        shown.print(f"Results are in {escape(str(output))}: results.md, results.json, curves.")
