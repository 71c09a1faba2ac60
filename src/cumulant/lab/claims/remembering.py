"""What a real model gave is kept on disk, by content: a second run only reads it.

The key is a hash of the weights' file, of the inputs, of every setting and of the sources that
measure (the library and the experiment's own file), so that nothing measured otherwise is ever
read. ``CUMULANT_CACHE`` names the folder
(default: ``cumulant`` in the user's cache folder); an empty value turns it off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import cumulant
from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, write_file

__all__ = ["remembered"]

T = TypeVar("T")
APART = ("lab", "cli", "pages", "figures", "testing")  # folders that measure nothing
SHARED = ("subjects.py", "numbering.py", "functions.py")


def remembered(
    digest: str | None, settings: dict[str, Any], compute: Callable[[], T], *, source: str
) -> T:
    """What ``compute`` returns, numbers in lists and dicts; read from disk if it was done before.

    Args:
        digest: of the model and its inputs; None for one that is not as its file says, which is
            never remembered.
        settings: all that the result depends on besides.
        compute: its result must be JSON: dicts, lists, numbers, strings.
        source: the file that measures, ``__file__``.
    """
    folder = _folder()
    if digest is None or folder is None:
        return compute()
    told = json.dumps([digest, _sources(source), settings], sort_keys=True)
    path = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or damaged: measured anew
        found = compute()
    try:
        make_folder(folder)
        write_file(path, json.dumps(found))
    except (OSError, InputError):
        pass  # a read-only home: the result is there all the same
    return found


def _folder() -> Path | None:
    named = os.environ.get("CUMULANT_CACHE")
    if named is not None:
        return Path(named) / "claims" if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cumulant" / "claims"


@cache
def _sources(own: str) -> str:
    """A hash of the library, what experiments share about real models, and one file more."""
    root = Path(cumulant.__file__).parent
    files = [x for x in sorted(root.rglob("*.py")) if x.relative_to(root).parts[0] not in APART]
    files += [Path(__file__).with_name(name) for name in SHARED]
    found = hashlib.sha256()
    for path in [*files, Path(own)]:
        found.update(path.read_bytes())
    return found.hexdigest()
