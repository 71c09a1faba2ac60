"""`picture`: the series and its predictions, the states, and the modes, over one axis of time."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import functions
from cumulant.figures import COLORS, INK, MUTED, need_matplotlib, new_figure, style
from cumulant.figures import write as write_figure
from cumulant.filtering.model_files import Names
from cumulant.filtering.posterior import Filtered, Posterior, gaussian_posterior
from cumulant.filtering.smoothing import Smoothed
from cumulant.filtering.tables import deviations, episodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Time",
    "draw_modes",
    "draw_state",
    "joined",
    "legends",
    "picture",
    "shade",
    "short",
    "spread_of",
    "ticks",
    "time_of",
]

BAND = 1.96  # standard deviations to each side: 95 % of a Gaussian
MOST_ROWS = 6  # of observations, and of states
MOST_SHADES = 250
STATE_COLOR, BAND_COLOR = COLORS[3], "#b9c0cf"
MODE_COLORS = tuple(COLORS[i] for i in (0, 1, 2, 4, 5, 3))


class Time(NamedTuple):
    """Where the steps stand on the axis, and where the observed ones end."""

    at: Any
    labels: list[str] | None
    observed: int

    @property
    def width(self) -> float:
        """Of a point or a line: less where there are many."""
        return float(np.clip(500 / len(self.at), 0.25, 1.0))


def picture(
    post: Posterior,
    smoothed: Smoothed | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    labels: Sequence[str] | None = None,
    names: Names | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    forecast: Posterior | None = None,
) -> Figure:
    """Draw what a filter found: predictions of the series, states with 95 % bands, modes.

    Args:
        post: from `filter`, of one series.
        smoothed: from `smooth`. By default, states and modes are those known at each step.
        path: file to write, its format by suffix (png, svg, pdf).
        labels: of the steps: dates, years, or increasing numbers, which then become the axis.
        names: of the modes, or of modes and states as `read_model` returns them. After a `fit`,
            names follow ``Fit.order``.
        columns: names of the observations.
        forecast: from `forecast`, drawn after the last observation.

    Returns:
        The matplotlib figure.
    """
    gaussian_posterior("picture", post)
    need_matplotlib()
    y = torch.cat(post.observations, -2).detach().cpu().double()
    if y.ndim != 2:
        raise InputError(
            f"picture: draws one series, but the posterior has a batch {tuple(y.shape[:-2])}."
        )
    modes, states, units = _named(post, names)
    columns = columns or [f"observation {k + 1}" for k in range(y.shape[-1])]
    if len(columns) != y.shape[-1] or (labels is not None and len(labels) != post.steps):
        raise InputError(
            f"picture: needs {post.steps} labels and {y.shape[-1]} columns, not "
            f"{post.steps if labels is None else len(labels)} and {len(columns)}."
        )
    known: list[Filtered | Smoothed] = [post if smoothed is None else smoothed]
    ahead: list[Filtered] = [post]
    if forecast is not None:
        known, ahead = [*known, forecast], [*ahead, forecast]
    time = time_of(labels, post.steps, 0 if forecast is None else forecast.steps)
    rows, more = min(y.shape[-1], MOST_ROWS), min(len(states), MOST_ROWS)
    heights = [2.3 if rows == 1 else 1.7] * rows + [2.3 if more == 1 else 1.7] * more + [1.7]
    with style():
        figure = new_figure(10.0, sum(heights) + 0.5)
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        panels = list(axes[:, 0])
        _observations(panels[:rows], time, y, ahead, columns)
        _states(panels[rows:-1], time, known, states, smoothed is not None)
        probabilities = joined(known, "mode_probabilities")
        for k, panel in enumerate(panels[:-1]):
            shade(panel, time, probabilities, modes if k == 0 else None)
        for panel, name in zip(panels, [*columns[:rows], *states[:more]], strict=False):
            panel.set_ylabel(short(units.get(name, ""), 30))
        so_far = None if smoothed is None else joined(ahead, "mode_probabilities")
        draw_modes(panels[-1], time, modes, probabilities, so_far)
        legends(panels, time, forecast is not None)
        ticks(panels[-1], time)
        left_out(figure, y.shape[-1] - rows, len(states) - more)
        if path is not None:
            write_figure(figure, path)
    return figure


def _observations(
    panels: list[Any], time: Time, y: Tensor, ahead: Sequence[Filtered], columns: Sequence[str]
) -> None:
    mean, spread = joined(ahead, "observation_mean"), spread_of(ahead, "observation_covariance")
    for k, panel in enumerate(panels):
        _series(panel, time, y[:, k], mean[:, k], spread[:, k])
        panel.set_title(short(columns[k], 70))


def _states(
    panels: list[Any],
    time: Time,
    known: Sequence[Filtered | Smoothed],
    names: Sequence[str],
    smoothed: bool,
) -> None:
    mean, spread = joined(known, "mean"), spread_of(known, "covariance")
    for k, panel in enumerate(panels):
        draw_state(panel, time, mean[:, k], spread[:, k], smoothed)
        panel.set_title(short(names[k], 70))


def legends(panels: list[Any], time: Time, forecast: bool) -> None:
    """The legend of each panel, and a line where the forecast begins."""
    for k, panel in enumerate(panels):
        if forecast:
            between = (time.at[time.observed - 1] + time.at[time.observed]) / 2
            look = {"color": INK, "linewidth": 0.9, "linestyle": (0, (4, 3))}
            panel.axvline(between, **look, label=None if k else "forecast from here")
        told = panel.legend(loc="upper left", bbox_to_anchor=(1.005, 1.03), handlelength=1.4)
        for line in told.get_lines():
            line.set(linewidth=max(line.get_linewidth(), 0.9), alpha=1.0)


def left_out(figure: Any, observations: int, states: int) -> None:
    left = [f"{observations} more observations"] * (observations > 0)
    left += [f"{states} more states"] * (states > 0)
    if left:
        figure.supxlabel(f"not drawn: {', '.join(left)}", fontsize=8.5, color=MUTED)


def _named(post: Posterior, names: Names | Sequence[str] | None) -> Names:
    M, n = post.model.modes, post.model.state_size
    names = getattr(post.model, "names", None) if names is None else names
    modes = names.modes if isinstance(names, Names) else names
    states = names.states if isinstance(names, Names) else None
    out = Names(
        list(modes or [f"mode {k + 1}" for k in range(M)]),
        list(states or [f"state {k + 1}" for k in range(n)]),
        names.units if isinstance(names, Names) else {},
    )
    if len(out.modes) != M or len(out.states) != n:
        raise InputError(
            f"picture: needs names of {M} modes and {n} states, not of {len(out.modes)} and "
            f"{len(out.states)}."
        )
    return out


def short(text: str, most: int) -> str:
    """A title that fits."""
    # A dollar sign would begin a formula.
    return textwrap.shorten(text, most, placeholder="…").replace("$", r"\$")


def _wrapped(text: str) -> str:
    return textwrap.fill(short(text, 44), 22)


def joined(parts: Sequence[Filtered | Smoothed], name: str) -> Any:
    """A field of several results, one after another."""
    each: list[Tensor] = [getattr(x, name).detach().cpu().double() for x in parts]
    return torch.cat(each).numpy()


def spread_of(parts: Sequence[Filtered | Smoothed], name: str) -> Any:
    """Half the width of the 95 % band of a covariance, as `joined`."""
    each = [deviations(getattr(x, name).detach().cpu().double()) for x in parts]
    return BAND * torch.cat(each).numpy()


def time_of(labels: Sequence[str] | None, steps: int, future: int) -> Time:
    """Steps by their labels if these are numbers that grow, else one after another from 1."""
    total = steps + future
    if labels is None:
        return Time(np.arange(1.0, total + 1), None, steps)
    dates = all(re.fullmatch(r"\d{8}", x) for x in labels)  # 20200131 is no number
    try:
        at = np.array([] if dates else [float(x) for x in labels])
    except ValueError:
        at = np.empty(0)
    if len(at) and np.isfinite(at).all() and (np.diff(at) > 0).all():
        pace = np.median(np.diff(at)) if len(at) > 1 else 1.0
        return Time(np.append(at, at[-1] + pace * np.arange(1, future + 1)), None, steps)
    return Time(np.arange(1.0, total + 1), list(labels), steps)


def _series(axes: Any, time: Time, seen: Tensor, mean: Any, spread: Any) -> None:
    axes.fill_between(
        *(time.at, mean - spread, mean + spread),
        color=BAND_COLOR,
        alpha=0.55,
        linewidth=0,
        label="predicted, 95 %",
    )
    axes.plot(time.at, mean, color=MUTED, linewidth=1.0 * time.width, label="predicted")
    t = time.at[: time.observed]
    axes.plot(t, seen.numpy(), color=INK, linewidth=0.9 * time.width, alpha=0.8)
    axes.plot([], [], color=INK, linewidth=0.9, marker="o", markersize=2.4, label="observed")
    axes.plot(t, seen.numpy(), "o", color=INK, markersize=2.4 * time.width, markeredgewidth=0)
    inside = seen[~seen.isnan()].numpy()
    low, high = (float(inside.min()), float(inside.max())) if len(inside) else (0.0, 0.0)
    # Predictions from a vague start would dwarf all others, and so would those far ahead.
    calm = np.maximum.accumulate(spread <= 4 * np.median(spread))
    room = max(high - low, float(np.median(spread)), 1e-9)
    low = min(low, max(float((mean - spread)[calm].min()), low - room))
    high = max(high, min(float((mean + spread)[calm].max()), high + room))
    axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))


def draw_state(axes: Any, time: Time, mean: Any, spread: Any, smoothed: bool) -> None:
    """A state and its band."""
    axes.fill_between(
        *(time.at, mean - spread, mean + spread),
        color=STATE_COLOR,
        alpha=0.22,
        linewidth=0,
        label="95 %",
    )
    told = f"given {'all data' if smoothed else 'data so far'}"
    axes.plot(time.at, mean, color=STATE_COLOR, linewidth=0.8 + 0.7 * time.width, label=told)


def shade(axes: Any, time: Time, probabilities: Any, names: list[str] | None) -> None:
    """Behind the curves, the most probable mode where it is not the usual one."""
    found = episodes(functions.from_numpy(probabilities))
    usual = int(probabilities.sum(0).argmax())
    if sum(map(len, found)) > MOST_SHADES:
        return
    edges = _edges(time.at)
    for mode, each in enumerate(found):
        told = None if names is None else _wrapped(f"mostly {names[mode]}")
        for part in each if mode != usual else []:
            color = MODE_COLORS[mode % len(MODE_COLORS)]
            ends = edges[part.first], edges[part.last + 1]
            axes.axvspan(*ends, color=color, alpha=0.1, linewidth=0, zorder=0, label=told)
            told = None


def _edges(at: Any) -> Any:
    """Between the steps, and as far outside the first and the last."""
    if len(at) < 2:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    middle = (at[1:] + at[:-1]) / 2
    return np.concatenate([[2 * at[0] - middle[0]], middle, [2 * at[-1] - middle[-1]]])


def draw_modes(axes: Any, time: Time, names: list[str], probabilities: Any, so_far: Any) -> None:
    """Areas, the last mode at the bottom; thin lines for what was known at each step."""
    edges = _edges(time.at)
    above = np.ones(len(time.at))
    for j, name in enumerate(names):
        below = above - probabilities[:, j]
        axes.stairs(
            *(above, edges),
            baseline=np.clip(below, 0, 1),
            fill=True,
            color=MODE_COLORS[j % len(MODE_COLORS)],
            alpha=0.45 if j < len(MODE_COLORS) else 0.2,
            linewidth=0,
            label=_wrapped(name),
        )
        above = below
    if so_far is not None and len(names) > 1:
        lines = np.cumsum(so_far[:, :0:-1], -1)
        told = f"{names[-1]}, so far" if len(names) == 2 else "given data so far"
        for k in range(lines.shape[1]):
            look = {"linewidth": 0.9 * time.width, "alpha": max(time.width, 0.4)}
            axes.plot(time.at, lines[:, k], color=INK, **look, label=told)
            told = None
    axes.set_ylim(0, 1)
    axes.set_title("probability of the modes")
    axes.set_xlim(edges[0], edges[-1])


def ticks(axes: Any, time: Time) -> None:
    """Years where labels begin with them, else some of the labels."""
    if time.labels is None:
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.set_xlabel("step" if float(time.at[0]) == 1.0 else "")
        return
    if at_years := _years(time):
        axes.set_xticks([float(time.at[k]) for k in at_years], list(at_years.values()))
        return
    longest = max(len(x) for x in time.labels)
    count = min(len(time.labels), max(2, min(10, 100 // max(longest, 1))))
    chosen = sorted({round(k * (len(time.labels) - 1) / (count - 1)) for k in range(count)})
    axes.set_xticks(
        [float(time.at[k]) for k in chosen], [short(time.labels[k], 24) for k in chosen]
    )


def _years(time: Time) -> dict[int, str]:
    """Steps where a year begins that gets a tick, if labels begin with years and span enough."""
    found = [re.match(r"(\d{4})(?!\d)", x) for x in time.labels or []]
    years = [int(m[1]) for m in found if m is not None]
    if len(years) < len(found) or years != sorted(years) or years[-1] - years[0] < 4:
        return {}
    pace = next(p for p in (1, 2, 5, 10, 20, 50, 100, 10000) if years[-1] - years[0] <= 12 * p)
    # A year that the file enters in the middle has no tick.
    first = [k for k in range(1, len(years)) if years[k] > years[k - 1]]
    return {k: str(years[k]) for k in first if years[k] % pace == 0}
