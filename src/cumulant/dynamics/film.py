"""A `Trajectory` in motion: frames drawn one by one, as a GIF or as a page with a player."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cumulant.core.errors import InputError
from cumulant.core.files import destination, whole_file, write_file
from cumulant.dynamics.picture import View, clusters_at, title
from cumulant.figures import COLORS, need_matplotlib, new_figure, style
from cumulant.pages import film_page

if TYPE_CHECKING:
    from cumulant.dynamics.trajectory import Trajectory

__all__ = ["animate"]

_DPI = {".gif": 90, ".html": 150}


def animate(
    run: Trajectory, path: str | os.PathLike[str], frames: int, fps: int, reach: float
) -> Path:
    """See `Trajectory.animate`."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _DPI:
        raise InputError(f"animate: the file must end in .gif or .html, not {path.name!r}.")
    if frames < 1 or fps < 1:
        raise InputError(f"animate: frames and fps must be at least 1, not {frames} and {fps}.")
    need_matplotlib()
    destination(path)  # before the work, not after it
    view = View(run)
    count = min(frames, len(run.times))
    chosen = [round(k * (len(run.times) - 1) / max(1, count - 1)) for k in range(count)]
    captions = [_caption(view.times[k], clusters_at(run, k, reach)) for k in chosen]
    drawn = _drawn(view, chosen, captions, _DPI[kind])
    if kind == ".html":
        return write_file(path, film_page(list(drawn), captions, fps))
    image: Any = import_module("PIL.Image")  # comes with matplotlib
    first, *rest = (image.open(io.BytesIO(png)).convert("RGB") for png in drawn)
    with whole_file(path) as part:
        first.save(
            *(part, "GIF"), save_all=True, append_images=rest, duration=round(1000 / fps), loop=0
        )
    return path


def _caption(t: float, count: int | None) -> str:
    if count is None:
        return title(t)
    return f"{title(t)}: {count} cluster{'s' * (count != 1)}"


def _drawn(view: View, chosen: Sequence[int], captions: Sequence[str], dpi: int) -> Iterator[bytes]:
    """The cloud at the chosen times as PNG, all on one scale."""
    with style():
        figure = new_figure(4.6, 4.8)
        axes = figure.add_subplot(projection=view.projection)
        points = view.draw(axes, chosen[0], view.limits(chosen))
        heading = axes.set_title("", color=COLORS[0])
    for k, caption in zip(chosen, captions, strict=True):
        x = view.points[k]
        if view.dimension == 3:
            points._offsets3d = tuple(x.T)
        else:
            height = x[:, 1] if view.dimension == 2 else np.zeros(len(x))
            points.set_offsets(np.column_stack([x[:, 0], height]))
        heading.set_text(caption)
        content = io.BytesIO()
        with style():
            figure.savefig(content, format="png", dpi=dpi)
        yield content.getvalue()
