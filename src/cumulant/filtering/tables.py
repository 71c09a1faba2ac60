"""Results of a filter as a table, and a summary of its modes."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.files import write_file
from cumulant.core.typed import tolist
from cumulant.filtering.dates import calendar_of
from cumulant.filtering.model import SHAPES, SwitchingLinearGaussian
from cumulant.filtering.model_files import Names
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.series import Series
from cumulant.filtering.smoothing import Smoothed

__all__ = [
    "Episode",
    "ModeSummary",
    "RegimeChange",
    "Table",
    "compared",
    "labels_of",
    "summarize",
    "table",
]


class Table(NamedTuple):
    """Names of columns, and rows of as many cells."""

    header: list[str]
    rows: list[list[str]]

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a CSV file, whole or not at all."""
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(self.header)
        out.writerows(self.rows)
        return write_file(path, text.getvalue())


class Episode(NamedTuple):
    """Steps in a row, from the first to the last (counted from 0), with one most probable mode."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1


class ModeSummary(NamedTuple):
    """A mode: its share of time, 1 / (1 - p_ii) steps, and its episodes, longest first.

    The duration is None where the transition changes with time.
    """

    name: str
    share: float
    duration: float | None
    episodes: list[Episode]

    def as_dict(self, labels: Sequence[str]) -> dict[str, Any]:
        """For JSON: a duration without end is None, steps count from 1."""
        lasts = self.duration is not None and math.isfinite(self.duration)
        return {
            "name": self.name,
            "share": self.share,
            "expected_duration": self.duration if lasts else None,
            "episodes": [
                {
                    "from": labels[e.first],
                    "to": labels[e.last],
                    "first_step": e.first + 1,
                    "steps": e.steps,
                }
                for e in self.episodes
            ],
        }


class RegimeChange(NamedTuple):
    """A mode before and after a fit, by the parameters of its own that changed.

    A parameter of one number is a number here, others are nested lists; ``stays`` is the
    probability of staying in the mode.
    """

    name: str
    start: dict[str, Any]
    fitted: dict[str, Any]

    def __str__(self) -> str:
        parts = [f"{n} {_brief(x)} -> {_brief(self.fitted[n])}" for n, x in self.start.items()]
        return f"{self.name}: {', '.join(parts) or 'unchanged'}"


def compared(
    start: SwitchingLinearGaussian, fitted: SwitchingLinearGaussian, names: Sequence[str]
) -> list[RegimeChange]:
    """What a fit made of each mode; modes of both models in the same order."""
    before, after = _own(start), _own(fitted)
    changed = [n for n, x in before.items() if not torch.equal(x, after[n].to(x))]
    return [
        RegimeChange(name, *({n: _plain(of[n][k]) for n in changed} for of in (before, after)))
        for k, name in enumerate(names)
    ]


def _own(model: SwitchingLinearGaussian) -> dict[str, Tensor]:
    """What belongs to single modes and is constant over time, mode first."""
    given = {n: x.detach() for n, x in model.parameters.items()}
    found = {n: x for n, x in given.items() if n in SHAPES and x.ndim == len(SHAPES[n]) + 1}
    return found | ({"stays": given["transition"].diagonal()} if model.steps is None else {})


def _plain(x: Tensor) -> Any:
    return x.item() if x.numel() == 1 else tolist(x)


def _brief(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else f"[{', '.join(map(_brief, x))}]"


def labels_of(series: Series) -> list[str]:
    """Labels of the steps; 1, 2, 3, ... if the file has none."""
    return series.labels or [str(t + 1) for t in range(len(series.values))]


def deviations(covariance: Tensor) -> Tensor:
    """Standard deviations."""
    return covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()


def _texts(x: Tensor) -> list[list[str]]:
    rows: list[list[float]] = tolist(x.reshape(len(x), -1))
    return [[f"{v:.10g}" if math.isfinite(v) else "" for v in row] for row in rows]


def table(
    series: Series,
    names: Names,
    post: Posterior,
    smoothed: Smoothed | None = None,
    forecast: Posterior | None = None,
) -> Table:
    """One row for each filtered step, then one for each step of the forecast.

    Args:
        series: the series that was filtered; it may be longer.
        names: of modes and states.
        post: from `filter`, of one series.
        smoothed: from `smooth`; without it there are no smoothed columns.
        forecast: from `forecast`; adds its rows, and a column that marks them.
    """
    header = _header(series.names, names, smoothed is not None, forecast is not None)
    labels, flag = labels_of(series), ["0"] if forecast else []
    seen = [[repr(v) if v == v else "" for v in row] for row in tolist(series.values)]
    each = zip(_rows(post, smoothed), _texts(post.step_log_likelihood), strict=True)
    rows = [
        [str(t + 1), labels[t], *flag, *seen[t], *row, *own] for t, (row, own) in enumerate(each)
    ]
    if forecast is not None:
        blank = [""] * len(series.names)
        # After the last observation, what is known so far is all that is known.
        more = _rows(forecast, forecast if smoothed else None)
        ahead = _ahead(series, forecast.steps)
        rows += [
            [str(post.steps + h + 1), ahead[h], "1", *blank, *row, ""] for h, row in enumerate(more)
        ]
    return Table(header, rows)


def _ahead(series: Series, steps: int) -> list[str]:
    """Labels of the steps to come: dates where those so far are even, else +1, +2, ..."""
    known = None if series.labels is None else calendar_of(series.labels)
    if known is None or known.ahead is None:
        return [f"+{h + 1}" for h in range(steps)]
    return known.ahead(steps)


def _header(observed: Sequence[str], names: Names, smoothed: bool, forecast: bool) -> list[str]:
    columns = ["step", "label", *(["forecast"] if forecast else [])]
    taken = {*columns, "log_likelihood"}
    columns += [f"observed {x}" if x in taken else x for x in observed]
    given = ["so far", *(["all"] if smoothed else [])]
    columns += [f"P({m} | {what})" for what in given for m in names.modes]
    kinds = ["filtered", *(["smoothed"] if smoothed else [])]
    columns += [f"{s} {kind} {w}" for kind in kinds for s in names.states for w in ("mean", "sd")]
    columns += [f"{x} predicted {w}" for x in observed for w in ("mean", "sd")]
    return [*columns, "log_likelihood"]


def _rows(post: Posterior, later: Posterior | Smoothed | None) -> list[list[str]]:
    """Modes, states and predicted observations of all steps."""
    known: list[Any] = [post, *([later] if later is not None else [])]
    parts = [x.mode_probabilities for x in known]
    parts += [torch.stack([x.mean, deviations(x.covariance)], -1).flatten(1) for x in known]
    spread = deviations(post.observation_covariance)
    parts.append(torch.stack([post.observation_mean, spread], -1).flatten(1))
    return _texts(torch.cat([x.detach() for x in parts], -1))


def episodes(probabilities: Tensor) -> list[list[Episode]]:
    """For each mode, the stretches where it is the most probable, in the order of time."""
    found: list[list[Episode]] = [[] for _ in range(probabilities.shape[-1])]
    chosen: list[int] = tolist(probabilities.argmax(-1))
    first = 0
    for t, mode in enumerate(chosen):
        if t + 1 == len(chosen) or chosen[t + 1] != mode:
            found[mode].append(Episode(first, t))
            first = t + 1
    return found


def summarize(
    model: SwitchingLinearGaussian, names: Sequence[str], smoothed: Smoothed
) -> list[ModeSummary]:
    """Each mode's share of time, expected duration and episodes, given all observations."""
    shares: list[float] = tolist(smoothed.mode_probabilities.mean(0))
    transition = model.parameters["transition"]
    durations: list[float | None] = [None] * len(names)
    if transition.ndim == 2:
        durations = [1 / (1 - p) if p < 1 else math.inf for p in tolist(transition.diagonal())]
    each = zip(names, shares, durations, episodes(smoothed.mode_probabilities), strict=True)
    return [
        ModeSummary(name, share, duration, sorted(found, key=lambda e: -e.steps))
        for name, share, duration, found in each
    ]
