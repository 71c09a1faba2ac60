"""Curves of a study: means over seeds with their range, and what the search saw.

Two panels stand side by side, so that a page of docs shows them at their own size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cumulant.figures import COLORS, INK, new_figure, style, write
from cumulant.lab.studies.judging import interval
from cumulant.lab.studies.results import Results
from cumulant.lab.studies.running import Run
from cumulant.lab.studies.tasks import objective_of

__all__ = ["draw"]


class _Panel(NamedTuple):
    x: str
    y: str
    label: str
    log_x: bool = False
    log_y: bool = False


_PANELS = {
    "language": (_Panel("step", "bits", "bits per character"),),
    "contrast": (
        _Panel("step", "norm", "norm of the embeddings", log_y=True),
        _Panel("step", "error", "error of the probe"),
    ),
    "recall": (_Panel("dimension", "capacity", "patterns recalled", True, True),),
    "features": (_Panel("features", "error", "error of the output", True, True),),
}
_LINK = (
    _Panel("step", "symmetry", "symmetry, whitened"),
    _Panel("step", "null", "symmetry of mismatched heads"),
    _Panel("step", "definiteness", "definiteness, whitened"),
)
_GRADIENTS = (
    _Panel("step", "gradient_query_key", "gradient of W_q, W_k", log_y=True),
    _Panel("step", "gradient_value_output", "gradient of W_v, W_o", log_y=True),
)
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))


def draw(results: Results, path: Path) -> Path:
    """The figure of a study, written to a file."""
    study = results.study
    panels = list(_PANELS[study.task])
    panels += list(_LINK) if study.settings.get("link") else []
    if study.task == "language" and not study.settings["clip"]:  # what training does by itself
        panels += list(_GRADIENTS)
    search = len(study.tuning.rates) > 2 and study.tuning.steps > 0
    last = study.task in ("language", "contrast") and not study.settings.get("link")
    count = len(panels) + search + last
    rows = math.ceil(count / 2)
    objective = objective_of(study.task)
    shown = next(x for x in panels if x.y == objective)
    with style():
        spare = 2 * rows > count  # a cell without a panel takes the legend
        figure = new_figure(7.9, 3.0 * rows + (0.0 if spare else 0.6))
        axes = figure.subplots(rows, 2, squeeze=False).flatten()
        for panel, place in zip(panels, axes, strict=False):
            _curves(place, results, panel)
        for panel, place in zip(panels, axes, strict=False):
            if panel in _LINK:  # one scale, to compare what is a head's own with chance
                place.sharey(axes[panels.index(_LINK[0])])
        rest = list(axes[len(panels) :])
        if last:
            _final(rest.pop(0), results, shown)
        if search:
            _search(rest.pop(0), results, shown)
        handles, labels = axes[0].get_legend_handles_labels()
        if spare:
            rest[0].set_axis_off()
            rest[0].legend(handles, labels, loc="center", handlelength=3.5)
        else:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
        return write(figure, path)


def _look(k: int) -> dict[str, Any]:
    return {"color": COLORS[k % len(COLORS)], "linestyle": _DASHES[k // len(COLORS) % 3]}


def _runs(results: Results, variant: str, stage: str) -> list[Run]:
    return [x for x in results.runs if x.job.variant == variant and x.job.stage == stage]


def _curves(axes: Any, results: Results, panel: _Panel) -> None:
    """The mean over seeds, and the range between them."""
    for k, variant in enumerate(results.study.variants):
        paths = [[(p[panel.x], p[panel.y]) for p in run.curve if panel.y in p]
                 for run in _runs(results, variant, "final")]  # fmt: skip
        most = results.study.settings.get("most", math.inf)  # there the search for capacity ends
        paths = [[p for p in path if p[1] < most] for path in paths]
        length = min((len(p) for p in paths), default=0)
        if not length:
            continue
        x = [p[0] for p in paths[0][:length]]
        y = np.array([[p[1] for p in path[:length]] for path in paths])
        width = 1.8 if k else 3.6  # the first stays visible beneath one that is its equal
        axes.plot(x, y.mean(0), label=variant, marker="o", markersize=2.5, lw=width, **_look(k))
        axes.fill_between(x, y.min(0), y.max(0), color=COLORS[k % len(COLORS)], alpha=0.15, lw=0)
    axes.set(xlabel=panel.x, ylabel=panel.label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        _plainly(axes.xaxis)
    if panel.log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        _plainly(axes.yaxis, (1, 2, 5) if high < 30 * low else (1,))


def _final(axes: Any, results: Results, panel: _Panel) -> None:
    """The result of every variant with its 95 % interval over seeds."""
    names = list(results.study.variants)
    for k, variant in enumerate(names):
        values = [x.numbers[panel.y] for x in _runs(results, variant, "final")]
        found = interval(values)
        half = found.half if math.isfinite(found.half) else 0.0
        color = COLORS[k % len(COLORS)]
        axes.errorbar([found.mean], [k], xerr=[half], fmt="o", color=color, capsize=3, markersize=4)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.invert_yaxis()
    axes.set(xlabel=f"{panel.label}, test")


def _search(axes: Any, results: Results, panel: _Panel) -> None:
    """What the search saw: the best over temperatures at each rate; crosses are divergences."""
    crosses = False
    tried = sorted(results.study.tuning.rates)
    for k, variant in enumerate(results.study.variants):
        found = _runs(results, variant, "tuning")
        rates = sorted({x.job.rate for x in found})
        y = [_best(found, rate, panel.y) for rate in rates]
        axes.plot(rates, y, **_look(k))
        lost = {x.job.rate for x in found if x.diverged is not None}
        points = [(r, v) for r, v in zip(rates, y, strict=True) if r in lost]
        if points:
            axes.plot(*zip(*points, strict=True), "x", color=COLORS[k % len(COLORS)])
        crosses |= bool(points)
    said = "learning rate (×: some run diverged)" if crosses else "learning rate"
    axes.set(xlabel=said, ylabel=f"{panel.label}, search", xscale="log")
    _plainly(axes.xaxis)
    if len(tried) < 5:
        axes.set_xticks(tried)


def _plainly(axis: Any, multiples: tuple[int, ...] | None = None) -> None:
    """Numbers like 0.01 and 100 on a logarithmic axis, and none between."""
    ticker = import_module("matplotlib.ticker")
    if multiples:
        axis.set_major_locator(ticker.LogLocator(subs=multiples))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _best(runs: Sequence[Run], rate: float, objective: str) -> float:
    scores: dict[float, list[float]] = {}
    for run in runs:
        if run.job.rate == rate:
            score = run.numbers.get("validation", run.numbers[objective])
            scores.setdefault(run.job.beta, []).append(score)
    return min(float(np.mean(x)) for x in scores.values())
