"""`read`: texts from a string, files, folders or JSON lines, one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError

__all__ = ["PASSAGE_SOURCE", "Text", "named", "passage", "read"]

PASSAGE_SOURCE = "Charles Darwin, On the Origin of Species (1859), opening of the Introduction"
SUFFIXES = (".txt", ".md")


class Text(NamedTuple):
    """A text and its name: its file, line or origin."""

    name: str
    content: str

    __repr__ = described_fields


def passage() -> Text:
    """The text that is examined if none is given; `PASSAGE_SOURCE` says whose it is."""
    path = Path(__file__).with_name("data") / "passage.txt"
    return Text("passage", path.read_text(encoding="utf-8").strip())


def read(
    text: str | None = None,
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    jsonl: str | os.PathLike[str] | None = None,
    field: str = "text",
) -> Iterator[Text]:
    """Every text that was asked for, in the order of the arguments; the passage if none was.

    That the files exist is checked at once; they are read as the texts are taken, so that a corpus
    larger than memory may be given.

    Args:
        text: the text itself.
        files: UTF-8 files of one text each; a folder stands for all .txt and .md files below it,
            sorted, without hidden ones.
        jsonl: a file with one JSON object per line; blank lines are passed over.
        field: the field of these objects that holds the text.

    Raises:
        InputError: the file and the line or byte at fault.

    >>> [content] = [each.content for each in read("Attention is a tilted measure.")]
    >>> content
    'Attention is a tilted measure.'
    >>> next(read()).content[:20]
    'When on board H.M.S.'
    """
    if text is not None and not text.strip():
        raise InputError("the text is empty; it needs at least one word.")
    several = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths = [found for each in several for found in _expanded(Path(each).expanduser())]
    given: list[Iterable[Text]] = []
    if text is not None:
        given.append([Text("text", text)])
    if paths:
        given.append(_file(path) for path in paths)
    if jsonl is not None:
        lines = Path(jsonl).expanduser()
        _must_exist(lines)
        if lines.is_dir():
            raise InputError(f"{lines} is a folder; jsonl must be one file of JSON lines.")
        given.append(_lines(lines, field))
    return chain.from_iterable(given or [[passage()]])


def named(texts: str | Iterable[str] | Iterable[Text] | Mapping[str, str]) -> Iterator[Text]:
    """What `examine` was given, text by text; those without a name are numbered."""
    if isinstance(texts, str):
        texts = [texts]
    elif not isinstance(texts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"examine: texts must be strings, not {type(texts).__name__}.")
    elif isinstance(texts, Mapping):
        pairs = cast(Mapping[str, str], texts).items()
        texts = [Text(str(name), content) for name, content in pairs]
    for number, each in enumerate(texts):
        if isinstance(each, str):
            yield Text(f"text {number}", each)
        elif isinstance(each, Text):  # pyright: ignore[reportUnnecessaryIsInstance]
            yield each
        else:
            raise InputError(
                f"examine: texts must be strings, but text {number} has type {type(each).__name__}."
            )


def _must_exist(path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        raise InputError(f"there is no file or folder {path}.") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None


def _expanded(path: Path) -> list[Path]:
    """The file itself, or the files of a folder."""
    _must_exist(path)
    if not path.is_dir():
        return [path]
    found = sorted(
        each
        for each in path.rglob("*")
        if each.suffix.lower() in SUFFIXES
        and each.is_file()
        and not any(part.startswith(".") for part in each.relative_to(path).parts)
    )
    if not found:
        raise InputError(f"the folder {path} holds no {' or '.join(SUFFIXES)} files.")
    return found


def _file(path: Path) -> Text:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    content = _decoded(raw, str(path))
    if not content.strip():
        raise InputError(f"{path} is empty; a text needs at least one word.")
    return Text(str(path), content)


def _decoded(raw: bytes, where: str) -> str:
    """UTF-8 as text; the byte order mark that some editors write is no part of it."""
    try:
        content, bad = raw.decode("utf-8"), -1
    except UnicodeDecodeError as error:
        content, bad = "", error.start
    # Zero bytes are valid UTF-8, but no text has them: they betray binary files and UTF-16.
    zero = raw.find(b"\0")
    offset = min((x for x in (bad, zero) if x >= 0), default=None)
    if offset is not None:
        raise InputError(
            f"{where} is not a text in UTF-8: byte 0x{raw[offset]:02x} at offset {offset}; "
            "save it as UTF-8 or remove it."
        )
    return content.removeprefix("\ufeff")


def _lines(path: Path, field: str) -> Iterator[Text]:
    count = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip() and raw.strip() != b"\xef\xbb\xbf":
                    count += 1
                    where = f"{path}, line {number}"
                    yield Text(f"{path}:{number}", _field(_decoded(raw, where), field, where))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    if not count:
        raise InputError(f"{path} is empty; it should hold one JSON object per line.")


def _field(line: str, field: str, where: str) -> str:
    """The text in one line of JSON."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON ({error.msg}, column {error.colno}); it must be one object."
        ) from None
    except (ValueError, RecursionError):
        raise InputError(f"{where}: a number is too long, or nested too deep.") from None
    if not isinstance(record, dict):
        raise InputError(f'{where} must be an object such as {{"{field}": "..."}}.')
    fields = cast(dict[str, Any], record)
    if field not in fields:
        there = ", ".join(map(repr, fields)) or "none"
        raise InputError(f"{where} has no field {field!r}; its fields are {there}.")
    content = fields[field]
    if not isinstance(content, str):
        kind = type(content).__name__
        raise InputError(f"{where}: the field {field!r} must be a string, not {kind}.")
    if not content.strip():
        raise InputError(f"{where}: the field {field!r} is empty; a text needs at least one word.")
    return content
