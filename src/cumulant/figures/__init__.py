"""The project's figure style."""

from cumulant.figures.style import (
    COLORS,
    INK,
    MUTED,
    as_svg,
    cycle,
    need_matplotlib,
    new_figure,
    ramp,
    series_color,
    short_logarithms,
    style,
    tidy,
    write,
)

__all__ = [
    "COLORS",
    "INK",
    "MUTED",
    "as_svg",
    "cycle",
    "need_matplotlib",
    "new_figure",
    "ramp",
    "series_color",
    "short_logarithms",
    "style",
    "tidy",
    "write",
]
