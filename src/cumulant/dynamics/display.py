"""`Trajectory` in a notebook: the cloud at several times, a film of it, and the observables."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cumulant.core.describing import readable
from cumulant.core.eager import transforms
from cumulant.core.typed import tolist
from cumulant.dynamics.picture import View, blown_note, title
from cumulant.pages.cards import HUES, Markup, card, columns, facts, note
from cumulant.pages.charts import Line, cloud, curves, film, thinned

if TYPE_CHECKING:
    from cumulant.dynamics.trajectory import Trajectory

__all__ = ["as_html"]

CLOUDS, FRAMES, POINTS, TIMES = 5, 24, 150, 200
# Seen from the side and a little from above: where the axes of three dimensions point.
_SIDE = np.array([[-0.5, -0.296], [0.866, -0.171], [0.0, 0.94]])


def as_html(run: Trajectory) -> str:
    """The card, made of a few frames and points however long the run was."""
    head = repr(run).partition("(")[2][:-1]
    if transforms() or not run.states.numel() or run.states.device.type == "meta":
        return card("Trajectory", head)
    with torch.no_grad():
        some = _small(run)
        view = View(some)
        parts = [_clouds(view), _curves(run)]
    told = [("states", tuple(run.states.shape)), *_plain(run.settings)]
    clouds = math.prod(run.states.shape[1:-2])
    several = f"first of {clouds:,} clouds; curves are medians" if clouds > 1 else ""
    said = filter(None, [view.note, several, blown_note(run)])
    return card("Trajectory", f"{len(run.times)} times", facts(told), *parts, note("; ".join(said)))


def _plain(settings: dict[str, Any]) -> list[tuple[str, object]]:
    """Settings that are short enough to read."""
    shown = {n: x for n, x in settings.items() if x is not None and len(str(x)) <= 40}
    return [(name.replace("_", " "), value) for name, value in shown.items()]


def _small(run: Trajectory) -> Trajectory:
    """The first cloud at a few times, with a few of its points."""
    frames = torch.tensor(thinned(range(len(run.times)), FRAMES))
    states = run.states.reshape(len(run.states), -1, *run.states.shape[-2:])[:, 0]
    points = torch.tensor(thinned(range(states.shape[-2]), POINTS))
    states = states[frames.to(states.device)].index_select(-2, points.to(states.device))
    return replace(run, times=run.times.cpu()[frames], states=states, observables={})


def _clouds(view: View) -> Markup:
    """A row of frames on one scale, and the film."""
    flat = _flat(view.points)
    # Unbounded growth would shrink the start to a dot: then every frame has its own scale.
    sizes = np.abs(flat).max((1, 2))
    shared = bool(sizes.max() <= 10 * max(sizes.min(), 1e-300))
    placed = _placed(flat) if shared else np.concatenate([_placed(x[None]) for x in flat])
    color = (view.hue * len(HUES) * 0.999).astype(int)
    frames: list[list[list[tuple[float, float]]]] = [
        [[(float(a), float(b)) for a, b in x[color == k]] for k in range(len(HUES))] for x in placed
    ]
    said = [title(t) for t in view.times]
    few = thinned(range(len(frames)), CLOUDS)
    row = columns(*((said[k], cloud(frames[k], f"the cloud at {said[k]}")) for k in few))
    scales = "" if shared else note("Scales differ.")
    if len(frames) < 3:
        return Markup(row + scales)
    name = f"{zlib.crc32(placed.astype('float32').tobytes()):08x}"
    return Markup(row + scales + film(frames, said, name))


def _flat(points: Any) -> Any:
    """Two coordinates of each point, ``(T, n, 2)``."""
    if points.shape[-1] == 3:
        return points @ _SIDE
    return points if points.shape[-1] == 2 else np.concatenate([points, 0 * points], -1)


def _placed(points: Any) -> Any:
    """Coordinates between 0 and 1 in a square around all of them."""
    flat = points.reshape(-1, 2)
    low, high = flat.min(0), flat.max(0)
    floor = 0.01 * float(np.abs(flat).max())  # below it is rounding
    half = 0.56 * max(float((high - low).max()), floor, 1e-300)
    return (points - (low + high) / 2) / (2 * half) + 0.5


def _curves(run: Trajectory) -> Markup:
    """Each observable against time: the median over an ensemble."""
    if len(run.times) < 2 or not readable(run.times.cpu()):
        return Markup("")
    chosen = torch.tensor(thinned(range(len(run.times)), TIMES))
    x: list[float] = tolist(run.times.cpu()[chosen].double())
    drawn: list[tuple[str, Markup]] = []
    for i, (name, values) in enumerate(run.observables.items()):
        y = np.median(values.detach().cpu()[chosen].double().reshape(len(chosen), -1), -1)
        label = name.replace("_", " ")
        line = Line(y.tolist(), HUES[i % len(HUES)])
        drawn.append((label, curves(x, [line], f"{label} against time")))
    return columns(*drawn) if drawn else Markup("")
