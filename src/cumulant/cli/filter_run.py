"""What `cumulant filter` does: read, fit, filter, smooth, write, tell."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import typer
from torch import Tensor

from cumulant.cli.filter_regimes import Regimes, told_about
from cumulant.cli.filter_report import Learned, copy_example, run_again, tell, tell_json
from cumulant.cli.progress import Shown
from cumulant.core.errors import InputError
from cumulant.core.files import make_folder
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.figures import need_matplotlib
from cumulant.filtering.filters import filter, update
from cumulant.filtering.fitting import fit
from cumulant.filtering.forecasting import forecast
from cumulant.filtering.frames import Labels
from cumulant.filtering.model import SwitchingLinearGaussian
from cumulant.filtering.model_files import Names, example_files, read_model, write_model
from cumulant.filtering.parameters import coordinates
from cumulant.filtering.picture import picture
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.recursion import Scheme, bounded, scheme_of
from cumulant.filtering.series import Series, counted, listed, read_series
from cumulant.filtering.smoothing import Smoothed, smooth
from cumulant.filtering.structure import started
from cumulant.filtering.tables import compared, labels_of, summarize, table

MOST_AHEAD = 100_000


class _Run(NamedTuple):
    """What to filter, where the results go, and the fit that came before."""

    series: Series
    model: SwitchingLinearGaussian
    names: Names
    folder: Path
    learned: Learned | None = None


def run_filter(
    series: Path | None,
    model: Path | None,
    output: Path,
    regimes: str | None,
    switching: str | None,
    order: int | None,
    starts: int | None,
    collapse: str | None,
    columns: str | None,
    ahead: int,
    learn: bool,
    draw: bool,
    as_json: bool,
    example: bool,
) -> None:
    """Filter, with the options of the command in its order."""
    try:
        if not 0 <= ahead <= MOST_AHEAD:
            raise InputError(f"--forecast must be from 0 to {MOST_AHEAD}, not {ahead}.")
        if example:
            series, model = _of_the_example(series, model, columns)
        asked = Regimes.asked(regimes, switching, order, starts, learn or model is not None)
        run = _read(series, model, asked, columns, output)
        kept = _collapse(collapse, asked)
        _bounded(run, scheme_of("--collapse", kept), ahead)
        make_folder(output)
        if asked is not None:
            run = _regimes(run, asked, kept)
        elif learn:
            run = _fitted(run, kept)
        _work(run, kept, ahead, draw, as_json, example)
    except KeyboardInterrupt:
        typer.echo("cumulant: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None


def _of_the_example(*given: Path | str | None) -> list[Path]:
    """The example's series and model; nothing of the kind may be given."""
    if any(x is not None for x in given):
        raise InputError("--example has its own series and model; leave out yours.")
    return example_files()


def _collapse(given: str | None, asked: Regimes | None) -> str | int:
    """The collapse that is asked for, or the one that suits the model."""
    if given is None:
        return "gpb2" if asked is None else asked.collapse
    return int(given) if given.isdecimal() and len(given) < 10 else given


def _read(
    series: Path | None,
    model: Path | None,
    asked: Regimes | None,
    columns: str | None,
    folder: Path,
) -> _Run:
    """All input, checked."""
    if series is None:
        raise InputError("SERIES (a CSV file) is missing; cumulant filter --example shows one.")
    if asked is not None:
        ready = asked.model()
        parameters, names = ready, ready.names
    elif model is not None:
        parameters, names = read_model(model)
    else:
        raise InputError(
            "--regimes (how many) or --model (a TOML file) is missing; cumulant filter --example "
            "shows a model."
        )
    chosen = None
    if columns is not None:
        try:
            chosen = [x.strip() for x in next(csv.reader([columns]), list[str]())]
        except csv.Error as error:
            raise InputError(f"--columns must be names separated by commas: {error}.") from None
    found = read_series(series, chosen)
    told_about(series, found)
    p = parameters.observation_size
    if found.values.shape[-1] != p:
        raise InputError(
            f"the model observes {p} number{'s' * (p != 1)} at each step, but {series} has "
            f"{counted(len(found.names), 'column')} of them: {listed(found.names)}. Choose with "
            "--columns."
        )
    if parameters.input_size:
        raise InputError(
            f"{model} takes inputs, which the command cannot read; filter in Python: "
            "cumulant.filtering.filter(model, observations, inputs=...)."
        )
    if bool(found.values.isnan().all()):
        raise InputError(f"{series} has no observation at all: every cell is missing.")
    return _Run(found, parameters, names, folder)


def _bounded(run: _Run, scheme: Scheme, ahead: int) -> None:
    """Refuse what would not fit in memory, before the work begins."""
    T = len(run.series.values) + ahead
    n, modes = run.model.state_size, run.model.modes
    bounded(scheme, modes, modes * (n + n * n + 1), T)
    if run.model.steps is not None and run.model.steps < T:
        raise InputError(
            f"the model's parameters change over {run.model.steps} steps, but {T} are needed."
        )


