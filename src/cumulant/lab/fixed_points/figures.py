"""The figures of ``docs/fixed-point.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cumulant.figures import INK, MUTED, cycle, new_figure, series_color, style, tidy, write
from cumulant.lab.fixed_points.study import Study

__all__ = ["draw"]


def draw(study: Study, folder: Path) -> list[Path]:
    """All of them, as PNG."""
    with style():
        return [
            write(_growth(study), folder / "growth.png"),
            write(_first(study), folder / "first-clusters.png"),
            write(_paths(study), folder / "circle.png"),
            write(_limits(study), folder / "limits.png"),
            write(_kept(study), folder / "gaussian-kept.png"),
            write(_distances(study), folder / "energy-distance.png"),
            write(_followed(study), folder / "law-followed.png"),
            write(_counts(study), folder / "clusters.png"),
            write(_dimensions(study), folder / "dimension.png"),
        ]


def _growth(study: Study) -> Any:
    """Rates of the cumulants on the line and of the modes on the circle, theory and quadrature."""
    figure = new_figure(8.2, 3.3)
    left, right = figure.subplots(1, 2)
    for axes, law in ((left, "gaussian"), (right, "circle")):
        for i, r in enumerate(x for x in study.growth if x["law"] == law):
            color = series_color(i)
            axes.plot(r["orders"], r["theory"], color=color, label=f"β = {r['beta']:g}")
            axes.plot(r["orders"], r["measured"], "o", color=color, markersize=3.5)
    left.set(xlabel="cumulant n", ylabel="growth rate", title="from a Gaussian", yscale="log")
    right.set(xlabel="mode k", title="from uniform on the circle")
    right.axhline(2 / np.e, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    right.annotate("2/e", (24, 2 / np.e), (0, 3), textcoords="offset points", color=MUTED)
    left.legend(ncols=2, fontsize=8)
    right.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.08))
    return figure


def _first(study: Study) -> Any:
    """The number of first clusters against temperature, in d = 2, 3, 4."""
    figure = new_figure(5.6, 3.8)
    axes = figure.subplots()
    most = max(r["points"] for r in study.first)
    betas = sorted({r["beta"] for r in study.first})
    for i, d in enumerate((2, 3, 4)):
        rows = [r for r in study.first if r["dimension"] == d and r["points"] == most]
        beta = np.array([r["beta"] for r in rows])
        count = np.array([r["clusters"] for r in rows])
        mean, color = count.mean(-1), series_color(i)
        bars = (mean - count.min(-1), count.max(-1) - mean)
        axes.errorbar(beta, mean, bars, fmt="o", color=color, markersize=4, capsize=3)
        height = np.exp(np.log(mean).mean() - (d - 1) / 2 * np.log(beta).mean())
        told = f"d = {d}: slope {(d - 1) / 2:g}"
        axes.plot(beta, height * beta ** ((d - 1) / 2), color=color, linewidth=1, label=told)
    axes.set(xscale="log", yscale="log", xlabel="β", ylabel="first clusters")
    axes.set_xticks(betas, [f"{b:g}" for b in betas])
    axes.set_yticks((3, 10, 30, 100), ("3", "10", "30", "100"))
    axes.minorticks_off()
    axes.legend()
    return figure


def _paths(study: Study) -> Any:
    """Angles of points on the circle against time."""
    figure = new_figure(3.0 * len(study.paths), 3.4)
    panels = figure.subplots(1, len(study.paths), sharey=True, squeeze=False)[0]
    for axes, r in zip(panels, study.paths, strict=True):
        t, angle = np.array(r["times"]), np.array(r["angles"])
        hue = np.argsort(np.argsort(angle[0])) / angle.shape[1]
        jump = np.abs(np.diff(angle, axis=0, prepend=angle[:1])) > np.pi
        for k in range(angle.shape[1]):
            y = np.where(jump[:, k], np.nan, angle[:, k])
            axes.plot(t, y, color=cycle()(hue[k]), linewidth=0.5)
        axes.set(xlabel="t", ylim=(-np.pi, np.pi))
        axes.set_title(f"β = {r['beta']:g}, fastest mode {r['fastest']}", fontsize=10)
        axes.set_yticks((-np.pi, 0, np.pi), ("−π", "0", "π"))
    panels[0].set_ylabel("angle")
    return figure


def _limits(study: Study) -> Any:
    rows, columns = len(study.limits), len(study.limits[0]["clouds"])
    figure = new_figure(2.3 * columns, 2.35 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for row, entry in zip(panels, study.limits, strict=True):
        first = np.array(entry["clouds"][0])
        hue = np.argsort(np.argsort(np.arctan2(first[:, 1], first[:, 0]))) / len(first)
        for axes, cloud, t in zip(row, entry["clouds"], entry["times"], strict=True):
            x = np.array(cloud)
            tidy(axes)
            axes.scatter(*x.T, c=hue, cmap=cycle(), s=9, linewidths=0.2, edgecolors="white")
            half = 1.1 * np.abs(x).max()
            axes.set(xlim=(-half, half), ylim=(-half, half), aspect="equal")
            axes.set_title(f"t = {t:.3g}", fontsize=9)
            axes.tick_params(labelsize=7)
            axes.locator_params(nbins=3)
        name = entry["contraction"]
        told = f"{name}\n(in its plane)" if name == "layer norm" else name
        row[0].set_ylabel(told, fontsize=11, color=INK)
    figure.supxlabel("scales differ", fontsize=9, color=MUTED)
    return figure


def _kept(study: Study) -> Any:
    names = list(dict.fromkeys(r["contraction"] for r in study.rejected))
    betas = sorted({r["beta"] for r in study.rejected})
    sizes = sorted({r["points"] for r in study.rejected})
    figure = new_figure(2.6 * len(names), 2.1 * len(betas) + 0.5)
    panels = figure.subplots(len(betas), len(names), sharex=True, sharey=True, squeeze=False)
    for r in study.rejected:
        axes = panels[betas.index(r["beta"])][names.index(r["contraction"])]
        i = sizes.index(r["points"])
        axes.plot(r["times"], r["rejected"], color=series_color(i), label=f"N = {r['points']}")
    for i, line in enumerate(panels):
        for j, axes in enumerate(line):
            axes.axhline(0.05, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            axes.set_ylim(-0.03, 1.05)
            if i == 0:
                axes.set_title(names[j])
            if j == 0:
                axes.set_ylabel(f"rejected, β = {betas[i]:g}")
            if i == len(betas) - 1:
                axes.set_xlabel("t")
    for line in panels:
        for j, name in enumerate(names):
            if name in ("sphere", "layer norm"):
                line[j].text(2.2, 0.9, "all N alike", color=MUTED, fontsize=8.5)
    handles, labels = panels[0][0].get_legend_handles_labels()
    dashed = panels[0][0].plot([], [], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))[0]
    handles, labels = [*handles, dashed], [*labels, "5 %, as Gaussian clouds"]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _distances(study: Study) -> Any:
    """At one temperature: how far from Gaussian, beside where 95 % of Gaussian clouds lie."""
    names = list(dict.fromkeys(r["contraction"] for r in study.rejected))
    sizes = sorted({r["points"] for r in study.rejected})
    figure = new_figure(2.6 * len(names), 3.1)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for r in study.rejected:
        if r["beta"] != 1.0:
            continue
        axes, color = panels[names.index(r["contraction"])], series_color(sizes.index(r["points"]))
        known = [(t, x) for t, x in zip(r["times"], r["distance"], strict=True) if x is not None]
        axes.plot(*zip(*known, strict=True), color=color, label=f"N = {r['points']}")
        axes.axhline(r["null"][-1], color=color, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(title=r["contraction"], xlabel="t", yscale="log")
    panels[0].set_ylabel("energy distance, β = 1")
    handles, labels = panels[0].get_legend_handles_labels()
    dashed = panels[0].plot([], [], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))[0]
    handles, labels = [*handles, dashed], [*labels, "95 % of Gaussian clouds lie below"]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _followed(study: Study) -> Any:
    figure = new_figure(5.6, 3.4)
    axes = figure.subplots()
    law = study.followed[0]
    axes.plot(law["times"], law["variance"], color=INK, linestyle=(0, (4, 2)), label="Gaussian law")
    axes.axvline(law["blow_up_time"], color=MUTED, linewidth=1)
    axes.annotate(
        "the law blows up",
        (law["blow_up_time"], 0.3),
        xytext=(5, 0),
        textcoords="offset points",
        color=MUTED,
        fontsize=8.5,
    )
    for i, r in enumerate(study.followed[1:]):
        axes.plot(r["times"], r["variance"], color=series_color(i), label=f"N = {r['points']}")
        axes.fill_between(r["times"], r["least"], r["most"], color=series_color(i), alpha=0.2)
    axes.set(yscale="log", xlabel="t", ylabel="variance")
    axes.legend()
    return figure


def _counts(study: Study) -> Any:
    figure = new_figure(5.6, 3.4)
    axes = figure.subplots()
    for i, r in enumerate(study.counts):
        t, mean, spread = (np.array(r[k])[1:] for k in ("times", "clusters", "deviation"))
        axes.plot(t, mean, color=series_color(i), label=f"β = {r['beta']:g}")
        low = np.maximum(mean - spread, 1)
        axes.fill_between(t, low, mean + spread, color=series_color(i), alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="t", ylabel="clusters")
    ticks = [1, 2, 3, 5, 10, 20, 50]
    axes.set_yticks(ticks, [str(k) for k in ticks])
    axes.minorticks_off()
    axes.legend(ncols=2)
    return figure


def _dimensions(study: Study) -> Any:
    figure = new_figure(5.6, 3.2)
    axes = figure.subplots()
    d = [r["dimension"] for r in study.dimensions]
    for i, (key, label) in enumerate((("cloud", "whole cloud"), ("coordinate", "one coordinate"))):
        share = [r[key] for r in study.dimensions]
        axes.plot(d, share, color=series_color(i), marker="o", markersize=4, label=label)
    dashes = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 3))}
    axes.axhline(0.05, label="5 %, as Gaussian ones", **dashes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(d, [str(k) for k in d])
    axes.set(xlabel="dimension", ylabel="rejected", ylim=(-0.03, 1.05))
    axes.legend(loc="center right")
    return figure
