"""Small pictures as inline SVG, for cards: histograms, maps, curves, areas, clouds of points.

Numbers come as plain lists, and numbers that are not finite leave gaps. The size of a picture does
not depend on how much data there was: callers thin out long series with `thinned`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from cumulant.pages.cards import HUES, Markup, text
from cumulant.pages.numbers import number

__all__ = ["Line", "areas", "bars", "cloud", "curves", "film", "heat", "legend", "thinned"]

_T = TypeVar("_T")
_TOP = 15  # of 16 shades
_LABEL = 'font-size="11" fill="currentColor" fill-opacity=".78"'
_GRID = 'stroke="currentColor" stroke-opacity=".25" fill="none"'


class Line(NamedTuple):
    """A curve: its values at the points of the x axis, and its color."""

    values: Sequence[float]
    hue: str = HUES[0]


def thinned(values: Sequence[_T], most: int) -> list[_T]:
    """At most so many of the values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)]


def _svg(width: float, height: float, label: str, content: str) -> Markup:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return Markup(f'<svg {size} role="img" aria-label="{text(label)}">{content}</svg>')


def _words(x: float, y: float, what: object, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {_LABEL}>{text(what)}</text>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The limits of an axis; what is constant gets some room on both sides."""
    known = [v for v in values if math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        room = 0.05 * max(abs(low), abs(high)) or 0.05
        return low - room, high + room
    return low, high


def bars(counts: Sequence[float], label: str, *, hue: str = HUES[0]) -> Markup:
    """A histogram without axes, for a cell of a table."""
    width, height = 140.0, 26.0
    top, step = max([*counts, 1.0]), width / max(len(counts), 1)
    path = "".join(
        f"M{k * step:.1f} {height:g}v{-max(height * c / top, 1):.1f}h{0.85 * step:.1f}V{height:g}z"
        for k, c in enumerate(counts)
        if c > 0
    )
    return _svg(width, height, label, f'<path d="{path}" fill="{hue}"/>')


def _every(cells: float) -> int:
    """The round number of cells from one number on an axis to the next: 1, 2, 5, 10, ..."""
    power = 10 ** max(0, math.floor(math.log10(cells)))
    return next(n for n in (power, 2 * power, 5 * power, 10 * power) if n >= cells)


def heat(rows: Sequence[Sequence[float]], label: str, *, hue: str = HUES[0]) -> Markup:
    """A map of layers (down) and heads (across): the larger, the stronger the color.

    Cells of one shade are one path, so that a large model's map stays small.
    """
    across, down = max((len(r) for r in rows), default=0), len(rows)
    if not across:
        return Markup("")
    side = max(3.0, min(18.0, 300 / across, 300 / down))
    known = [v for row in rows for v in row if math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    shades: dict[int, list[str]] = {}
    inner = side - 1 if side > 6 else side
    top = max(0.0, 4 - side / 2)  # the first number does not stand out
    cell = f"h{inner:g}v{inner:g}h-{inner:g}z"
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if math.isfinite(value):
                share = (value - low) / (high - low) if high > low else 0.5
                place = f"M{26 + j * side:g} {top + i * side:g}{cell}"
                shades.setdefault(round(share * _TOP), []).append(place)
    # Even the smallest value is visible: an empty cell is one without a number.
    cells = "".join(
        f'<path d="{"".join(d)}" fill="{hue}" fill-opacity="{0.08 + 0.92 * k / _TOP:.2f}"/>'
        for k, d in sorted(shades.items())
    )
    axis = "".join(
        _words(21, top + i * side + side / 2 + 4, i, "end")
        for i in range(0, down, _every(14 / side))
    )
    bottom, wide = top + down * side + 13, 6 + 7 * len(str(across - 1))
    axis += "".join(
        _words(26 + j * side + side / 2, bottom, j, "middle")
        for j in range(0, across, _every(wide / side))
    )
    return _svg(30 + across * side, bottom + 4, label, cells + axis)


def curves(
    x: Sequence[float],
    lines: Sequence[Line],
    label: str,
    *,
    size: tuple[float, float] = (220.0, 90.0),
    ends: tuple[str, str] | None = None,
    digits: int = 3,
) -> Markup:
    """Curves over a common axis; its ends and the largest and smallest value are written."""
    width, height = size
    first, last = _range(x)
    low, high = _range([v for line in lines for v in line.values])
    left, top, floor = 46.0, 6.0, height - 18
    parts = [f'<path d="M{left:g} {top:g}V{floor:g}H{width:g}" {_GRID}/>']
    for line in lines:
        path, joined = list[str](), False
        for at, value in zip(x, line.values, strict=True):
            if not math.isfinite(value):
                joined = False
                continue
            px = left + (width - left) * (at - first) / (last - first)
            py = floor - (floor - top) * (value - low) / (high - low)
            path.append(f"{'L' if joined else 'M'}{px:.1f} {py:.1f}")
            joined = True
        look = f'stroke="{line.hue}" stroke-width="1.6" stroke-linejoin="round"'
        dots = ' stroke-linecap="round"' if len(path) < 3 else ""
        parts.append(f'<path d="{"".join(path)}" fill="none" {look}{dots}/>')
    parts += [_words(left - 5, top + 8, number(high, digits), "end")]
    parts += [_words(left - 5, floor, number(low, digits), "end")]
    begin, end = ends or (number(first), number(last))
    parts += [_words(left, height - 4, begin), _words(width, height - 4, end, "end")]
    return _svg(width, height, label, "".join(parts))


def areas(
    shares: Sequence[Sequence[float]], label: str, *, size: tuple[float, float] = (560.0, 64.0)
) -> Markup:
    """Shares of each mode at each step, stacked to one; steps of equal width."""
    width, height = size
    left, count = 46.0, max(len(shares), 1)
    step, modes = (width - left) / count, len(shares[0]) if shares else 0
    parts, floor = list[str](), [0.0] * len(shares)
    for m in range(modes):
        top = [min(1.0, low + max(0.0, share[m])) for low, share in zip(floor, shares, strict=True)]
        if not all(map(math.isfinite, top)):
            top = [t if math.isfinite(t) else low for t, low in zip(top, floor, strict=True)]
        up = "".join(f"V{height * (1 - t):.1f}h{step:.2f}" for t in top)
        down = "".join(f"V{height * (1 - t):.1f}h{-step:.2f}" for t in reversed(floor))
        hue = HUES[m % len(HUES)]
        parts.append(f'<path d="M{left:g} {height:g}{up}{down}z" fill="{hue}" fill-opacity=".75"/>')
        floor = top
    parts += [_words(left - 5, 9, "1", "end"), _words(left - 5, height, "0", "end")]
    return _svg(width, height, label, "".join(parts))


def legend(names: Sequence[object]) -> Markup:
    """The names of modes beside their colors."""
    items = "".join(
        f'<span style="white-space:nowrap"><span style="color:{HUES[m % len(HUES)]}">■</span> '
        f"{text(name)}</span> "
        for m, name in enumerate(names)
    )
    return Markup(f'<p class="cm-note">{items}</p>')


def _dots(groups: Sequence[Sequence[tuple[float, float]]], side: float, radius: float) -> str:
    """Points between 0 and 1, one path for each color."""
    out: list[str] = []
    for k, points in enumerate(groups):
        path = "".join(f"M{side * x:.1f} {side * (1 - y):.1f}h0" for x, y in points)
        look = f'stroke="{HUES[k % len(HUES)]}" stroke-width="{2 * radius:g}"'
        out.append(f'<path d="{path}" {look} stroke-linecap="round" fill="none"/>' if path else "")
    return "".join(out)


def cloud(groups: Sequence[Sequence[tuple[float, float]]], label: str) -> Markup:
    """Points in a square: coordinates between 0 and 1, one list for each color."""
    return _svg(118, 118, label, _frame(118) + _dots(groups, 118, _radius(groups)))


def film(
    frames: Sequence[Sequence[Sequence[tuple[float, float]]]], captions: Sequence[str], name: str
) -> Markup:
    """Clouds one after the other, played by style alone while the reader keeps it open.

    Without styles, or if the reader prefers less motion, the last frame stands still.

    Args:
        frames: as for `cloud`, one after the other.
        captions: of each frame.
        name: a word that no other film of the page has.
    """
    side, seconds = 260.0, max(2.0, 0.15 * len(frames))
    own = f"cumulant-film-{name}"
    show = 100 / max(len(frames), 1)
    style = (
        f"<style>@media (prefers-reduced-motion:no-preference){{.{own} g{{visibility:hidden;"
        f"animation:{own} {seconds:g}s step-end infinite}}}}"
        f"@keyframes {own}{{0%{{visibility:visible}}{show:.7f}%{{visibility:hidden}}}}</style>"
    )
    parts: list[str] = []
    for k, (groups, caption) in enumerate(zip(frames, captions, strict=True)):
        delay = f"animation-delay:{k * seconds / len(frames) - seconds:.6f}s"
        hidden = ' visibility="hidden"' if k < len(frames) - 1 else ""
        inner = _dots(groups, side, 1.3 * _radius(groups)) + _words(6, 16, caption)
        parts.append(f'<g style="{delay}"{hidden}>{inner}</g>')
    picture = _svg(side, side, "the cloud in motion", _frame(side) + "".join(parts))
    inner = f'{style}<div class="{own}">{picture}</div>'
    return Markup(f"<details><summary>Play the film</summary>{inner}</details>")


def _radius(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    return 1.3 if sum(map(len, groups)) > 120 else 2.0


def _frame(side: float) -> str:
    return f'<rect x=".5" y=".5" width="{side - 1:g}" height="{side - 1:g}" {_GRID}/>'
