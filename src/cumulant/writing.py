"""Files that are whole or not there, and folders to put them into."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from cumulant.errors import InputError

__all__ = ["make_folder", "whole_file"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Generator[Path]:
    """A file beside the target to write into, which then takes its place."""
    target = Path(path)
    part = target.with_name(f".{target.stem}-{os.getpid()}{target.suffix}")
    try:
        yield part
        os.replace(part, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}.") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made if it is not there, or one clear line."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into the folder {path}.")
    return path
