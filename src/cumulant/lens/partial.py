"""The folder of unfinished work inside that of an examination, and the move into its place.

Below PARTIAL are the journal STATE and the parts of the tables that it counts; then, in FINISHED,
the other files, which COMPLETE says are only to be moved. Each of several processes has a folder
there (`share_name`) with a journal and parts of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from cumulant.core.errors import InputError
from cumulant.core.lock import locked
from cumulant.lens.files import parquet, part_name, write_json

__all__ = [
    "ABOUT",
    "FINISHED",
    "PARTIAL",
    "STATE",
    "begun",
    "check_parts",
    "claimed",
    "clear",
    "finish_move",
    "is_complete",
    "mark_complete",
    "move_in",
    "outdated",
    "share_name",
    "unfinished",
]

PARTIAL = ".cumulant-partial"
STATE, FINISHED, COMPLETE, LOCK = "state.journal", "finished", "complete.json", "lock"

# An examination is there if this file is; it is taken away first and put in its place last.
ABOUT = "examination.json"
# What an examination and the command may leave in a folder beside it.
_KNOWN = (
    *(f"{x}.parquet" for x in ("tokens", "heads", "layers", "expansions", "partition", "inputs")),
    "top.parquet",
    *("report.html", "comparison.csv"),
)


@contextmanager
def claimed(folder: Path | None, name: str = PARTIAL) -> Generator[Path | None]:
    """The folder of unfinished work, for one run at a time; removed at the end if it holds none.

    Args:
        folder: of the examination; None yields None.
        name: of the folder inside.

    Raises:
        InputError: another run is at work there.
    """
    if folder is None:
        yield None
        return
    partial = folder / name
    try:
        with locked(partial / LOCK, str(folder)):
            try:
                yield partial
            finally:
                if partial.is_dir() and not _has_work(partial):
                    clear(partial)
    finally:
        with suppress(OSError):  # there is work in it, or another run has begun
            partial.rmdir()


def unfinished(folder: Path) -> bool:
    """Whether the folder holds work that a later run can resume."""
    return _has_work(folder / PARTIAL)


def _has_work(partial: Path) -> bool:
    return begun(partial) > 0 or is_complete(partial)


def share_name(rank: int, size: int) -> str:
    """The folder, below PARTIAL, of one of several processes."""
    return f"rank-{rank:05d}-of-{size:05d}"


def begun(partial: Path) -> int:
    """How many processes began the unfinished work; 0 if there is none."""
    if (partial / STATE).exists():
        return 1
    names = (x.parent.name for x in partial.glob(f"rank-*-of-*/{STATE}"))
    return next((int(x.rpartition("-")[2]) for x in names), 0)


def is_complete(partial: Path) -> bool:
    """Whether everything is done and only to be moved into its place."""
    return (partial / COMPLETE).exists()


def check_parts(folder: Path, count: int) -> None:
    """Parts 0 to `count` - 1 of a table must be there; later ones are removed.

    Raises:
        InputError: names the part that is missing or damaged.
    """
    reader, partial = parquet(), folder.parent
    counted = [part_name(k) for k in range(count)]
    for path in (folder / name for name in counted):
        try:
            reader.read_metadata(path)
        except (OSError, ValueError):
            what = "damaged" if path.exists() else "missing"
            raise InputError(
                f"{path} is {what}, so the unfinished examination is damaged: remove {partial}."
            ) from None
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in counted:  # written, or begun, but not counted in the journal
            path.unlink()


def clear(partial: Path, keep: Iterable[str] = ()) -> None:
    """Empty the folder of unfinished work, except for its lock."""
    for item in partial.iterdir():
        if item.name not in {LOCK, *keep}:
            _remove(item)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mark_complete(partial: Path, folder: Path) -> None:
    """From here on `finish_move` is all that is left, for this run or a later one."""
    written = {"tokens.parquet", *(x.name for x in (partial / FINISHED).iterdir())}
    write_json({"outdated": outdated(folder, written)}, partial / COMPLETE)


def outdated(folder: Path, written: Iterable[str]) -> list[str]:
    """Files of an earlier examination in the folder that the new one, with these, does not have."""
    if not (folder / ABOUT).exists():
        return []  # then they are somebody else's
    return [x for x in _KNOWN if x not in written and (folder / x).exists()]


def finish_move(partial: Path, folder: Path) -> None:
    """Move a complete examination into its place; may be interrupted anywhere and repeated."""
    finished = partial / FINISHED
    if (finished / ABOUT).exists():
        try:
            marker = json.loads((partial / COMPLETE).read_text("utf-8"))
            old = [x for x in _KNOWN if x in marker["outdated"]]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{partial / COMPLETE} is damaged: remove {partial} and examine again."
            ) from None
        if (partial / "tokens.parquet").exists():
            _put(partial / "tokens.parquet", finished / "tokens.parquet")
        move_in(finished, folder, old)
    # In this order: a journal without the marker would ask for parts that have been moved.
    clear(partial, keep=(COMPLETE,))
    (partial / COMPLETE).unlink(missing_ok=True)


def move_in(finished: Path, folder: Path, old: Iterable[str]) -> None:
    """Put the files of an examination into its place, so that no mixture of two ever loads."""
    (folder / ABOUT).unlink(missing_ok=True)
    for name in old:
        _remove(folder / name)
    for item in sorted(finished.iterdir(), key=lambda x: (x.name == ABOUT, x.name)):
        _put(item, folder / item.name)
    finished.rmdir()


def _put(item: Path, target: Path) -> None:
    if item.is_dir() or (target.is_dir() and not target.is_symlink()):
        _remove(target)
    os.replace(item, target)
