"""The first screen: the drafts' questions, as ``docs/answers.md`` answers them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from html import escape, unescape
from typing import NamedTuple

from cumulant.lab.report.documents import document, read
from cumulant.lab.report.drawings import drawing
from cumulant.pages.markdown import markdown, sections

__all__ = ["Answer", "answers"]

PAGE = "answers.md"
_PICTURE = re.compile(r"^!\[(?P<says>[^\]]*)\]\((?P<path>[^)]+)\)$", re.MULTILINE)
# "No." or "Yes in each of four trained models:" stands out.
_VERDICT = re.compile(r"\A<p>([^<]{1,60}?[.:;])(?= )")
_TYPES = {"png": "png", "jpg": "jpeg", "gif": "gif"}


class Answer(NamedTuple):
    """A question and what is known; all but question and verdict is markup.

    ``verdict`` is the beginning of the answer, such as "No", if it stands out.
    """

    question: str
    verdict: str
    short: str
    figure: str
    caption: str
    evidence: str


def answers(link: Callable[[str], str | None]) -> list[Answer]:
    """One for each section of the page: the text above its picture, the picture, the rest.

    Args:
        link: what an address in the text becomes, as for `markdown`.

    Raises:
        InputError: a package that pages need is missing.
    """
    found: list[Answer] = []
    for question, body in sections(read(PAGE)).items():
        picture = _PICTURE.search(body)
        above, below = (
            (body[: picture.start()], body[picture.end() :]) if picture is not None else (body, "")
        )
        says = picture["says"] if picture is not None else ""
        figure = _figure(picture["path"], says) if picture is not None else ""
        text = markdown(above, link)
        verdict = _VERDICT.match(text)
        found.append(
            Answer(
                question,
                unescape(verdict[1]).rstrip(".:;") if verdict is not None else "",
                _VERDICT.sub(r"<p><strong>\1</strong>", text),
                figure,
                says,
                markdown(below.strip(), link),
            )
        )
    return found


def _figure(path: str, says: str) -> str:
    """A picture of the documentation: SVG in the page's own colors, others as they are."""
    file = document(path)
    if file is None:
        return ""
    if file.suffix == ".svg":
        return drawing(file.read_text(encoding="utf-8"), f"answer-{file.stem}", says)
    kind = _TYPES[file.suffix.lower().removeprefix(".")]
    content = base64.b64encode(file.read_bytes()).decode()
    return f'<img src="data:image/{kind};base64,{content}" alt="{escape(says)}">'
