"""The page of a training run: alarms in sentences, curves, definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.lens.monitoring.alarms import Alarm, Bell, Thresholds
from cumulant.lens.monitoring.log import FIGURES, MONITOR_COLUMNS
from cumulant.pages import assemble, count, finite

if TYPE_CHECKING:
    from cumulant.lens.monitoring.log import MonitorLog, Watched

__all__ = ["render"]

_PACKAGES = ("cumulant.pages", "cumulant.lens.monitoring")
_SCRIPTS = ("base.js", "plot.js", "curves.js")
MOST_STEPS, MOST_ALARMS = 400, 12
_HEADLINES = {
    "entropy": "Entropy collapse",
    "logits": "Growing logits",
    "finite": "NaN or infinity",
}


class _Figure(NamedTuple):
    """How a figure is drawn; `line` is a threshold, which means trouble `below` or above."""

    column: str
    label: str
    color: int
    log: bool = False
    summary: str = "mean"
    line: float | None = None
    below: bool = False


def render(log: MonitorLog, title: str, thresholds: Thresholds) -> str:
    """The page as HTML.

    Raises:
        InputError: nothing was watched, or jinja2 is not installed.
    """
    if not log.steps:
        raise InputError("nothing was watched yet: train a step, then call monitor.step().")
    steps = _thinned(log.steps)
    bell = Bell(thresholds)
    alarms = [alarm for watched in log.steps for alarm in bell.check(watched)]
    last = log.steps[-1]
    heads = len(last.rows["head"])
    hidden = len(alarms) - MOST_ALARMS
    values = {
        "title": title,
        "facts": [
            ("watched steps", len(log.steps)),
            ("first step", log.steps[0].step),
            ("last step", last.step),
            ("layers", len(last.modules)),
            ("heads", heads),
            ("queries per layer", int(last.rows["queries"].max())),
        ],
        "heading": count(len(alarms), "alarm") if alarms else "No alarm",
        "alarms": [_described(alarm) for alarm in alarms[:MOST_ALARMS]],
        "more": f"{count(hidden, 'further alarm')} not shown." if hidden > 0 else "",
        "quiet": (
            f"No layer's entropy collapsed (below {thresholds.entropy:g} of uniform weights, no "
            f"sink), and no scores grew beyond {thresholds.logits:g}."
        ),
        "definitions": [MONITOR_COLUMNS[name] for name in (*FIGURES, "queries", "step")],
    }
    return assemble(_PACKAGES, scripts=_SCRIPTS, data=_payload(steps, thresholds), values=values)


def _described(alarm: Alarm) -> dict[str, Any]:
    message = alarm.message[0].upper() + alarm.message[1:]
    headline = f"{_HEADLINES[alarm.kind]} in layer {alarm.layer}"
    return {"headline": headline, "message": message, "step": alarm.step}


def _thinned(steps: Sequence[Watched]) -> list[Watched]:
    """At most so many that the page stays small and its points apart; always the last."""
    every = -(-len(steps) // MOST_STEPS)
    return [x for i, x in enumerate(steps) if (len(steps) - 1 - i) % every == 0]


def _payload(steps: Sequence[Watched], limits: Thresholds) -> dict[str, Any]:
    figures = (
        _Figure("entropy_share", "Entropy, share of uniform", 0, line=limits.entropy, below=True),
        _Figure("score_max", "Largest score", 1, log=True, summary="max", line=limits.logits),
        _Figure("effective_keys", "Effective keys", 0, log=True),
        _Figure("score_variance", "Score variance", 3, log=True),
        _Figure("sink_mass", "Mass on the first token", 2),
    )
    modules: dict[int, str] = {}
    for watched in steps:
        modules |= watched.modules
    return {
        "steps": [watched.step for watched in steps],
        "losses": [_number(watched.loss) for watched in steps],
        "figures": [figure._asdict() for figure in figures],
        "layers": [_layer(steps, figures, n, modules[n]) for n in sorted(modules)],
    }


def _layer(
    steps: Sequence[Watched], figures: Sequence[_Figure], number: int, module: str
) -> dict[str, Any]:
    """A layer: of each figure, a row over time for the whole, and one for each head."""
    times = [watched.layer(number) for watched in steps]
    size = max(len(of["entropy"]) for of in times)
    whole: dict[str, list[float | None]] = {}
    heads: dict[str, list[list[float | None]]] = {}
    for figure in figures:
        name = figure.column
        whole[name] = [_summary(of[name], figure.summary) for of in times]
        heads[name] = [
            [_number(float(of[name][h])) if h < len(of[name]) else None for of in times]
            for h in range(size)
        ]
    return {"number": number, "module": module, "whole": whole, "heads": heads}


def _summary(x: Tensor, how: str) -> float | None:
    if not len(x):
        return None
    return _number(float(x.max() if how == "max" else x.mean()))


def _number(x: float | None) -> float | None:
    """Four digits; None for what cannot be drawn."""
    return float(f"{x:.4g}") if x is not None and finite(x) else None
