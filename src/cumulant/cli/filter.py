"""`cumulant filter`: regimes and states of a series, as table, picture and summary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Find the regimes and the hidden states of a series.

--regimes fits a ready model by maximum likelihood and prints its estimates.
Or write a model, a TOML file, linear and Gaussian in each of its modes. The
command writes a table (filtered.csv) and a picture (filter.png) to the
output folder. Empty cells, NA and nan count as missing. Each row is one
step, whatever its date.

\b
cumulant filter --example              see it work; get files to start from
cumulant filter growth.csv --regimes 2 --forecast 8
cumulant filter growth.csv --regimes recession,expansion --ar 1
cumulant filter returns.csv --regimes 2 --switching mean,variance
cumulant filter series.csv --model model.toml
cumulant filter series.csv -m model.toml --columns rate --forecast 8
cumulant filter series.csv -m start.toml --fit     fit the numbers first

\b
A model.toml with two modes, one state and one observation:
    names = ["calm", "turbulent"]
    transition = [[0.95, 0.05], [0.10, 0.90]]    # rows sum to one
    initial = [0.5, 0.5]
    dynamics = 1.0                       # the same in both modes
    dynamics_noise = [0.1, 2.0]          # variances, one per mode
    emission = 1.0
    emission_noise = [1.0, 9.0]
    initial_mean = 0.0
    initial_covariance = 100.0
Matrices are nested arrays: (rows, columns) or (modes, rows, columns); two
columns seen through one state: emission = [[1.0], [0.5]], and emission_noise
2 x 2. Also: emission_bias, dynamics_bias, states = ["trend"].
"""

app = typer.Typer(add_completion=False)


@app.command("filter", help=HELP)
def filter_series(
    series: Annotated[
        Path | None,
        typer.Argument(
            help="A CSV file with a header. A first column of dates becomes the labels."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", help="TOML: transition, initial, dynamics, dynamics_noise, ..."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the table and the picture.")
    ] = Path("cumulant-filter"),
    regimes: Annotated[
        str | None,
        typer.Option(
            help="Fit this many regimes, or regimes of these names (low,high), without a model "
            "file. Names go in rising order of what switches."
        ),
    ] = None,
    switching: Annotated[
        str | None,
        typer.Option(
            help="What differs between --regimes: mean, variance, and coefficients with --ar. "
            "Default: mean."
        ),
    ] = None,
    order: Annotated[
        int | None,
        typer.Option("--ar", help="With --regimes: an autoregression of this order. Default: 0."),
    ] = None,
    starts: Annotated[
        int | None,
        typer.Option(help="With --regimes: number of starts of the search. Default: 4."),
    ] = None,
    collapse: Annotated[
        str | None,
        typer.Option(
            help="gpb2 (default), gpb1, imm, exact, or k for GPB(k), which keeps M^(k-1) Gaussians."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns to filter, separated by commas. Default: all numeric columns."),
    ] = None,
    ahead: Annotated[
        int, typer.Option("--forecast", help="Number of steps to forecast after the last row.")
    ] = 0,
    learn: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="First fit transition, biases and noises by maximum likelihood, starting from "
            "the model's; written to fitted.toml. Modes keep their names.",
        ),
    ] = False,
    draw: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Also draw filter.png.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    example: Annotated[
        bool,
        typer.Option(
            "--example", help="Run on US inflation, 1959 to 2009, and copy its files to start from."
        ),
    ] = False,
) -> None:
    """Find the regimes and the hidden states of a series."""
    from cumulant.cli.filter_run import run_filter

    run_filter(
        *(series, model, output, regimes, switching, order, starts, collapse, columns, ahead),
        *(learn, draw, as_json, example),
    )
