"""Pictures of a `Trajectory`: clouds at several times, and the observables."""

from __future__ import annotations

import math
import os
import textwrap
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cumulant.core.errors import InputError
from cumulant.core.typed import linalg, tolist
from cumulant.dynamics.shape import clusters
from cumulant.figures import (
    MUTED,
    cycle,
    need_matplotlib,
    new_figure,
    ramp,
    series_color,
    short_logarithms,
    style,
    tidy,
)
from cumulant.figures import write as write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cumulant.dynamics.trajectory import Trajectory

__all__ = ["View", "blown_note", "clusters_at", "plot", "title"]

_MOST_POINTS, _MOST_COUNTS = 3000, 120


class View:
    """The first cloud of a batch as an array ``(T, n, 1 to 3)`` with limits and axis labels."""

    def __init__(self, run: Trajectory) -> None:
        x = run.states.detach().cpu().double()
        if x.numel() == 0:
            raise InputError(f"plot: there is nothing to draw in states {tuple(x.shape)}.")
        x = x.reshape(len(x), -1, *x.shape[-2:])[:, 0]
        if x.shape[1] > _MOST_POINTS:
            chosen = torch.linspace(0, x.shape[1] - 1, _MOST_POINTS).long()
            x = x[:, chosen]
        self.labels = ["$x_1$", "$x_2$", "$x_3$"][: x.shape[-1]]
        self.note = ""
        largest = float(x.abs().max())
        if largest > 1e100:  # differences of such numbers overflow
            unit = 10.0 ** math.floor(math.log10(largest))
            x, self.note = x / unit, f"in units of {unit:.0e}"
        if x.shape[-1] > 3:
            pooled = x.reshape(-1, x.shape[-1])
            pooled = pooled / pooled.abs().max().clamp_min(1e-300)
            pooled = pooled - pooled.mean(0)
            values, vectors = linalg.eigh(pooled.mT @ pooled)
            share = float(values[-2:].sum() / values.sum().clamp_min(1e-300))
            x = x @ vectors[:, [-1, -2]]
            self.labels = ["first axis", "second axis"]
            axes = f"two principal axes of all states, {share:.0%} of the variance"
            self.note = "; ".join(filter(None, [axes, self.note]))
        norms: torch.Tensor = linalg.vector_norm(x, dim=-1)
        on_sphere = x.shape[-1] in (2, 3) and bool(norms.isfinite().all())
        radius = float(norms[1:].mean()) if len(norms) > 1 else float(norms.mean())
        # The start may lie elsewhere; a contraction brings it here in one step.
        spread = float((norms[1:] - radius).abs().max()) if len(norms) > 1 else math.inf
        self.radius = radius if on_sphere and spread < 1e-3 * radius else None
        self.points = x.numpy()
        self.times = tolist(run.times)
        self.dimension = self.points.shape[-1]
        # Color follows a point through time: its angle (or place) at the start.
        first = self.points[0] - self.points[0].mean(0)
        key = np.arctan2(first[:, 1], first[:, 0]) if self.dimension > 1 else first[:, 0]
        self.hue = np.argsort(np.argsort(key)) / max(1, len(key) - 1)

    @property
    def colors(self) -> Any:
        """The color map of `hue`; needs matplotlib."""
        return cycle() if self.dimension > 1 else ramp()

    def limits(self, frames: Any) -> list[tuple[float, float]]:
        """A cube around these frames."""
        shown = self.points[frames].reshape(-1, self.dimension)
        low, high = shown.min(0), shown.max(0)
        # Not closer than a hundredth of the distance from the origin: below it is rounding.
        floor = 0.01 * float(np.abs(shown).max())
        half = 0.54 * max(float((high - low).max()), floor, 1e-300)
        return [(c - half, c + half) for c in (low + high) / 2]

    def draw(self, axes: Any, k: int, limits: list[tuple[float, float]]) -> Any:
        """One cloud."""
        tidy(axes)
        size = float(np.clip(2500 / self.points.shape[1], 2.5, 26))
        look = {"c": self.hue, "cmap": self.colors, "vmin": 0, "vmax": 1, "s": size}
        look |= {"linewidths": 0.3, "edgecolors": "white", "alpha": 0.9}
        x = self.points[k]
        if self.radius is not None:
            self._sphere(axes, self.radius)
        if self.dimension == 1:
            axes.set_yticks([])
            drawn = axes.scatter(x[:, 0], np.zeros(len(x)), **look)
        else:
            drawn = axes.scatter(*x.T, **look)
            axes.set_ylim(limits[1])
        axes.set_xlim(limits[0])
        axes.set_xlabel(self.labels[0])
        if self.dimension > 1:
            axes.set_ylabel(self.labels[1])
        ticker = import_module("matplotlib.ticker")
        for axis in (axes.xaxis, axes.yaxis) if self.dimension == 2 else (axes.xaxis,):
            axis.set_major_locator(ticker.MaxNLocator(4))
        if self.dimension < 3:
            axes.ticklabel_format(axis="x" if self.dimension == 1 else "both", useOffset=False)
        if self.dimension == 3:
            axes.set_zlabel(self.labels[2])
            for axis, pad in ((axes.xaxis, 2), (axes.yaxis, 2), (axes.zaxis, 2)):
                axis.labelpad = pad
            axes.set_zlim(limits[2])
            axes.set_box_aspect((1, 1, 1), zoom=0.84)
            for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
                axis.set_pane_color((0.975, 0.98, 0.99, 1.0))
                axis.set_major_locator(ticker.MaxNLocator(3))
        elif self.dimension == 2:
            axes.set_aspect("equal")
        return drawn

    def _sphere(self, axes: Any, radius: float) -> None:
        """The circle, or meridians and parallels of the sphere, on which the points stay."""
        turn = np.linspace(0, 2 * np.pi, 73)
        look = {"color": MUTED, "linewidth": 0.5, "alpha": 0.45, "zorder": 0}
        if self.dimension == 2:
            axes.plot(radius * np.cos(turn), radius * np.sin(turn), **look)
            return
        for height in np.arange(-60, 61, 30) * np.pi / 180:
            ring = radius * np.cos(height)
            level = np.full_like(turn, radius * np.sin(height))
            axes.plot(ring * np.cos(turn), ring * np.sin(turn), level, **look)
        for east in np.arange(0, 180, 30) * np.pi / 180:
            across = radius * np.cos(turn)
            axes.plot(across * np.cos(east), across * np.sin(east), radius * np.sin(turn), **look)

    @property
    def projection(self) -> str | None:
        return "3d" if self.dimension == 3 else None