def _work(
    run: _Run, collapse: str | int, ahead: int, draw: bool, as_json: bool, example: bool
) -> None:
    """Filter, smooth, write, tell."""
    steps: list[Posterior] = []
    try:
        with Shown("filtering") as progress:
            post = filtered(run.model, run.series.values, collapse, progress, steps)
            progress(Progress(0, None, "smoothing"))
            later = smooth(run.model, post)
            future = forecast(post, ahead) if ahead else None
            found = table(run.series, run.names, post, later, future)
    except KeyboardInterrupt:
        _interrupted(run, steps)
        raise typer.Exit(130) from None
    written = [found.write(run.folder / "filtered.csv")]
    written += copy_example(run.folder) if example else []
    written += _drawn(run, post, later, future) if draw else []
    modes = summarize(run.model, run.names.modes, later)
    written += [run.learned.path] if run.learned else []
    again = run_again(run.folder) if example else None
    (tell_json if as_json else tell)(run.series, post, modes, written, again, run.learned)
    if ahead and not as_json:
        rows = "row" if ahead == 1 else f"{ahead} rows"
        typer.echo(f"the forecast is the last {rows} of {written[0]}")


def _regimes(run: _Run, asked: Regimes, collapse: str | int) -> _Run:
    """The run with a ready model, fitted; names are those of the fitted order."""
    y = run.series.values
    seen = y[~y.isnan()]
    if len(seen) > 1 and bool((seen == seen[0]).all()):
        raise InputError(
            f"every observation is {float(seen[0]):g}, so there are no regimes to find."
        )
    free = sum(block.size for block in coordinates(started(run.model, y)).blocks)
    if (there := int((~y.isnan()).sum())) <= free:
        raise InputError(
            f"{counted(there, 'observation')} cannot tell {free} parameters; ask for fewer regimes "
            "or lags."
        )
    with Shown("fitting") as progress:
        how: Any = {"progress": _shown(progress), "throw": False}
        found = fit(run.model, y, collapse=collapse, starts=asked.starts, **how)
    labels = Labels(labels_of(run.series), tuple(run.series.names))
    found = replace(found, evidence=found.evidence._replace(labels=labels))
    path = write_model(run.folder / "fitted.toml", found.model, run.names)
    if not found.converged:
        typer.echo(f"cumulant: the fit has not converged: {found.status}", err=True)
    return run._replace(model=found.model, learned=Learned([], found, path, found.summary()))


def _shown(progress: ProgressCallback) -> ProgressCallback:
    def show(now: Progress) -> None:
        progress(replace(now, what=f"fitting: log-likelihood {now.value:.6g}"))

    return show


def _fitted(run: _Run, collapse: str | int) -> _Run:
    """The run with the most likely parameters, in the order and by the names of the file."""
    y = run.series.values
    with Shown("fitting") as progress:
        how: Any = {"progress": _shown(progress), "throw": False}
        # order_by=False: the names of the file belong to its order.
        found = fit(run.model, y, collapse=collapse, order_by=False, **how)
    path = write_model(run.folder / "fitted.toml", found.model, run.names)
    typer.echo(
        f"cumulant: fitted, log-likelihood {found.log_likelihood:.6g} after {found.steps} steps "
        f"({found.message}); the model is in {path}",
        err=True,
    )
    if not found.converged:
        typer.echo(f"cumulant: the fit has not converged: {found.status}", err=True)
    learned = Learned(compared(run.model, found.model, run.names.modes), found, path)
    return run._replace(model=found.model, learned=learned)


def _drawn(run: _Run, post: Posterior, later: Smoothed, future: Posterior | None) -> list[Path]:
    """The picture, if there is anything to draw it with."""
    try:
        need_matplotlib()
    except InputError as error:
        typer.echo(f"cumulant: no picture: {error}", err=True)
        return []
    target = run.folder / "filter.png"
    about: dict[str, Any] = {"labels": run.series.labels, "names": run.names, "forecast": future}
    try:
        picture(post, later, target, columns=run.series.names, **about)
    except KeyboardInterrupt:
        typer.echo("cumulant: interrupted; the table is written, the picture is not", err=True)
        raise typer.Exit(130) from None
    return [target]


def filtered(
    model: SwitchingLinearGaussian,
    y: Tensor,
    collapse: str | int,
    progress: ProgressCallback,
    steps: list[Posterior],
) -> Posterior:
    """The posterior over all steps, as `filter` gives it; `steps` holds what is done so far."""
    # Nothing is known before the first observation, so that one is where `filter` may begin.
    first = int((~y.isnan()).any(-1).nonzero()[0]) + 1
    if not model.state_size:
        first = len(y)  # modes alone: all steps at once take no time
    steps.append(filter(model, y[:first], collapse=collapse))
    progress(Progress(first, len(y)))
    latest = steps[0]
    for t in range(first, len(y)):
        latest = update(latest.latest(), y[t])
        steps.append(latest)
        progress(Progress(t + 1, len(y)))
    return joined(steps)


def joined(steps: list[Posterior]) -> Posterior:
    """A posterior and those of the single steps after it, as one."""
    first, rest = steps[0], steps[1:]
    return replace(
        first,
        observations=first.observations + tuple(x.observations[-1] for x in rest),
        beliefs=(*first.beliefs, *(x.beliefs[-1] for x in rest)),
        step_totals=first.step_totals + tuple(x.step_totals[-1] for x in rest),
        log_predicted=first.log_predicted + tuple(x.log_predicted[-1] for x in rest),
    )


def _interrupted(run: _Run, steps: list[Posterior]) -> None:
    """Keep what there is: what was known at each step that was reached."""
    if not steps:
        typer.echo("cumulant: interrupted; nothing was written", err=True)
        return
    post = joined(steps)
    path = table(run.series, run.names, post).write(run.folder / "filtered.csv")
    told = f"the first {post.steps} of {len(run.series.values)} steps, filtered, are in {path}"
    typer.echo(f"cumulant: interrupted; {told}", err=True)
