"""What `cumulant simulate` does: read the start, run, write, tell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cumulant import dynamics
from cumulant.cli.progress import Shown
from cumulant.core.checks import generator_of, real
from cumulant.core.errors import InputError
from cumulant.core.files import destination
from cumulant.core.typed import tolist
from cumulant.dynamics.initial import STARTS
from cumulant.dynamics.picture import clusters_at

Start = Tensor | dynamics.Trajectory

CONTRACTIONS: dict[str, dynamics.Contraction | None] = {
    "none": None,
    "sphere": dynamics.Sphere(),
    "layernorm": dynamics.LayerNorm(),
    "rmsnorm": dynamics.RMSNorm(),
    "whiten": dynamics.Whiten(),
}


def read_points(source: str, points: int | None, dimension: int, seed: int) -> Start:
    """A named start, points from a file (csv, txt, npy, npz), or a saved run to continue."""
    if source in STARTS:
        most = dimension if source == "orthonormal" else 200
        count = most if points is None else points
        random = generator_of("simulate", seed)
        return dynamics.initial_cloud(
            source, count, dimension, generator=random, dtype=torch.float64
        )
    path = Path(source)
    try:
        path.stat()
    except FileNotFoundError:
        raise InputError(
            f"START must be one of {', '.join(STARTS)} or a file of points; there is no file "
            f"{source}."
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}.") from None
    if path.is_dir():
        raise InputError(f"{source} is a folder; name a file of points.")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                names = list(file)
                array = file[names[0]] if len(names) == 1 else None
            if "states" in names:
                return dynamics.Trajectory.load(path)
            if array is None:
                raise InputError(f"{source} holds {', '.join(names)}; it should hold one array.")
        elif path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            array = _table(path)
        if np.iscomplexobj(array):
            raise InputError(f"{source} holds complex numbers; points must be real.")
        out = torch.as_tensor(np.asarray(array, dtype=np.float64))
    except InputError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "pickle" in reason:  # numpy's advice is to load it unsafely
            reason = "it is not an array that numpy saved"
        raise InputError(f"{source} does not hold a table of numbers: {reason}") from None
    if out.ndim < 2:
        raise InputError(f"{source} must hold one point per row; its shape is {tuple(out.shape)}.")
    return out


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _table(path: Path) -> Any:
    """Numbers by rows; a first row without numbers is a header."""
    rows = [x.split("#")[0].strip() for x in path.read_text(encoding="utf-8-sig").splitlines()]
    rows = [x for x in rows if x]
    mark = "," if rows and "," in rows[0] else None
    if rows and not any(_is_number(word) for word in rows[0].split(mark)):
        rows = rows[1:]
    if not rows:
        raise InputError(f"{path} holds no numbers.")
    return np.loadtxt(rows, delimiter=mark, ndmin=2)


def _writable(name: str, path: Path | None, suffixes: tuple[str, ...]) -> None:
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        ends = " or ".join(suffixes)
        raise InputError(f"--{name}: the file must end in {ends}, not {path.name}.")
    destination(path)


def _check_continuation(start: Start, said_how: bool) -> None:
    """Refuse saved runs whose settings the command cannot reproduce."""
    if not isinstance(start, dynamics.Trajectory):
        return
    if 0 in start.states.shape:
        raise InputError("the run holds no points; there is nothing to continue.")
    made = start.settings
    beyond = [n for n in made if ("weight" in n or n == "patterns") and made[n] is not None]
    beyond += [n for n in ("beta", "step_size") if isinstance(made.get(n), str)]
    if beyond:
        raise InputError(
            f"the run was made with its own {', '.join(beyond)}, which the command cannot restore; "
            "continue it in Python: cumulant.dynamics.simulate(Trajectory.load(...), ...)."
        )
    if made.get("kind") == "flow" and not said_how:
        raise InputError(
            "the run was made by the flow: pass --time to continue the flow, or --step-size to "
            "continue in steps."
        )


def _chosen(name: str, given: Any, start: Start, own: Any) -> Any:
    """The given value; else the saved run's; else the default."""
    if given is not None:
        return given
    saved = start.settings.get(name) if isinstance(start, dynamics.Trajectory) else None
    return own if saved is None else saved


