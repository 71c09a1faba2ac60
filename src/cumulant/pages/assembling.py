"""Assemble templates, styles, scripts and data into one file that makes no network request."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.resources import files
from typing import Any

from cumulant.core.errors import InputError
from cumulant.pages.numbers import fact
from cumulant.pages.typeset import typeset

__all__ = ["assemble", "embedded", "ready"]


def assemble(
    packages: Sequence[str],
    *,
    scripts: Sequence[str],
    data: Any,
    values: Mapping[str, Any],
) -> str:
    """Render the template to one page that contains its style, script and data.

    Its content security policy allows its own script, by digest, and no network requests.

    Args:
        packages: where to look for ``template.html``, the templates it extends and the scripts,
            most general first; the last package that has a file wins. The ``style.css`` of every
            package is included.
        scripts: file names, concatenated in this order into one program.
        data: plain values for the script.
        values: values for the template; text is escaped.

    Raises:
        InputError: jinja2 is not installed.
    """
    jinja2 = _need("jinja2")
    trusted = import_module("markupsafe").Markup  # comes with jinja2
    folders = [files(name) for name in packages]

    def read(name: str) -> str | None:
        there = [folder / name for folder in folders if (folder / name).is_file()]
        return there[-1].read_text(encoding="utf-8") if there else None

    program = "\n".join(read(name) or "" for name in scripts)
    program = f'"use strict";\n(() => {{\n{program}\n}})();\n'
    styles = [folder / "style.css" for folder in folders]
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        fact=fact, typeset=typeset, indices=partial(typeset, signs=False), trusted=trusted
    )
    page: str = environment.get_template("template.html").render(
        **values,
        style=trusted("".join(s.read_text(encoding="utf-8") for s in styles if s.is_file())),
        script=trusted(program),
        digest=base64.b64encode(hashlib.sha256(program.encode()).digest()).decode(),
        data=trusted(embedded(data)),
    )
    # A file name may hold undecodable bytes, but the page must still be encodable.
    return page.encode("utf-8", "replace").decode("utf-8")


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can close the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: no U+2028 either
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def ready() -> None:
    """Raise early if pages cannot be rendered, for callers that work long before they render.

    Raises:
        InputError: jinja2 or latex2mathml is not installed.
    """
    _need("jinja2")
    _need("latex2mathml")


def _need(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise InputError(f"reports need {name}: pip install '.[report]'.") from None
