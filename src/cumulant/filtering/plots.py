"""`plot()`: regimes, states with bands, fans of forecasts, and residual diagnostics."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from cumulant.core.errors import InputError
from cumulant.figures import COLORS, INK, MUTED, need_matplotlib, new_figure, style
from cumulant.figures import write as write_figure
from cumulant.filtering.frames import Labels, ModeNames, mode_names, state_names
from cumulant.filtering.picture import (
    BAND_COLOR,
    MOST_ROWS,
    Time,
    draw_modes,
    draw_state,
    joined,
    legends,
    shade,
    short,
    spread_of,
    ticks,
    time_of,
)
from cumulant.filtering.posterior import Posterior, gaussian_posterior
from cumulant.filtering.predictive import quantiles, residuals
from cumulant.filtering.smoothing import Smoothed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["What", "plot", "plot_smoothed"]

What = Literal["regimes", "states", "forecast", "diagnostics"]
FAN = (0.5, 0.8, 0.95)
FAN_COLORS = ("#dbe4f2", "#b9cae6", "#91add8")  # from the widest in
LAGS = 20


def plot(
    post: Posterior,
    what: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    smoothed: Smoothed | None = None,
    names: ModeNames = None,
    skip: int = 0,
) -> Figure:
    """Draw one thing that a filter found, of one series; see `Posterior.plot`.

    Args:
        post: from `filter`, `update` or `forecast`.
        what: ``"regimes"``, ``"states"``, ``"forecast"`` or ``"diagnostics"``; by default
            ``"forecast"`` for a forecast, else ``"regimes"``.
        path: file to write, its format by suffix.
        smoothed: from `smooth`, to draw what all observations say.
        names: of the modes, or of modes and states.
        skip: how many steps at the beginning say nothing about the fit of the model.
    """
    gaussian_posterior("plot", post)
    need_matplotlib()
    what = ("regimes" if post.past is None else "forecast") if what is None else what
    draw = DRAWN.get(what)
    if draw is None:
        raise InputError(f"plot: what must be one of {', '.join(DRAWN)}, not {what!r}.")
    if post.observations[0].ndim != 2:
        batch = tuple(post.observations[0].shape[:-2])
        raise InputError(f"plot: draws one series, but the posterior has a batch {batch}.")
    names = getattr(post.model, "names", None) if names is None else names
    with style():
        figure = draw(post, smoothed, names, skip)
        if path is not None:
            write_figure(figure, path)
    return figure


def plot_smoothed(
    smoothed: Smoothed,
    what: str = "regimes",
    path: str | os.PathLike[str] | None = None,
    *,
    names: ModeNames = None,
) -> Figure:
    """Draw modes or states given all observations; see `Smoothed.plot`."""
    need_matplotlib()
    if what not in ("regimes", "states"):
        raise InputError(f"plot: what must be one of regimes, states, not {what!r}.")
    if smoothed.mode_probabilities.ndim != 2:
        batch = tuple(smoothed.mode_probabilities.shape[:-2])
        raise InputError(f"plot: draws one series, but there is a batch {batch}.")
    names = smoothed.names if names is None else names
    with style():
        if what == "states":
            figure = _states(smoothed, smoothed, names, 0)
        else:
            figure = new_figure(10.0, 2.4)
            axes = figure.subplots()
            time = _time(smoothed.labels, len(smoothed.mode_probabilities))
            _modes(axes, time, smoothed, None, names)
            legends([axes], time, False)
            ticks(axes, time)
        if path is not None:
            write_figure(figure, path)
    return figure


def _time(labels: Labels | None, steps: int) -> Time:
    index = None if labels is None else labels.index
    told = None if index is None else [str(x).removesuffix(" 00:00:00") for x in index]
    return time_of(told, steps, 0)


def _modes(
    axes: Any, time: Time, known: Posterior | Smoothed, so_far: Posterior | None, names: ModeNames
) -> None:
    p = joined([known], "mode_probabilities")
    before = None if so_far is None else joined([so_far], "mode_probabilities")
    draw_modes(axes, time, mode_names(names, p.shape[-1]), p, before)


def _regimes(post: Posterior, smoothed: Smoothed | None, names: ModeNames, skip: int) -> Figure:
    """The series with its most probable regime behind it, and the probabilities below."""
    y = torch.cat(post.observations, -2).detach().cpu().double().numpy()
    rows = min(y.shape[-1], MOST_ROWS)
    figure = new_figure(10.0, 2.3 * rows + 2.4)
    panels = list(figure.subplots(rows + 1, 1, sharex=True, squeeze=False)[:, 0])
    time = _time(post.labels, post.steps)
    known = post if smoothed is None else smoothed
    modes = mode_names(names, post.model.modes)
    for k, panel in enumerate(panels[:-1]):
        panel.plot(time.at, y[:, k], color=INK, linewidth=1.1 * time.width + 0.2, label="observed")
        panel.set_title(short(_column(post, k), 70))
        shade(panel, time, joined([known], "mode_probabilities"), modes if k == 0 else None)
    _modes(panels[-1], time, known, post if smoothed is not None else None, names)
    legends(panels, time, False)
    ticks(panels[-1], time)
    return figure


def _column(post: Posterior, k: int) -> str:
    return f"observation {k + 1}" if post.labels is None else post.labels.columns[k]


def _states(
    post: Posterior | Smoothed, smoothed: Smoothed | None, names: ModeNames, skip: int
) -> Figure:
    """The states with 95 % bands."""
    known = post if smoothed is None else smoothed
    mean, spread = joined([known], "mean"), spread_of([known], "covariance")
    if not mean.shape[-1]:
        raise InputError("plot: the model has no state; plot('regimes') draws its modes.")
    rows = min(mean.shape[-1], MOST_ROWS)
    figure = new_figure(10.0, 2.2 * rows + 0.4)
    panels = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    time = _time(known.labels, len(mean))
    told = state_names(names, mean.shape[-1])
    for k, panel in enumerate(panels):
        draw_state(panel, time, mean[:, k], spread[:, k], smoothed is not None)
        panel.set_title(short(told[k], 70))
        _settled(panel, mean[:, k], spread[:, k])
    legends(panels, time, False)
    ticks(panels[-1], time)
    return figure


def _settled(axes: Any, mean: Any, spread: Any) -> None:
    """Limits by the bands once they have settled: a vague start would dwarf all others."""
    calm = np.maximum.accumulate(spread <= 4 * np.median(spread))
    low, high = float((mean - spread)[calm].min()), float((mean + spread)[calm].max())
    room = 0.05 * max(high - low, 1e-9)
    axes.set_ylim(low - room, high + room)


def _forecast(post: Posterior, smoothed: Smoothed | None, names: ModeNames, skip: int) -> Figure:
    """The end of the series, and a fan: quantiles of the mixture that each step is drawn from."""
    past = post.past
    if past is None:
        raise InputError("plot: a fan is drawn of forecast(post, steps), not of a filter.")
    seen = torch.cat(past.observations, -2).detach().cpu().double().numpy()
    back = min(len(seen), max(4 * post.steps, 24))
    levels = sorted({(1 + s * x) / 2 for x in FAN for s in (-1, 1)} | {0.5})
    fan = quantiles(post, levels).numpy()
    count = seen.shape[-1]
    rows = min(count, MOST_ROWS)
    figure = new_figure(10.0, 2.9 * rows + 0.3)
    panels = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    time = _ahead(past, post, back)
    for k, panel in enumerate(panels):
        last = seen[-1, k]
        join = 0 if np.isnan(last) else 1  # the fan opens at the last observation
        after = time.at[back - join :]
        lines = [np.append([last] * join, row) for row in fan[:, :, k]]
        panel.plot(time.at[:back], seen[-back:, k], color=INK, linewidth=1.2, label="observed")
        for n, x in enumerate(FAN[::-1]):
            look = {"color": FAN_COLORS[n], "linewidth": 0, "label": f"{x:.0%} of the forecast"}
            panel.fill_between(after, lines[n], lines[-1 - n], **look)
        panel.plot(after[join:], lines[len(FAN)][join:], color=COLORS[0], label="median")
        panel.set_title(short(_column(past, k), 70))
    legends(panels, time, False)
    ticks(panels[-1], time)
    return figure


def _ahead(past: Posterior, post: Posterior, back: int) -> Time:
    """The last steps of the series and those of the forecast."""
    index: list[Any] = [None if x.labels is None else x.labels.index for x in (past, post)]
    if any(x is None for x in index):
        first = past.steps - back + 1
        told = [str(first + k) for k in range(back + post.steps)]
    else:
        told = [str(x).removesuffix(" 00:00:00") for x in [*index[0][-back:], *index[1]]]
    return time_of(told, back + post.steps, 0)


def _diagnostics(post: Posterior, smoothed: Smoothed | None, names: ModeNames, skip: int) -> Figure:
    """Residuals over time, their quantiles, their autocorrelations and those of their squares."""
    z = residuals(post).detach().cpu().double().numpy()
    rows = min(z.shape[-1], 3)
    figure = new_figure(10.0, 4.6 * rows)
    grid = figure.subplots(2 * rows, 2, squeeze=False)
    time = _time(post.labels, post.steps)
    for k in range(rows):
        own, where = z[skip:, k], time.at[skip:]
        there = ~np.isnan(own)
        if there.sum() < 3:
            raise InputError("plot: fewer than three residuals say nothing about a model.")
        over, quantile, lagged, squared = *grid[2 * k], *grid[2 * k + 1]
        over.axhline(0.0, color=MUTED, linewidth=0.9)
        over.vlines(
            where[there], 0.0, own[there], color=COLORS[0], linewidth=1.2 * time.width + 0.3
        )
        for edge in (-1.96, 1.96):
            over.axhline(edge, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        over.set_title(f"standardized one-step residuals: {short(_column(post, k), 30)}")
        ticks(over, time)
        _quantiles(quantile, own[there])
        _correlations(lagged, own, "autocorrelation of residuals")
        _correlations(squared, own**2, "autocorrelation of squared residuals")
    return figure


def _quantiles(axes: Any, z: Any) -> None:
    """Residuals in order against the medians of as many normal draws in order (Filliben)."""
    n = len(z)
    place = (np.arange(1, n + 1) - 0.3175) / (n + 0.365)
    place[0], place[-1] = 1 - 0.5 ** (1 / n), 0.5 ** (1 / n)
    normal = import_module("scipy.special").ndtri(place)
    reach = max(np.abs(normal).max(), np.abs(z).max())
    axes.plot([-reach, reach], [-reach, reach], color=MUTED, linewidth=0.9)
    axes.plot(normal, np.sort(z), "o", color=COLORS[0], markersize=3, markeredgewidth=0)
    axes.set_title("quantiles against the normal's")
    axes.set_xlabel("normal")


def _correlations(axes: Any, z: Any, title: str) -> None:
    """Autocorrelations over pairs without a gap, and the band of white noise."""
    there = z[~np.isnan(z)]
    centered = z - float(there.sum()) / len(there)
    lags = np.arange(1, min(LAGS, len(z) // 2) + 1)
    whole = float(np.nansum(centered**2))
    found = [float(np.nansum(centered[k:] * centered[:-k])) / whole for k in lags]
    edge = 1.96 / np.sqrt(len(there))
    axes.axhspan(-edge, edge, color=BAND_COLOR, alpha=0.45, linewidth=0)
    axes.axhline(0.0, color=MUTED, linewidth=0.9)
    axes.vlines(lags, 0.0, found, color=COLORS[0], linewidth=2.2)
    top = max(0.35, 1.15 * float(np.abs(found).max()))
    axes.set_ylim(-top, top)
    axes.set_xticks(lags[4::5] if len(lags) > 5 else lags)
    axes.set_title(title)
    axes.set_xlabel("lag")


DRAWN: dict[str, Callable[[Posterior, Smoothed | None, ModeNames, int], Any]] = {
    "regimes": _regimes,
    "states": _states,
    "forecast": _forecast,
    "diagnostics": _diagnostics,
}
