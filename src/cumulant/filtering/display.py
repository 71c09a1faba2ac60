"""`Posterior`, `Smoothed` and `Fit` in a notebook: the series, its modes, the parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cumulant.core.eager import tracing, transforms
from cumulant.core.typed import tolist
from cumulant.filtering.frames import Labels, ModeNames, mode_names, state_names
from cumulant.filtering.posterior import Filtered, Posterior
from cumulant.pages.cards import HUES, Markup, card, columns, facts, note, table
from cumulant.pages.charts import Line, areas, curves, legend, thinned
from cumulant.pages.numbers import number

if TYPE_CHECKING:
    from cumulant.filtering.fitting import Fit
    from cumulant.filtering.smoothing import Smoothed

__all__ = ["fit_html", "posterior_html", "smoothed_html"]

STEPS = 280  # of a picture: more are averaged or left out
SERIES = 3
MODES = 12
AFFORDABLE = 20_000  # steps that a filter takes for a picture
WIDE = (560.0, 100.0)


def posterior_html(post: Filtered) -> str:
    """The card of what a filter knows; of a batch, the picture shows the first series."""
    kind, about = type(post).__name__, f"{post.model!r}"
    if _hidden(post.beliefs[-1].log_weights):
        return card(kind, repr(post))
    with torch.no_grad():
        total = post.log_likelihood.detach().cpu().double().reshape(-1)
        names = getattr(post.model, "names", None)
        parts = _drawn(post, post.mode_probabilities, names, post.labels, "given the data so far")
    told: list[tuple[str, object]] = [("steps", post.steps), ("collapse", post.scheme.name)]
    if total.numel() > 1:
        told.append(("series", total.numel()))
    if not bool(torch.cat(post.observations, -2).isnan().all()):
        told.append(("log-likelihood", f"{float(total.sum()):,.3f}".replace("-", "−")))
    return card(kind, about, facts(told), *parts)


def smoothed_html(smoothed: Smoothed) -> str:
    """The card of modes given all observations."""
    if _hidden(smoothed.beliefs[-1].log_weights):
        return card("Smoothed", repr(smoothed))
    with torch.no_grad():
        p = smoothed.mode_probabilities
        parts = [_modes(p, smoothed.names, smoothed.labels, "given the whole series")]
        parts.append(_shares(p, smoothed.names, None))
        mean = _first(smoothed.mean)
        parts.append(_lines(mean, state_names(smoothed.names, mean.shape[-1]), smoothed.labels))
    return card("Smoothed", f"{len(smoothed.pairs)} steps", *parts, _of_several(p))


def fit_html(found: Fit) -> str:
    """The card of a fit: its summary, and the modes if they are known or soon found."""
    summary, evidence = found.summary(), found.evidence
    y = evidence.observations
    parts = [summary.tables()]
    later: Smoothed | None = vars(found).get("_smoothed")
    cheap = y[..., 0].numel() <= AFFORDABLE or vars(found).get("_posterior") is not None
    if not transforms() and not tracing() and (later is not None or cheap):
        with torch.no_grad():
            known = found.posterior if later is None else later
            how = "given the data so far" if later is None else "given the whole series"
            names = getattr(found.model, "names", None)
            p = known.mode_probabilities
            parts = [*_drawn(found.posterior, p, names, evidence.labels, how)[:2], *parts]
    return card("Fit", summary.title, *parts)


def _first(x: Tensor) -> Tensor:
    """Of the first series ``(T, features)``."""
    while x.ndim > 2:
        x = x[0]
    return x.detach().cpu().double()


def _hidden(x: Tensor) -> bool:
    """Whether there are no values to show here."""
    return bool(transforms()) or tracing() or x.device.type == "meta" or not x.numel()


def _drawn(
    post: Filtered, p: Tensor, names: ModeNames, labels: Labels | None, how: str
) -> list[Markup]:
    """The series, the modes below it, and a table of the modes."""
    y = _first(torch.cat(post.observations, -2))
    told = [f"observation {k + 1}" for k in range(y.shape[-1])] if labels is None else None
    told = list(labels.columns) if told is None and labels is not None else told or []
    if isinstance(post, Posterior) and bool(y.isnan().all()):  # a forecast has not been observed
        y, told = _first(post.observation_mean), [f"{x}, predicted" for x in told]
    out = [_lines(y, told, labels), _modes(p, names, labels, how)]
    return [*out, _shares(p, names, getattr(post.model, "transition", None)), _of_several(p)]


def _of_several(p: Tensor) -> Markup:
    count = math.prod(p.shape[:-2])
    return note(f"Drawn: the first of {count:,} series.") if count > 1 else Markup("")


def _lines(y: Tensor, names: list[str], labels: Labels | None) -> Markup:
    """Columns over time."""
    steps = list(range(len(y)))
    chosen, ends = thinned(steps, STEPS), _ends(labels, len(y))
    drawn: list[tuple[str, Markup]] = []
    for k, name in enumerate(names[:SERIES]):
        line = Line(tolist(y[chosen, k]), HUES[0])
        picture = curves([float(t) for t in chosen], [line], name, size=WIDE, ends=ends)
        drawn.append((name, picture))
    more = len(names) - SERIES
    return Markup(columns(*drawn) + note(f"and {more} more" if more > 0 else ""))


def _modes(p: Tensor, names: ModeNames, labels: Labels | None, how: str) -> Markup:
    """Probabilities of the modes over time, averaged over neighbors where there are many steps."""
    own = _first(p)
    if own.shape[-1] < 2 or own.shape[-1] > MODES or not len(own):
        return Markup("")
    if len(own) > STEPS:
        own = torch.stack([x.mean(0) for x in own.tensor_split(STEPS)])
    told = mode_names(names, own.shape[-1])
    picture = areas(tolist(own), f"probability of the modes, {how}")
    return Markup(columns((f"probability of the modes, {how}", picture)) + legend(told))


def _ends(labels: Labels | None, steps: int) -> tuple[str, str]:
    """What stands at both ends of the axis of time."""
    index: Any = None if labels is None else labels.index
    if index is None or len(index) != steps:
        return "step 1", str(steps)
    return tuple(str(index[k]).removesuffix(" 00:00:00")[:24] for k in (0, -1))  # pyright: ignore[reportReturnType]


def _shares(p: Tensor, names: ModeNames, transition: Tensor | None) -> Markup:
    """How much of the time each mode had, and how it moves on."""
    M = p.shape[-1]
    if M < 2 or M > MODES:
        return Markup("")
    told = mode_names(names, M)
    share: list[float] = tolist(p.detach().double().reshape(-1, M).mean(0))
    if transition is None or transition.shape != (M, M):
        rows = [[name, f"{s:.1%}"] for name, s in zip(told, share, strict=True)]
        return table(["mode", "of all steps"], rows)
    moves: list[list[float]] = tolist(transition.detach().double())
    rows = [
        [name, f"{s:.1%}", *(number(x) for x in row), _duration(row[i])]
        for i, (name, s, row) in enumerate(zip(told, share, moves, strict=True))
    ]
    heads = ["mode", "of all steps", *(f"to {name}" for name in told), "expected steps"]
    return table(heads, rows)


def _duration(stay: float) -> str:
    return "∞" if stay >= 1 else number(1 / (1 - stay))