def _label(name: str) -> str:
    return name.replace("_", " ")


def title(t: float) -> str:
    """Of a cloud at time t."""
    return f"t = {t:.3g}"


_COLUMNS = 4


def plot(
    run: Trajectory, path: str | os.PathLike[str] | None, snapshots: int, reach: float
) -> Figure:
    """See `Trajectory.plot`."""
    if snapshots < 1:
        raise InputError(f"plot: snapshots must be at least 1, not {snapshots}.")
    need_matplotlib()
    view = View(run)
    last = len(run.times) - 1
    frames = sorted({round(k * last / max(1, snapshots - 1)) for k in range(snapshots)})
    names = ["", *run.observables] if last else []  # the clusters first
    rows = -(-len(names) // _COLUMNS)
    with style():
        heights = [3.0, *[2.2] * rows]
        figure = new_figure(max(7.0, 2.8 * len(frames)), sum(heights))
        parts: Any = figure.subfigures(1 + rows, 1, height_ratios=heights, squeeze=False)[:, 0]
        note = _clouds(parts[0], view, frames)
        told = "; ".join(filter(None, [view.note, note, _ensemble_note(run), blown_note(run)]))
        if told:
            parts[0].supxlabel(told, fontsize=8.5, color=MUTED)
        for i, name in enumerate(names):
            width = min(len(names), _COLUMNS)
            axes = parts[1 + i // _COLUMNS].add_subplot(1, width, i % _COLUMNS + 1)
            if name:
                _curves(axes, run, name, view.times, i)
            else:
                _counts(axes, run, view.times, reach)
        short_logarithms(figure)
    if path is not None:
        write_figure(figure, path)
    return figure


def _clouds(part: Any, view: View, frames: list[int]) -> str:
    """Snapshots side by side; says so where each has its own scale."""
    # Unbounded growth would shrink the start to a dot: then every snapshot has its own scale.
    sizes = [np.abs(view.points[k]).max() for k in frames]
    common = max(sizes) <= 10 * max(min(sizes), 1e-300)
    shared = view.limits(frames)
    for i, k in enumerate(frames):
        axes = part.add_subplot(1, len(frames), i + 1, projection=view.projection)
        view.draw(axes, k, shared if common else view.limits([k]))
        axes.set_title(title(view.times[k]))
        if i and view.dimension == 2:
            axes.set_ylabel("")
    return "" if common else "scales differ"


def _ensemble_note(run: Trajectory) -> str:
    clouds = run.states[0].numel() // max(1, run.states.shape[-1] * run.states.shape[-2])
    return f"first of {clouds} clouds; below, median and 5 to 95 %" if clouds > 1 else ""


def blown_note(run: Trajectory) -> str:
    """Says so where a cloud blew up, and when."""
    when = run.blow_up_time[run.blow_up_time.isfinite()]
    return f"left the range of its numbers at t = {float(when.min()):.3g}" if len(when) else ""


def clusters_at(run: Trajectory, k: int, reach: float) -> int | None:
    """The number of clusters of the first cloud in one state; None once it has blown up."""
    cloud = run.states[k].detach().reshape(-1, *run.states.shape[-2:])[0]
    return int(clusters(cloud, distance=reach).count) if bool(cloud.isfinite().all()) else None


def _counts(axes: Any, run: Trajectory, times: list[float], reach: float) -> None:
    """The number of clusters against time, of the first cloud."""
    last = len(times) - 1
    frames = sorted({round(k * last / _MOST_COUNTS) for k in range(_MOST_COUNTS + 1)})
    found = {times[k]: clusters_at(run, k, reach) for k in frames}
    seen = {t: count for t, count in found.items() if count is not None}
    counts = list(seen.values())
    axes.step(list(seen), counts, where="post", color=series_color(0))
    if counts and max(counts) > 20 * min(counts):
        axes.set_ylim(0.8, 1.3 * max(counts))
        axes.set_yscale("log")
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1.08 * max(counts, default=1))
    axes.set_title(f"clusters (within {reach:g})")
    axes.set_xlabel("t")


def _curves(axes: Any, run: Trajectory, name: str, times: list[float], i: int) -> None:
    """An observable against time: one cloud's curve, or the ensemble's median and range."""
    x = run.observables[name].detach().cpu().double()
    x = x.reshape(len(x), -1).numpy()
    if x.shape[1] > 1:
        low, high = np.quantile(x, 0.05, axis=1), np.quantile(x, 0.95, axis=1)
        axes.fill_between(times, low, high, color=series_color(i), alpha=0.18, linewidth=0)
        x = np.median(x, axis=1, keepdims=True)
    axes.plot(times, x[:, 0], color=series_color(i))
    known = x[np.isfinite(x)]
    size = float(np.abs(known).max()) if len(known) else 0.0
    if len(known) and bool((known > 0).all()) and size > 20 * known.min():
        axes.set_yscale("log")
    elif len(known) and not known.max() - known.min() > 0.1 * size:
        # What hardly changes looks it.
        middle, room = float(known.max() + known.min()) / 2, 0.1 * size or 0.1
        axes.set_ylim(middle - room, middle + room)
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_title(textwrap.fill(_label(name), 24))
    axes.set_xlabel("t")
