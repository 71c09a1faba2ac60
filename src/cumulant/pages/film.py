"""A page that plays a sequence of pictures; it makes no network request."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files

__all__ = ["film_page"]


def film_page(frames: Sequence[bytes], captions: Sequence[str], fps: float) -> str:
    """The page, with its pictures, style and script embedded.

    Its content security policy allows its own script, by digest, and no network requests.

    Args:
        frames: PNG files.
        captions: alternative text of each frame.
        fps: frames per second.
    """
    page = (files("cumulant.pages") / "film.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    pictures = "\n".join(
        f'<img src="data:image/png;base64,{base64.b64encode(frame).decode()}" '
        f'alt="{html.escape(caption)}" hidden>'
        for frame, caption in zip(frames, captions, strict=True)
    )
    values = {
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "fps": json.dumps(fps),
        "last": str(len(frames) - 1),
        "frames": pictures,
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], page)
