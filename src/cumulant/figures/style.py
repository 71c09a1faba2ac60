"""Plot style: quiet axes, a palette that survives color blindness and grayscale printing."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cumulant.core.errors import InputError
from cumulant.core.files import whole_file

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
    "tidy",
    "write",
]

INK, MUTED, PAPER = "#1f2430", "#7a8194", "#ffffff"
# Blue, vermilion, green, purple, ochre, teal: distinct in hue and in lightness.
COLORS = ("#2457a6", "#d1495b", "#2a9d6f", "#7b4fa3", "#d08c1d", "#1b8a99")

_RULES: dict[str, Any] = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7ee",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "font.size": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "savefig.dpi": 150,
    "savefig.facecolor": PAPER,
}


def need_matplotlib() -> Any:
    """Import matplotlib, or raise an error that says how to install it."""
    try:
        return import_module("matplotlib")
    except ModuleNotFoundError:
        raise InputError("pictures need matplotlib: pip install '.[plot]'.") from None


def new_figure(width: float, height: float) -> Any:
    """A figure in the house style, without pyplot or a window; use it inside `style`."""
    need_matplotlib()
    figure = import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def style() -> Any:
    """A context in which matplotlib draws in the house style."""
    return need_matplotlib().rc_context(_RULES)


def series_color(i: int) -> str:
    """The color of the i-th series."""
    return COLORS[i % len(COLORS)]


def cycle() -> Any:
    """A cyclic color map, for angles."""
    around = [COLORS[i] for i in (0, 5, 2, 4, 1, 3, 0)]
    colors = import_module("matplotlib.colors")
    return colors.LinearSegmentedColormap.from_list("cumulant", around)


def ramp() -> Any:
    """A sequential color map, for positions on a line."""
    colors = import_module("matplotlib.colors")
    return colors.LinearSegmentedColormap.from_list("cumulant ramp", [COLORS[i] for i in (0, 3, 1)])


def tidy(axes: Any) -> None:
    """Remove the grid, for images and point clouds."""
    axes.grid(visible=False)


# How far a logarithmic axis reaches, and where it then has numbers in each decade.
_STEPS = (
    (3.0, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)),
    (10.0, (1.0, 2.0, 3.0, 5.0)),
    (100.0, (1.0, 2.0, 5.0)),
    (1e3, (1.0,)),
)


def short_logarithms(figure: Any) -> None:
    """Logarithmic axes of up to three decades get few numbers, written out: 0.5, 1, 2.

    Powers such as 3·10⁻² would run into each other, and a short axis would have none. Axes with
    ticks of their own, or another base, stay as they are.
    """
    ticker: Any = import_module("matplotlib.ticker")
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        own = not isinstance(axis.get_major_locator(), ticker.LogLocator)
        if axis.get_scale() != "log" or own or axis.get_transform().base != 10:
            continue
        low, high = sorted(axis.get_view_interval())
        steps = next((steps for reach, steps in _STEPS if high < reach * low), None)
        if steps is None or low < 1e-4 or high > 1e5:
            continue
        axis.set_major_locator(ticker.LogLocator(subs=steps))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(ticker.NullFormatter())


def as_svg(draw: Callable[[Any], None], size: tuple[float, float], name: str) -> str:
    """The figure that ``draw`` fills, as deterministic SVG with text as paths."""
    content = io.StringIO()
    need_matplotlib()
    rules = {"svg.fonttype": "path", "svg.hashsalt": name}
    with style(), import_module("matplotlib").rc_context(rules):
        figure = new_figure(*size)
        draw(figure)
        short_logarithms(figure)
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def write(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write the figure to a file atomically; the suffix sets the format."""
    path = Path(path)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        kinds = ", ".join(sorted(known))
        raise InputError(f"cannot draw a file {path.name}; the suffixes are {kinds}.")
    with style(), whole_file(path) as part:
        short_logarithms(figure)
        figure.savefig(part)
    return path
