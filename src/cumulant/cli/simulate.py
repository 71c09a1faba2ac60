"""`cumulant simulate`: a cloud of points under attention, as data and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Known without torch, so that --help does not wait for it.
STARTS = ("gaussian", "ring", "sphere", "clusters", "orthonormal")
CONTRACTIONS = ("none", "sphere", "layernorm", "rmsnorm", "whiten")


def simulate(
    start: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(STARTS)}; a file of points, one per row (csv, txt, npy); or a "
            "saved run (npz) to continue from its last state."
        ),
    ] = "sphere",
    points: Annotated[
        int | None,
        typer.Option(help="Number of points in a named start. [default: 200; orthonormal: d]"),
    ] = None,
    dimension: Annotated[int, typer.Option(help="Dimension of a named start.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of a random start.")] = 0,
    beta: Annotated[
        float | None,
        typer.Option(help="Inverse temperature; 0 is uniform attention. [default: 1]"),
    ] = None,
    contraction: Annotated[
        str | None,
        typer.Option(
            help=f"Normalization after each step: {', '.join(CONTRACTIONS)}. [default: sphere]"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 100,
    step_size: Annotated[
        float | None, typer.Option(help="Size of each step. [default: 0.1]")
    ] = None,
    time: Annotated[
        float | None,
        typer.Option(
            help="Run the continuous flow up to this time instead, with an adaptive solver."
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Each point sees only itself and earlier points.")
    ] = False,
    cluster_distance: Annotated[
        float, typer.Option(help="Points chained by gaps up to this distance form one cluster.")
    ] = 0.1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the run to this file (npz).")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", "-p", help="Save a picture to this file (png, svg, pdf)."),
    ] = None,
    animation: Annotated[
        Path | None,
        typer.Option("--animation", "-a", help="Save an animation to this file (gif, html)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the observables as JSON.")] = False,
) -> None:
    """Simulate a cloud of points that attends to itself, and watch it expand, contract, cluster.

    Each step is contraction(x + step_size * attention(x)); --time runs its continuous limit.

    \b
    cumulant simulate                                      200 points on a sphere
    cumulant simulate sphere --beta 9 --time 12 -p a.png   clusters that last
    cumulant simulate gaussian --contraction none --steps 30
    cumulant simulate points.csv -o run.npz                your own points
    cumulant simulate run.npz --steps 500                  continue with the same settings
    """
    from cumulant.cli.simulate_run import run_simulation

    run_simulation(
        *(start, points, dimension, seed, beta, contraction, steps, step_size, time, causal),
        *(cluster_distance, output, picture, animation, as_json),
    )