def run_simulation(
    start: str,
    points: int | None,
    dimension: int,
    seed: int,
    beta: float | None,
    contraction: str | None,
    steps: int,
    step_size: float | None,
    time: float | None,
    causal: bool,
    cluster_distance: float,
    output: Path | None,
    picture: Path | None,
    animation: Path | None,
    as_json: bool,
) -> None:
    """Simulate, with the options of the command in its order."""
    _check_options(contraction, time, steps, points, dimension)
    real("simulate", "--cluster-distance", cluster_distance, least=0.0)
    _writable("output", output, (".npz",))
    _writable("picture", picture, (".png", ".svg", ".pdf"))
    _writable("animation", animation, (".gif", ".html"))
    if picture is not None or animation is not None:
        from cumulant.figures import need_matplotlib

        need_matplotlib()
    x = read_points(start, points, dimension, seed)
    _check_continuation(x, time is not None or step_size is not None)
    beta = _chosen("beta", beta, x, 1.0)
    pace = real("simulate", "step_size", _chosen("step_size", step_size, x, 0.1))
    pull = _contraction(contraction, x)
    causal = bool(_chosen("is_causal", causal or None, x, False))
    how: dict[str, Any] = {
        "beta": beta,
        "contraction": pull,
        "is_causal": causal,
        "checkpoint": output,
    }
    run = _run(x, steps, pace, time, how)
    if picture is not None:
        run.plot(picture, cluster_distance=cluster_distance)
    if animation is not None:
        run.animate(animation, cluster_distance=cluster_distance)
    written = [p for p in (output, picture, animation) if p is not None]
    _report(run, as_json, written, cluster_distance)


def _check_options(
    contraction: str | None, time: float | None, steps: int, points: int | None, dimension: int
) -> None:
    if contraction is not None and contraction not in CONTRACTIONS:
        raise InputError(
            f"--contraction must be one of {', '.join(CONTRACTIONS)}, not {contraction!r}."
        )
    if time is not None and not (time > 0 and math.isfinite(time)):
        raise InputError(f"--time must be positive, not {time}.")
    for name, count in (("steps", steps), ("points", points), ("dimension", dimension)):
        if count is not None and count < 1:
            raise InputError(f"--{name} must be at least 1, not {count}.")


def _run(
    start: Start, steps: int, step_size: float, time: float | None, how: dict[str, Any]
) -> dynamics.Trajectory:
    """The run, with progress; if interrupted, says where it was saved."""
    size = (start.final if isinstance(start, dynamics.Trajectory) else start).shape[-2]
    with Shown(f"{size} points") as progress:
        try:
            if time is None:
                return dynamics.simulate(
                    start, steps, step_size=step_size, progress=progress, **how
                )
            times = torch.linspace(0, time, steps + 1, dtype=torch.float64)
            return dynamics.flow(start, times, progress=progress, **how)
        except KeyboardInterrupt:
            output = how["checkpoint"]
            kept = f"the run so far is in {output}" if output else "nothing was saved (no --output)"
            typer.echo(f"cumulant: interrupted; {kept}", err=True)
            raise typer.Exit(130) from None


def _contraction(name: str | None, start: Start) -> dynamics.Contraction | None:
    """By name, or from a saved run."""
    if name is None and isinstance(start, dynamics.Trajectory) and start.settings:
        saved = start.settings.get("contraction")
        saved = saved if saved is None else str(saved)
        known = {str(c): c for c in CONTRACTIONS.values() if c is not None}
        if saved is not None and saved not in known:
            raise InputError(f"the run was made with {saved}; choose a --contraction to continue.")
        return None if saved is None else known[saved]
    return CONTRACTIONS[name or "sphere"]


def _report(run: dynamics.Trajectory, as_json: bool, written: list[Path], distance: float) -> None:
    final = run.final.reshape(-1, *run.final.shape[-2:])[0]
    last = len(run.times) - 1
    groups = clusters_at(run, last, distance)
    blown = float(run.blow_up_time.min())
    observed = {n: tolist(x.reshape(len(x), -1)[:, 0]) for n, x in run.observables.items()}
    if as_json:
        report: dict[str, Any] = {
            "times": tolist(run.times),
            "observables": observed,
            "clusters": groups,
            "blow_up_time": blown if math.isfinite(blown) else None,
            "written": [str(p) for p in written],
        }
        typer.echo(json.dumps(report))
        return
    table = Table(title=f"{final.shape[0]} points in {final.shape[1]} dimensions")
    table.add_column("t", justify="right")
    for name in observed:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("clusters", justify="right")
    for k in sorted({round(i * last / 8) for i in range(9)}):
        values = (f"{x[k]:.4g}" for x in observed.values())
        count = clusters_at(run, k, distance)
        table.add_row(f"{float(run.times[k]):.4g}", *values, "–" if count is None else str(count))
    console = Console()
    console.print(table)
    if groups is not None:
        s = "s" * (groups != 1)
        console.print(f"{groups} cluster{s} at the end (points within {distance:g})")
    if math.isfinite(blown):
        console.print(f"the cloud overflowed at t = {blown:.4g}")
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
